"""Checkpoint loading: Hugging Face folders, GGUF files and Orbax."""
