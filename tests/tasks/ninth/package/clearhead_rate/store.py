"""Tokenized texts with their numbers: prepared once, and memory-mapped from then on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float32, Float64
from numpy import ndarray

from clearhead.data.sources.tables import Share, Table, TableSource
from clearhead.data.stores.arrays import ArrayStore, Indices, Rows, encode_texts, write_arrays
from clearhead.data.stores.cache import load_or_make
from clearhead.errors import InputError
from clearhead.text.tokenizer import Tokenizer
from clearhead_rate.data import Bounds, read_rated


@dataclass(frozen=True)
class Units:
    """What a number is measured in: an output of the model is (number - mean) / scale."""

    mean: float
    scale: float


class RatedStore(ArrayStore):
    """Tokenized texts with numbers.

    Args:
        folder: of the store.
        tokenizer: of the texts.

    Attributes:
        report: what became of the texts.
        texts: their ids, without special ids.
        numbers: of each text.
        units: of the training data.
    """

    contents: ClassVar[str] = "rated texts"

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(folder)
        self.report = self.record["report"]
        self.units = Units(**self.record["units"])
        self.texts = (self.ragged("text"),)
        self.numbers: Float64[ndarray, " texts"] = self.arrays["number"]
        self._num_special = tokenizer.special_tokens.num_added()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def input_lengths(self) -> tuple[Rows]:
        """As of `ArrayStore`."""
        return (self.texts[0].lengths + self._num_special,)

    def targets(self, rows: Indices) -> Float32[ndarray, " rows"]:
        """Return the outputs that the model should have for some texts."""
        outputs_N: Float32[ndarray, " rows"] = (self.numbers[rows] - self.units.mean) / self.units.scale
        return outputs_N.astype(np.float32)


def prepare_rated(
    source: TableSource, tokenizer: Tokenizer, *, max_length: int, bounds: Bounds, units: Units | None, share: Share
) -> RatedStore:
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
    known = None if units is None else asdict(units)
    inputs = [source.identity(), tokenizer.fingerprint, max_length, bounds.model_dump(), known, share]

    def make(folder: Path) -> None:
        _write(folder, read_rated(source, share, bounds), tokenizer, max_length, units)

    return load_or_make("rated", inputs, lambda folder: RatedStore(folder, tokenizer), make)


def _write(folder: Path, rows: Table, tokenizer: Tokenizer, max_length: int, units: Units | None) -> None:
    ids, numbers = encode_texts(rows["text"], tokenizer), np.array(rows["number"], np.float64)
    room, has_text = max_length - tokenizer.special_tokens.num_added(), ids.lengths > 0
    if room < 1:
        raise InputError(f"max_length is {max_length}; expected at least {max_length - room + 1}")
    if not has_text.any():
        raise InputError(f"{rows.place(0)}: all {len(rows)} texts from here on are empty; nothing is left to rate")
    num_cut, num_empty = int((ids.lengths > room).sum()), int((~has_text).sum())
    report = f"{len(rows):,} rated texts, {num_cut:,} cut to {max_length:,} tokens, {num_empty:,} empty and left out"
    ids, numbers = ids.truncate(np.minimum(ids.lengths, room), has_text), numbers[has_text]
    units = units or Units(float(numbers.mean()), float(numbers.std()) or 1.0)
    write_arrays(folder, {"text": ids, "number": numbers}, {"report": report, "units": asdict(units)})
