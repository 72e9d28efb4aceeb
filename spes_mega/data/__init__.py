"""All that a training step reads: text to indexed datasets, and the order in which samples are taken."""
