"""Weights from files into modules and back."""

from clearhead.weights.files import load_tensors, save_tensors
from clearhead.weights.fill import fill
from clearhead.weights.pretrained import Pretrained, is_pretrained, load_pretrained
from clearhead.weights.save import save_pretrained

__all__ = [
    "Pretrained",
    "fill",
    "is_pretrained",
    "load_pretrained",
    "load_tensors",
    "save_pretrained",
    "save_tensors",
]
