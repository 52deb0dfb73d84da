"""Weights from files into modules and back."""

from clearhead.weights.files import load_tensors, save_tensors
from clearhead.weights.fill import fill

__all__ = ["fill", "load_tensors", "save_tensors"]
