"""Tensors in files and in the slots of a module; LoRA."""
