"""clearhead: Transformers you can see through."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead import spec, surgery
    from clearhead.core import Cache, MultiHeadAttention, Output, Transformer, build
    from clearhead.errors import InputError, RunFailure
    from clearhead.generate.candidate import Generation, Hypothesis
    from clearhead.generate.scoring import PairScore
    from clearhead.loading import load
    from clearhead.model import Model
    from clearhead.predict.answer import Answer
    from clearhead.predict.classify import Classification
    from clearhead.predict.fill import Filled
    from clearhead.predict.tag import Entity
    from clearhead.zoo import presets

# Names are fetched when they are first used: importing torch takes seconds, which a typing mistake should not cost.
_HOMES = {
    "Answer": "clearhead.predict.answer",
    "Cache": "clearhead.core",
    "Classification": "clearhead.predict.classify",
    "Entity": "clearhead.predict.tag",
    "Filled": "clearhead.predict.fill",
    "Generation": "clearhead.generate.candidate",
    "Hypothesis": "clearhead.generate.candidate",
    "InputError": "clearhead.errors",
    "Model": "clearhead.model",
    "MultiHeadAttention": "clearhead.core",
    "Output": "clearhead.core",
    "PairScore": "clearhead.generate.scoring",
    "RunFailure": "clearhead.errors",
    "Transformer": "clearhead.core",
    "build": "clearhead.core",
    "load": "clearhead.loading",
    "presets": "clearhead.zoo",
    "spec": "clearhead",
    "surgery": "clearhead",
}

__all__ = [
    "Answer",
    "Cache",
    "Classification",
    "Entity",
    "Filled",
    "Generation",
    "Hypothesis",
    "InputError",
    "Model",
    "MultiHeadAttention",
    "Output",
    "PairScore",
    "RunFailure",
    "Transformer",
    "build",
    "load",
    "presets",
    "spec",
    "surgery",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead' has no attribute '{name}'")
    home = _HOMES[name]
    if home == "clearhead":
        return importlib.import_module(f"clearhead.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
