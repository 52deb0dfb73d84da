"""The names of presets, to be looked up without the specs that they stand for."""

from collections.abc import Mapping
from types import MappingProxyType

FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "transformer": "transformer_base",
        "transformer-big": "transformer_big",
        "bert": "bert_base",
        "gpt2": "gpt2",
        "t5-small": "t5_small",
        "llama-tiny": "llama_tiny",
    }
)
"""The names of run files, and of the functions that build their specs."""
