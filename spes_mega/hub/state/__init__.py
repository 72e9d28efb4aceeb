"""The hub's state directory, a durable log of rounds, and what it holds."""
