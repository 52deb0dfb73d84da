"""clearhead: Transformers you can see through."""

from clearhead import spec
from clearhead.core import Cache, MultiHeadAttention, Output, Transformer, build
from clearhead.errors import InputError, RunFailure
from clearhead.zoo import presets

__all__ = [
    "Cache",
    "InputError",
    "MultiHeadAttention",
    "Output",
    "RunFailure",
    "Transformer",
    "build",
    "presets",
    "spec",
]
