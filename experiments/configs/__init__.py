"""Frozen experiments, one a file."""
