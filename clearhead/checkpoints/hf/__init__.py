"""Hugging Face checkpoints: configs and tensors into specs and modules, and back."""
