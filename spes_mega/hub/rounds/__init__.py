"""The state machine of a run: which round is open, who takes part, and when the round closes."""
