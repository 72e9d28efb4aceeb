"""spes-mega: decentralized, memory-efficient pretraining of Mixture-of-Experts language models by SPES."""

__version__ = "0.1.0"
