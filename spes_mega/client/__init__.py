"""The node's side of the wire."""
