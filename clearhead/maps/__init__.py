"""Activations captured and edited at their addresses, and what attention weights say."""
