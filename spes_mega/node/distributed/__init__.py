"""The ranks of a node, on one machine or several."""
