"""Tensors in, tensors out: everything that computes, and nothing else."""

from clearhead.core.attention import Attention, MultiHeadAttention
from clearhead.core.cache import Cache
from clearhead.core.model import Output, Transformer, build
from clearhead.core.stack import Sequence

__all__ = ["Attention", "Cache", "MultiHeadAttention", "Output", "Sequence", "Transformer", "build"]
