"""Tensors in files and in modules, and LoRA."""
