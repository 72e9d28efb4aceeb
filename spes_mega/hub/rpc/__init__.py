"""The hub's port: who is let in, and the RPCs."""
