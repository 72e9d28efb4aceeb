"""The hub: holds the global weights, takes what the nodes push, and closes the rounds of a run."""
