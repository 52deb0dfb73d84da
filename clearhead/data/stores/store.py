"""Stores of prepared examples: arrays in a folder, with a file of facts about them. Also the stores of text pairs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.base.files import write_json
from clearhead.data.arrays import Ragged, Rows, encode_texts
from clearhead.data.cache import FORMAT, load_or_make
from clearhead.data.sources.pairs import equal_sides_warning, read_pairs
from clearhead.data.sources.tables import WHOLE, Share, TableSource
from clearhead.text.pair import TokenizerPair

_RECORD = "store.json"
Arrays = Mapping[str, ndarray | Ragged]
Encoded = tuple[Arrays, Mapping[str, Any]]
"""The arrays of a store, and facts about them as JSON values."""


class ArrayWriter:
    """Writes named arrays into a folder.

    Args:
        folder: an existing folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forms: dict[str, tuple[str, list[int]]] = {}
        self._hashes: dict[str, Any] = {}

    def append(self, name: str, rows: ndarray | Ragged) -> None:
        """Append rows to a named array; dtype and shape must match except for the first axis."""
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

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Finish the store: write a file with facts, array shapes and a hash of all arrays."""
        content = [[name, *form, self._hashes[name].hexdigest()] for name, form in self._forms.items()]
        identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        write_json(self._folder / _RECORD, {**FORMAT.header(), **facts, "arrays": self._forms, "identity": identity})


@dataclass(frozen=True)
class StoreKind:
    """A kind of stores, such as those of text pairs: the properties that all stores of the kind share.

    Attributes:
        name: the folder of these stores in the cache.
        contents: the noun for their contents in messages.
        texts: the names of their `Ragged` arrays of ids; a store may lack the last of them.
        report: a function that returns a sentence about the examples that were read, kept and dropped.
        lengths: a function that returns, for each stack of a model, the number of ids of each example, without special
            ids.
    """

    name: str
    contents: str
    texts: tuple[str, ...]
    report: Callable[[Store], str]
    lengths: Callable[[Store], Sequence[Rows]]


class Store:
    """A store of prepared examples in memory-mapped arrays.

    Args:
        folder: a folder that an `ArrayWriter` wrote.
        kind: the kind of store.
        special: the number of special ids per example, for each stack of a model.

    Attributes:
        arrays: the arrays by name.
        facts: further values of the store, such as the counts of its report, as JSON values.
        identity: a hash of all arrays; checkpoints store it.
        texts: the ids of the texts, without special ids.

    Raises:
        InputError: the folder does not contain a complete store.
    """

    def __init__(self, folder: Path, kind: StoreKind, special: Sequence[int]) -> None:
        self.folder: Path = folder
        self.kind: StoreKind = kind
        self._special = special
        try:
            self.facts: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            FORMAT.check(self.facts, folder)
            self.identity: str = str(self.facts["identity"])
            forms = self.facts["arrays"]
            self.arrays: dict[str, np.ndarray] = {
                name: _map_array(folder / f"{name}.bin", *form) for name, form in forms.items()
            }
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: not a whole store of {kind.contents} ({error}); prepare the data again"
            ) from None
        self.texts: tuple[Ragged, ...] = tuple(
            self.ragged_rows(name) for name in kind.texts if f"{name}_ids" in self.arrays
        )

    def __len__(self) -> int:
        return len(self.input_lengths[0])

    @property
    def report(self) -> str:
        """A sentence about the examples that were read, kept and dropped."""
        return self.kind.report(self)

    @cached_property
    def input_lengths(self) -> tuple[Rows, ...]:
        """The number of ids that each stack of a model reads of each example, special ids included."""
        lengths = self.kind.lengths(self)
        return tuple(of_stack + special for of_stack, special in zip(lengths, self._special, strict=True))

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The number of tokens of the longest example, for the first stack and for the last stack."""
        lengths = self.input_lengths
        return int(lengths[0].max()), int(lengths[-1].max())

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all examples together."""
        return sum(int(lengths.sum()) for lengths in self.input_lengths)

    def ragged_rows(self, name: str) -> Ragged:
        """Return the rows of an array that was written as `Ragged`."""
        return Ragged(self.arrays[f"{name}_ids"], self.arrays[f"{name}_offsets"])


def joint_lengths(store: Store) -> list[Rows]:
    """Return the number of ids of all texts of each example together, for models that read them with one stack."""
    lengths: Rows = np.sum([text.lengths for text in store.texts], axis=0)
    return [lengths]


def separate_lengths(store: Store) -> list[Rows]:
    """Return the lengths of the texts of each example, for models that read each text with a separate stack."""
    return [text.lengths for text in store.texts]


def prepare_store(
    kind: StoreKind, inputs: Sequence[object], encode: Callable[[], Encoded], *, special: Sequence[int]
) -> Store:
    """Encode examples into a store, or open the cached store of the same inputs.

    Args:
        kind: the kind of store.
        inputs: JSON values that determine the examples.
        encode: a function that returns the arrays and the facts, as in `Store`.
        special: the number of special ids per example that each stack of a model reads.

    Raises:
        RunFailure: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        arrays, facts = encode()
        writer = ArrayWriter(folder)
        for name, rows in arrays.items():
            writer.append(name, rows)
        writer.finish(facts)

    return load_or_make(kind.name, inputs, lambda folder: Store(folder, kind, special), make)


def format_counts(counts: Mapping[str, Any], words: Mapping[str, str]) -> list[str]:
    """Return "COUNT WORDS" for each count that is not 0, in the order of `words`."""
    return [f"{counts[name]:,} {text}" for name, text in words.items() if counts[name]]


def _map_array(file: Path, dtype: str, shape: Sequence[int]) -> ndarray:
    expected = np.dtype(dtype).itemsize * math.prod(shape)
    if (size := file.stat().st_size) != expected:
        raise ValueError(f"{file.name} has {size} bytes instead of {expected}")
    return np.memmap(file, dtype=dtype, mode="r", shape=tuple(shape)).view(ndarray)


def _report(store: Store) -> str:
    counts = store.facts["report"]
    return "; ".join(filter(None, [_format_filter_report(counts), counts["note"]]))


def _format_filter_report(counts: Mapping[str, int]) -> str:
    """Return the report of a filter of pairs: numbers read, kept and dropped, with reasons."""
    dropped = counts["empty"] + counts["too_long"] + counts["mismatched"]
    return (
        f"{counts['kept'] + dropped:,} pairs read, {counts['kept']:,} kept, {dropped:,} dropped "
        f"({counts['empty']:,} empty, {counts['too_long']:,} too long, {counts['mismatched']:,} badly matched)"
    )


PAIRS = StoreKind("pairs", "tokenized pairs", ("source", "target"), _report, separate_lengths)
"""The kind of stores of pairs: texts "source" and "target"; array "lines" has the number of each pair, from 0."""


def keep_pairs(
    source_lengths: Rows,
    target_lengths: Rows,
    *,
    max_length: int,
    max_ratio: float | None,
    num_special: tuple[int, int] = (1, 1),
) -> tuple[Bool[ndarray, " rows"], dict[str, int]]:
    """Return a mask of the pairs that pass the length filters, and the numbers of kept and dropped pairs.

    Args:
        source_lengths: the number of tokens of each source, without special tokens.
        target_lengths: the number of tokens of each target, without special tokens.
        max_length: the maximum length of a side in tokens, special tokens included.
        max_ratio: the maximum ratio of the longer side to the shorter, both with an end token. None means no limit.
        num_special: the number of special tokens of a source and of a target.

    Returns:
        A mask that is True for each pair to keep, and the number of pairs kept and dropped, by reason.
    """
    shorter, longer = np.minimum(source_lengths, target_lengths) + 1, np.maximum(source_lengths, target_lengths) + 1
    empty = shorter == 1
    longest = np.maximum(source_lengths + num_special[0], target_lengths + num_special[1])
    too_long = ~empty & (longest > max_length)
    mismatched = np.zeros_like(empty) if max_ratio is None else ~empty & ~too_long & (longer > max_ratio * shorter)
    keep = ~(empty | too_long | mismatched)
    reasons = {"kept": keep, "empty": empty, "too_long": too_long, "mismatched": mismatched}
    return keep, {name: int(rows.sum()) for name, rows in reasons.items()}


def prepare_pairs(
    source: TableSource,
    tokenizers: TokenizerPair,
    *,
    max_length: int,
    max_ratio: float | None,
    training: bool,
    extra: tuple[int, int] | None = None,
    share: Share = WHOLE,
) -> Store:
    """Tokenize and filter the pairs of a source into a store, or open the cached store of the same content.

    Args:
        source: the source of the pairs.
        tokenizers: the tokenizers of both sides.
        max_length: the maximum length of a side in tokens, special tokens included.
        max_ratio: the maximum ratio of the longer side to the shorter, both with an end token. None means no limit.
        training: True if the pairs are training data. False keeps pairs that exceed `max_ratio`, since a score on
            filtered pairs would be too good.
        extra: the number of special tokens of a source and of a target. None means those of a translation.
        share: the share of the pairs to read, as in `read_table`.

    Returns:
        A store of the kind `PAIRS` with the pairs that were kept; its report counts the others.

    Raises:
        InputError: the source cannot be read, a limit is out of range, or no pair is left.
        RunFailure: the cache cannot be written.
    """
    if max_length < 2:
        raise InputError(f"max_length is {max_length}; expected at least 2, one token and the end token")
    if max_ratio is not None and not max_ratio >= 1:
        raise InputError(f"max_ratio is {max_ratio}; expected a number of at least 1")
    ratio = max_ratio if training else None
    num_special = extra or (
        len(tokenizers.source.special_tokens.for_source),
        len(tokenizers.target.special_tokens.for_target) - 1,
    )

    def encode() -> Encoded:
        data = read_pairs(source, share)
        sources = encode_texts(data["source"], tokenizers.source)
        targets = encode_texts(data["target"], tokenizers.target)
        keep, counts = keep_pairs(
            sources.lengths, targets.lengths, max_length=max_length, max_ratio=ratio, num_special=num_special
        )
        if not counts["kept"]:
            raise InputError(
                f"{data.location(0)}: no pair from here on can be used ({_format_filter_report(counts)}); "
                f"max_length is {max_length} tokens, max_ratio is {'off' if ratio is None else ratio}"
            )
        arrays: Arrays = {
            "source": sources.truncate(sources.lengths, keep),
            "target": targets.truncate(targets.lengths, keep),
            "lines": np.flatnonzero(keep),
        }
        return arrays, {"report": {**counts, "note": equal_sides_warning(data)}}

    inputs = [source.identity(), tokenizers.fingerprint, max_length, ratio, num_special, share]
    return prepare_store(PAIRS, inputs, encode, special=num_special)
