"""Store of tokenized texts with their numbers: prepared once, then memory-mapped.

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
    """Mean and scale of the numbers: an output of the model is (number - mean) / scale."""

    mean: float
    scale: float


def _report(store: Store) -> str:
    words = {"cut": "cut to max_length", "empty": "empty and left out"}
    return ", ".join([f"{len(store):,} rated texts", *format_counts(store.facts["report"], words)])


RATED: Final = StoreKind("rated", "rated texts", ("text",), _report, joint_lengths)
"""Kind of store for rated texts: the ids of each text, and its number in the array "number"."""


def units_of(store: Store) -> Units:
    """Return the mean and scale of the training data."""
    return Units(**store.facts["units"])


def targets(store: Store, rows: Indices) -> Float32[ndarray, " rows"]:
    """Return the right outputs of the model for the texts at `rows`."""
    units = units_of(store)
    outputs_N: Float32[ndarray, " rows"] = ((store.arrays["number"][rows] - units.mean) / units.scale).astype(
        np.float32
    )
    return outputs_N


def prepare_rated(
    source: TableSource, tokenizer: Tokenizer, *, max_length: int, bounds: Bounds, units: Units | None, share: Share
) -> Store:
    """Tokenize rated texts, or open the cached store of the same content.

    Args:
        source: the source of the texts.
        tokenizer: the tokenizer of the run.
        max_length: the longest sequence in tokens, special tokens included; longer texts are truncated.
        bounds: the bounds of the numbers.
        units: the units of the training data; None means that this is the training data.
        share: the share of the rows to read, as start and end, 0 to 1.

    Raises:
        InputError: all texts are empty, or `read_rated` refuses a number.
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
                f"{rows.location(0)}: all {len(rows)} texts from here on are empty; check the column of the texts"
            )
        report = {"cut": int((ids.lengths > room).sum()), "empty": int((~has_text).sum())}
        numbers = numbers[has_text]
        measured = units or Units(float(numbers.mean()), float(numbers.std()) or 1.0)
        text = ids.truncate(np.minimum(ids.lengths, room), has_text)
        return {"text": text, "number": numbers}, {"report": report, "units": asdict(measured)}

    known = None if units is None else asdict(units)
    inputs = [source.identity(), tokenizer.fingerprint, max_length, bounds.model_dump(), known, share]
    return prepare_store(RATED, inputs, encode, special=(num_special,))
