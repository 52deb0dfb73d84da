"""Tensors in, tensors out: everything that computes, and nothing else."""

from clearhead.core.attention import Attention
from clearhead.core.context import Cache, Sequence
from clearhead.core.model import Output, Transformer, build
from clearhead.core.rare.multi_head_attention import MultiHeadAttention

__all__ = ["Attention", "Cache", "MultiHeadAttention", "Output", "Sequence", "Transformer", "build"]


def __dir__() -> list[str]:
    return __all__.copy()
