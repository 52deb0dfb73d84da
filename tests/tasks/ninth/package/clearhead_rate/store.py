"""Tokenized texts with their numbers: prepared once, and memory-mapped from then on.

Shape suffixes: N texts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Indices, encode_texts
from clearhead.data.sources.tables import Share, TableSource
from clearhead.data.stores.store import Encoded, Store, StoreKind, format_counts, joint_lengths, prepare_store
from clearhead.text.tokenizer import Tokenizer
from clearhead_rate.data import Bounds, read_rated


@dataclass(frozen=True)
class Units:
    """What a number is measured in: an output of the model is (number - mean) / scale."""

    mean: float
    scale: float


def _report(store: Store) -> str:
    words = {"cut": "cut to the longest that is read", "empty": "empty and left out"}
    return ", ".join([f"{len(store):,} rated texts", *format_counts(store.facts["report"], words)])


RATED: Final = StoreKind("rated", "rated texts", ("text",), _report, joint_lengths)
"""Stores of rated texts: the ids of each text, and in the array "number" its number."""


def units_of(store: Store) -> Units:
    """Return the units of the training data."""
    return Units(**store.facts["units"])


def targets(store: Store, rows: Indices) -> Float32[ndarray, " rows"]:
    """Return the outputs that the model should have for some texts."""
    units = units_of(store)
    outputs_N: Float32[ndarray, " rows"] = ((store.arrays["number"][rows] - units.mean) / units.scale).astype(
        np.float32
    )
    return outputs_N


def prepare_rated(
    source: TableSource, tokenizer: Tokenizer, *, max_length: int, bounds: Bounds, units: Units | None, share: Share
) -> Store:
    """Tokenize rated texts, or open what an earlier run made of the same content.

    Args:
        source: where they are.
        tokenizer: turns them into ids.
        max_length: tokens of the longest sequence, special ones included; longer texts are truncated.
        bounds: of the numbers.
        units: of the training data; None: this is the training data.
        share: from which to which share of the source, 0 to 1.

    Raises:
        InputError: all texts are empty, or a number is not as `read_rated` expects it.
    """
    num_special = tokenizer.special_tokens.num_added()

    def encode() -> Encoded:
        rows, room = read_rated(source, share, bounds), max_length - num_special
        if room < 1:
            raise InputError(f"max_length is {max_length}; expected at least {num_special + 1}")
        ids, numbers = encode_texts(rows["text"], tokenizer), np.array(rows["number"], np.float64)
        has_text = ids.lengths > 0
        if not has_text.any():
            raise InputError(
                f"{rows.location(0)}: all {len(rows)} texts from here on are empty; nothing is left to rate"
            )
        report = {"cut": int((ids.lengths > room).sum()), "empty": int((~has_text).sum())}
        numbers = numbers[has_text]
        measured = units or Units(float(numbers.mean()), float(numbers.std()) or 1.0)
        text = ids.truncate(np.minimum(ids.lengths, room), has_text)
        return {"text": text, "number": numbers}, {"report": report, "units": asdict(measured)}

    known = None if units is None else asdict(units)
    inputs = [source.identity(), tokenizer.fingerprint, max_length, bounds.model_dump(), known, share]
    return prepare_store(RATED, inputs, encode, special=(num_special,))
