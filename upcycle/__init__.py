"""Dense checkpoints to Mixture-of-Experts checkpoints."""
