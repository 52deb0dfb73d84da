"""Faster functions for training on a CPU, forward and backward, and the modules that use them."""
