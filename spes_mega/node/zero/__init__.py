"""The DeepSpeed engine, and weights and moments read and set through ZeRO."""
