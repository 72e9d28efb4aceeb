"""Families of models: how each names its tensors and writes its config.json."""
