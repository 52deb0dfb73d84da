"""Capture and edit activations at their addresses, and compute attention maps."""
