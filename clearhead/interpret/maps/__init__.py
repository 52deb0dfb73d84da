"""Activations captured and edited at their addresses, and attention maps."""
