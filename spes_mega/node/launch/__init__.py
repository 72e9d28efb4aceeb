"""Starting a node's ranks, watching them, and saying how they ended."""
