"""Checkpoints on disk: run directories, Hugging Face folders, and the tensors in both."""
