"""What runs under the deepspeed launcher: one node of a run."""
