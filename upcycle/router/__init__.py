"""The router of a layer that gets experts."""
