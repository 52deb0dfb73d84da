"""Named arrays in a folder: appended part by part, memory-mapped when they are read."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.errors import InputError
from clearhead.files import write_json
from clearhead.text.tokenizer import Tokenizer

Ids = Integer[ndarray, " tokens"]
Rows = Int64[ndarray, " rows"]
Indices = Int64[ndarray, " _"]

_RECORD = "store.json"
_CHUNK_TEXTS = 20_000


@dataclass(frozen=True)
class Ragged:
    """Rows of ids of different lengths, one behind the other.

    Args:
        ids: the ids of all rows.
        offsets: where each row starts; the last number is where the last row ends.
    """

    ids: Ids
    offsets: Int64[ndarray, " boundaries"]

    @classmethod
    def of(cls, ids: Ids, lengths: Rows) -> Ragged:
        """Return rows of some lengths."""
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """The number of ids of each row."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> int:
        """The most ids of a row."""
        return int(self.lengths.max())

    @property
    def row_numbers(self) -> Int64[ndarray, " tokens"]:
        """The row of each id."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Int64[ndarray, " tokens"]:
        """The position of each id in its row, counted from 0."""
        return positions(self.lengths)

    def __getitem__(self, index: int | np.int64) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: Indices) -> Ragged:
        """Return some rows, in the order of their numbers."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        return Ragged.of(self.ids[positions(lengths) + np.repeat(starts, lengths)], lengths)

    def keep(self, kept: Bool[ndarray, " tokens"]) -> Ragged:
        """Return all rows without the ids that are not kept."""
        counts = np.bincount(self.row_numbers[kept], minlength=len(self))
        return Ragged.of(self.ids[kept], counts.astype(np.int64))

    def truncate(self, lengths: Rows, keep: Bool[ndarray, " rows"]) -> Ragged:
        """Return the rows to keep, each with its first ids only.

        Args:
            lengths: how many ids of each row remain.
            keep: True for each row to keep.
        """
        lengths = np.where(keep, lengths, 0)
        counts = np.stack([lengths, self.lengths - lengths], axis=1).ravel()
        return Ragged.of(self.ids[np.repeat(np.tile([True, False], len(lengths)), counts)], lengths[keep])


def positions(lengths: Rows) -> Int64[ndarray, " items"]:
    """Number the items of each row from 0, for rows behind each other."""
    counted: Int64[ndarray, " items"] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted


Arrays = Mapping[str, ndarray | Ragged]


def id_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the narrowest dtype that holds the ids of a tokenizer."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4")


def pack(rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> Ragged:
    """Put lists of ids behind each other."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = itertools.chain.from_iterable(rows)
    return Ragged.of(np.fromiter(flat, dtype=dtype, count=int(lengths.sum())), lengths)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> Ragged:
    """Return the ids of each text, without special ids."""
    parts = [
        pack(tokenizer.encode_batch(texts[start : start + _CHUNK_TEXTS]), id_dtype(tokenizer))
        for start in range(0, len(texts), _CHUNK_TEXTS)
    ]
    return Ragged.of(np.concatenate([part.ids for part in parts]), np.concatenate([part.lengths for part in parts]))


class ArrayWriter:
    """Writes named arrays into a folder.

    Args:
        folder: where the files go; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forms: dict[str, tuple[str, list[int]]] = {}
        self._hashes: dict[str, Any] = {}

    def append(self, name: str, rows: ndarray | Ragged) -> None:
        """Append rows to an array; the dtype and all axes but the first stay the same."""
        if isinstance(rows, Ragged):
            self.append(f"{name}_ids", rows.ids)
            self.append(f"{name}_offsets", rows.offsets)
            return
        rows = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
        count = self._forms[name][1][0] if name in self._forms else 0
        self._forms[name] = (rows.dtype.str, [count + len(rows), *rows.shape[1:]])
        self._hashes.setdefault(name, hashlib.sha256()).update(rows.data)
        with (self._folder / f"{name}.bin").open("ab") as file:
            file.write(rows.data)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the record beside the arrays.

        Args:
            record: JSON values that belong to the arrays.
        """
        content = [[name, *form, self._hashes[name].hexdigest()] for name, form in self._forms.items()]
        identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        write_json(self._folder / _RECORD, {**record, "arrays": self._forms, "identity": identity})


def write_arrays(folder: Path, arrays: Arrays, record: Mapping[str, Any]) -> None:
    """Write named arrays and the record that belongs to them into an empty folder."""
    writer = ArrayWriter(folder)
    for name, rows in arrays.items():
        writer.append(name, rows)
    writer.finish(record)


class ArrayStore:
    """Named arrays in a folder, memory-mapped.

    Args:
        folder: what an `ArrayWriter` wrote.

    Attributes:
        arrays: by name.
        record: JSON values that belong to the arrays.
        identity: a hash of all arrays; a checkpoint remembers it.
        report: what became of the examples, as text or with a text of its own.
        texts: the ids of the texts of labelled examples, without special ids.

    Raises:
        InputError: the folder does not hold a whole store.
    """

    contents: ClassVar[str] = "arrays"
    report: object
    texts: tuple[Ragged, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.record: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            self.identity = str(self.record["identity"])
            forms = self.record["arrays"]
            self.arrays = {name: _mapped(folder / f"{name}.bin", *form) for name, form in forms.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: not a whole store of {self.contents} ({error}); prepare the data again"
            ) from None

    @property
    def input_lengths(self) -> tuple[Rows, ...]:
        """The number of ids that each stack of a model reads of each example, special ids included."""
        raise NotImplementedError

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The largest of the first and of the last `input_lengths`."""
        lengths = self.input_lengths
        return int(lengths[0].max()), int(lengths[-1].max())

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all examples together."""
        return sum(int(side.sum()) for side in self.input_lengths)

    def ragged(self, name: str) -> Ragged:
        """Return rows that were written as `Ragged`."""
        return Ragged(self.arrays[f"{name}_ids"], self.arrays[f"{name}_offsets"])


def _mapped(file: Path, dtype: str, shape: Sequence[int]) -> ndarray:
    expected = np.dtype(dtype).itemsize * math.prod(shape)
    if (size := file.stat().st_size) != expected:
        raise ValueError(f"{file.name} has {size} bytes instead of {expected}")
    return np.memmap(file, dtype=dtype, mode="r", shape=tuple(shape)).view(ndarray)
