"""Where a node gets weights from and where it sends them: a hub, or its own disk."""
