"""Labelled texts as ids, tokenised once and memory-mapped from then on.

Shape suffixes: N texts, L classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer
from numpy import ndarray

from clearhead.data.sources.labelled import LabelledSource, LabelledTexts, read_labelled
from clearhead.data.sources.texts import WHOLE, Share
from clearhead.data.stores.arrays import Ids, Ragged, Rows, discard_folder, join, pack, read_arrays, write_arrays
from clearhead.data.stores.cache import Progress, cache_folder
from clearhead.data.stores.label_set import LabelSet, learn_labels
from clearhead.errors import InputError
from clearhead.task import LabelKind
from clearhead.text.tokenizer import Tokenizer

# Raised whenever what is written, or how it is made, changes: older entries are then no longer found.
_FORMAT = 1


_CHUNK_TEXTS = 20_000


_ARRAYS = ("ids", "offsets", "labels", "rows")


_OTHERS = ("other_ids", "other_offsets")


@dataclass(frozen=True)
class LabelReport:
    """What became of the examples of a source.

    Args:
        kept: examples in the store.
        empty: dropped because a text has no token.
        cut: kept, but only the front of what is too long.
        first_empty: where the first empty one stands; an empty text where none is.
        max_length: the longest sequence that was allowed, special ids included.
        labels: how often each label stands in the examples read.
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


class LabelStore:
    """Tokenised texts with their labels in a folder, mapped into memory.

    Args:
        folder: what `prepare_labelled` wrote.

    Attributes:
        report: what became of the examples.
        labels: what the labels mean.
        values: the labels as `LabelSet.encode` returns them.
        rows: for each example, its number among those read, counted from 0.
        identity: a hash of all ids and labels; a checkpoint remembers it.

    Raises:
        InputError: the folder does not hold a whole store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.is_paired = (folder / f"{_OTHERS[0]}.npy").is_file()
            arrays, record = read_arrays(folder, _ARRAYS + _OTHERS * self.is_paired)
            self.report = LabelReport(**record["report"])
            self._extra = int(record["extra"])
            self.labels = LabelSet(**{**record["labels"], "names": tuple(record["labels"]["names"])})
            self.identity = str(record["identity"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: not a whole store of labelled texts ({error}); prepare the data again"
            ) from None
        self.side = Ragged(arrays["ids"], np.array(arrays["offsets"]))
        self.other_side = Ragged(arrays["other_ids"], np.array(arrays["other_offsets"])) if self.is_paired else None
        self.values = arrays["labels"]
        self.rows: Rows = np.array(arrays["rows"])
        for part in (self.side, self.other_side):
            if part is not None and not (len(part.offsets) == len(self) + 1 and part.offsets[-1] == len(part.ids)):
                raise InputError(f"{folder}: the parts of the store do not fit each other; prepare the data again")

    def __len__(self) -> int:
        return self.report.kept

    @property
    def lengths(self) -> Rows:
        """The length of each sequence with its special ids."""
        num_ids = self.side.lengths + (0 if self.other_side is None else self.other_side.lengths)
        return num_ids + self._extra

    def texts(self, index: int | np.int64) -> tuple[Ids, ...]:
        """Return the plain ids of one text, or of the two of a pair."""
        sides = [self.side] if self.other_side is None else [self.side, self.other_side]
        return tuple(side[index] for side in sides)


def prepare_labelled(
    source: LabelledSource,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    kind: LabelKind,
    labels: LabelSet | None = None,
    share: Share = WHOLE,
    progress: Progress | None = None,
) -> LabelStore:
    """Tokenise labelled texts, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest sequence in tokens, special ids included; of what is longer the front is kept.
        kind: what a label is.
        labels: the labels of the training data; None: this is the training data.
        share: which part of the source, from one share of its examples to another.
        progress: called with texts done and texts in all, as the work goes on.

    Raises:
        InputError: the source or a label is unusable, or no text is left.
        RunFailure: the cache cannot be written.
    """
    known = None if labels is None else asdict(labels)
    inputs = [_FORMAT, source.identity(), tokenizer.fingerprint, max_length, kind, known, share]
    folder = cache_folder("labelled", *inputs)
    if not folder.is_dir() or not _is_whole(folder):
        data = read_labelled(source, share)
        _prepare(folder, data, tokenizer, max_length, labels or learn_labels(data, kind), progress)
    return LabelStore(folder)


def _is_whole(folder: Path) -> bool:
    """Return whether a store can be opened; what is left of a damaged one is removed."""
    try:
        LabelStore(folder)
    except InputError:
        discard_folder(folder)
        return False
    return True


def _prepare(
    folder: Path,
    data: LabelledTexts,
    tokenizer: Tokenizer,
    max_length: int,
    labels: LabelSet,
    progress: Progress | None,
) -> None:
    extra = tokenizer.special_tokens.num_added(paired=data.others is not None)
    shortest = extra + (2 if data.others is not None else 1)
    if max_length < shortest:
        raise InputError(
            f"max_length is {max_length}; expected at least {shortest}, the special ids and one token each"
        )
    values = labels.encode(data)
    sides = [_encode(texts, tokenizer, progress) for texts in (data.texts, data.others) if texts is not None]
    kept = np.flatnonzero(np.all([side.lengths > 0 for side in sides], axis=0))
    if not len(kept):
        raise InputError(f"{data.place(0)}: all {len(data)} texts from here on are empty; nothing is left to use")
    cut_sides, num_cut = _cut([_take(side, kept, side.lengths[kept]) for side in sides], max_length - extra)
    empty = np.setdiff1d(np.arange(len(data)), kept)
    report = LabelReport(
        kept=len(kept),
        empty=len(empty),
        cut=num_cut,
        first_empty=data.place(int(empty[0])) if len(empty) else "",
        max_length=max_length,
        labels=labels.describe(data),
    )
    arrays: dict[str, ndarray] = {"ids": cut_sides[0].ids, "offsets": cut_sides[0].offsets}
    arrays |= {"labels": values[kept], "rows": kept}
    if len(cut_sides) == 2:
        arrays |= {"other_ids": cut_sides[1].ids, "other_offsets": cut_sides[1].offsets}
    write_arrays(folder, arrays, {"report": asdict(report), "labels": asdict(labels), "extra": extra})


def _encode(texts: Sequence[str], tokenizer: Tokenizer, progress: Progress | None) -> Ragged:
    chunks = []
    for start in range(0, len(texts), _CHUNK_TEXTS):
        chunk = texts[start : start + _CHUNK_TEXTS]
        chunks.append(pack(tokenizer.encode_batch(chunk), vocab_size=tokenizer.vocab_size))
        if progress is not None:
            progress(start + len(chunk), len(texts))
    return join(chunks)


def _cut(sides: Sequence[Ragged], room: int) -> tuple[list[Ragged], int]:
    """Keep the front of each text, so that every sequence fits; return how many were cut too."""
    lengths = [side.lengths for side in sides]
    kept = [np.minimum(lengths[0], room)] if len(sides) == 1 else list(truncate_pair(lengths[0], lengths[1], room))
    num_cut = int(np.any([now < before for now, before in zip(kept, lengths, strict=True)], axis=0).sum())
    return [_take(side, np.arange(len(now)), now) for side, now in zip(sides, kept, strict=True)], num_cut


def _take(side: Ragged, rows: Rows, lengths: Rows) -> Ragged:
    """Return the first ids of some texts of a side, as many as lengths says."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    place = np.arange(int(offsets[-1])) + np.repeat(side.offsets[rows] - offsets[:-1], lengths)
    return Ragged(side.ids[place], offsets)


def truncate_pair(
    first_N: Integer[ndarray, " texts"], second_N: Integer[ndarray, " texts"], room: int
) -> tuple[Int64[ndarray, " texts"], Int64[ndarray, " texts"]]:
    """Return how many ids of each text stay where a pair must fit into some room: the longer of the two is cut first.

    Args:
        first_N: ids of the first texts.
        second_N: ids of the second texts.
        room: ids of both together that fit.
    """
    share = (room + 1) // 2
    kept_first_N = np.minimum(first_N, np.maximum(share, room - second_N))
    kept_second_N = np.minimum(second_N, room - kept_first_N)
    return kept_first_N.astype(np.int64), kept_second_N.astype(np.int64)
