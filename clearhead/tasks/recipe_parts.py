"""The values that recipes of several tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, Value

_MODERN: Final[Mapping[str, Value]] = {"norm": "rms", "norm_place": "pre", "positions": "rotary"}
GATED: Final[Mapping[str, Value]] = {**_MODERN, "activation": "silu", "gated": True}
MUON: Final[Mapping[str, Value]] = {"optimizer": "muon", "schedule": "cosine", "warmup": 0.1, "clip": 1.0}
# The positions of T5: as good as rotary ones here, and an architecture that others read.
BUCKETS: Final[Mapping[str, Value]] = {
    "norm": "rms", "norm_place": "pre", "positions": "buckets", "bias": False,
}  # fmt: skip
ENCODER: Final = Architecture(GATED, saved_as="eurobert")
TEXT_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 2048, "learning_rate": 5e-3, "weight_decay": 0.1, "metric": "loss",
}  # fmt: skip
WORDS_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 1024, "learning_rate": 4e-3, "weight_decay": 0.1, "metric": "score",
}  # fmt: skip
