"""Weights from files into modules and back."""

from clearhead.weights.fill import fill

__all__ = ["fill"]
