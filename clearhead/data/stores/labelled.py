"""Tokenized texts with labels: stored once and memory-mapped from then on.

Shape suffixes: N texts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Int64, Integer
from numpy import ndarray

from clearhead.data.sources.labelled import read_labelled, text_columns
from clearhead.data.sources.tables import WHOLE, Share, Table, TableSource
from clearhead.data.stores.arrays import ArrayStore, Ids, Ragged, Rows, encode_texts, write_arrays
from clearhead.data.stores.cache import load_or_make
from clearhead.data.stores.label_set import LabelSet, learn_labels
from clearhead.errors import InputError
from clearhead.tasks.record import LabelKind
from clearhead.text.long_texts import CHARACTERS_PER_TOKEN
from clearhead.text.tokenizer import Tokenizer

_COLUMNS = ("first", "second")


@dataclass(frozen=True)
class LabelReport:
    """What became of the examples of a source.

    Args:
        kept: examples in the store.
        empty: dropped because a text has no token.
        cut: kept, but truncated.
        first_empty: where the first empty example is; an empty string if there is none.
        max_length: the longest sequence that was allowed, special ids included.
        labels: how often each label occurs in the examples read.
    """

    kept: int
    empty: int
    cut: int
    first_empty: str
    max_length: int
    labels: str

    def __str__(self) -> str:
        parts = [f"{self.kept + self.empty:,} labelled texts read, {self.kept:,} kept"]
        if self.empty:
            parts.append(f"{self.empty:,} empty and dropped (the first at {self.first_empty})")
        if self.cut:
            parts.append(f"{self.cut:,} cut to their first {self.max_length:,} tokens")
        return f"{', '.join(parts)}; {self.labels}"


class LabelStore(ArrayStore):
    """Tokenized texts, or pairs of texts, with labels.

    Args:
        folder: the store's folder.
        tokenizer: what the texts were tokenized with.

    Attributes:
        report: what became of the examples.
        labels: what the labels mean.
        texts: the ids of the texts, or of the first and of the second texts of pairs, without special ids.
        values: the labels as `LabelSet.encode` returns them.
        rows: for each example, its number among those read, counted from 0.
    """

    contents: ClassVar[str] = "labelled texts"

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(folder)
        self.report: LabelReport = LabelReport(**self.record["report"])
        self.labels = LabelSet(**{**self.record["labels"], "names": tuple(self.record["labels"]["names"])})
        self.texts = tuple(self.ragged(name) for name in _COLUMNS if f"{name}_ids" in self.arrays)
        self.values: ndarray = self.arrays["labels"]
        self.rows: Rows = self.arrays["rows"]
        self._num_special = tokenizer.special_tokens.num_added(paired=self.is_paired)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_paired(self) -> bool:
        """Whether each example is a pair of texts."""
        return len(self.texts) == 2

    @property
    def lengths(self) -> Rows:
        """The length of each sequence, special ids included."""
        lengths: Rows = np.sum([part.lengths for part in self.texts], axis=0) + self._num_special
        return lengths

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The lengths of what the model reads of each example."""
        return (self.lengths,)

    def ids(self, index: int | np.int64) -> tuple[Ids, ...]:
        """Return the ids of one text, or of the two of a pair."""
        return tuple(part[index] for part in self.texts)


def prepare_labelled(
    source: TableSource,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    kind: LabelKind,
    labels: LabelSet | None = None,
    share: Share = WHOLE,
) -> LabelStore:
    """Tokenize labelled texts, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest sequence in tokens, special ids included; longer ones are truncated.
        kind: what a label is.
        labels: the labels of the training data; None: this is the training data.
        share: which part of the source, from one share of its examples to another.

    Raises:
        InputError: the source or a label is unusable, or no text is left.
        RunFailure: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        data = read_labelled(source, share)
        _write(folder, data, tokenizer, max_length, labels or learn_labels(data, kind))

    known = None if labels is None else asdict(labels)
    inputs = [source.identity(), tokenizer.fingerprint, max_length, kind, known, share]
    return load_or_make("labelled", inputs, lambda folder: LabelStore(folder, tokenizer), make)


def _write(folder: Path, data: Table, tokenizer: Tokenizer, max_length: int, labels: LabelSet) -> None:
    columns = text_columns(data)
    num_special = tokenizer.special_tokens.num_added(paired=len(columns) == 2)
    shortest = num_special + len(columns)
    if max_length < shortest:
        raise InputError(
            f"max_length is {max_length}; expected at least {shortest}, the special ids and one token each"
        )
    values = labels.encode(data)
    room = max_length - num_special
    starts = [[text[: room * CHARACTERS_PER_TOKEN] for text in column] for column in columns]
    texts = [encode_texts(column, tokenizer) for column in starts]
    lengths = [part.lengths for part in texts]
    keep = np.all([part > 0 for part in lengths], axis=0)
    if not keep.any():
        raise InputError(f"{data.place(0)}: all {len(data)} texts from here on are empty; nothing is left to use")
    kept = [np.minimum(lengths[0], room)] if len(lengths) == 1 else truncate_pair(lengths[0], lengths[1], room)
    is_cut = np.any([now < before for now, before in zip(kept, lengths, strict=True)], axis=0)
    for column in columns:
        is_cut |= [len(text) > room * CHARACTERS_PER_TOKEN for text in column]
    empty = np.flatnonzero(~keep)
    report = LabelReport(
        kept=int(keep.sum()),
        empty=len(empty),
        cut=int(is_cut[keep].sum()),
        first_empty=data.place(int(empty[0])) if len(empty) else "",
        max_length=max_length,
        labels=labels.describe(data),
    )
    truncated = [part.truncate(now, keep) for part, now in zip(texts, kept, strict=True)]
    arrays: dict[str, ndarray | Ragged] = dict(zip(_COLUMNS, truncated, strict=False))
    arrays |= {"labels": values[keep], "rows": np.flatnonzero(keep)}
    write_arrays(folder, arrays, {"report": asdict(report), "labels": asdict(labels)})


def truncate_pair(
    first_N: Integer[ndarray, " texts"], second_N: Integer[ndarray, " texts"], room: int
) -> tuple[Int64[ndarray, " texts"], Int64[ndarray, " texts"]]:
    """Return how many ids of each text of a pair fit into some room; the longer text is truncated first.

    Args:
        first_N: ids of the first texts.
        second_N: ids of the second texts.
        room: ids of both together that fit.
    """
    share = (room + 1) // 2
    kept_first_N = np.minimum(first_N, np.maximum(share, room - second_N))
    kept_second_N = np.minimum(second_N, room - kept_first_N)
    return kept_first_N.astype(np.int64), kept_second_N.astype(np.int64)
