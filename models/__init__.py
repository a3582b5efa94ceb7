"""Flax Linen decoders, their configs, checkpoints and tokenizers."""
