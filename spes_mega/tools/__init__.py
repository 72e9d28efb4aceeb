"""Commands without a room of their own."""
