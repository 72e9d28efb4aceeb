"""Megatron-Core's parameter names and fused tensors, against the canonical ones."""
