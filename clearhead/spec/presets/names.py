"""Names of presets, which can be looked up without importing specs."""

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
"""The preset names of run files, and the functions that return their specs."""
