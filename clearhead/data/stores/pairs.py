"""Pairs as ids, made once and mapped into memory: what a second run opens instead of tokenising again."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.errors import InputError, RunFailure
from clearhead.text.special_tokens import Around

Ids = Integer[ndarray, " tokens"]
Rows = Int64[ndarray, " pairs"]
Indices = Int64[ndarray, " _"]

_ARRAYS = ("source_ids", "source_offsets", "target_ids", "target_offsets", "lines")
_RECORD = "store.json"
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class FilterReport:
    """How many pairs a filter kept, and how many it dropped for which reason.

    Args:
        kept: pairs in the store.
        empty: dropped because a side has no token.
        too_long: dropped because a side, its end token included, is longer than allowed.
        mismatched: dropped because one side is too many times as long as the other.
    """

    kept: int
    empty: int = 0
    too_long: int = 0
    mismatched: int = 0

    @property
    def total(self) -> int:
        """All pairs that were read."""
        return self.kept + self.empty + self.too_long + self.mismatched

    def __str__(self) -> str:
        dropped = f"{self.empty:,} empty, {self.too_long:,} too long, {self.mismatched:,} badly matched"
        return f"{self.total:,} pairs read, {self.kept:,} kept, {self.total - self.kept:,} dropped ({dropped})"


@dataclass(frozen=True)
class SpecialIds:
    """The ids that a batch adds to the pairs: padding and end of the source, padding, start and end of the target.

    Args:
        source_pad, source_eos, target_pad, target_bos, target_eos: the ids with these roles.
        source_frame: what stands around a source; None: the end token behind it.
        target_frame: what stands around a target, of which the last id is only said and the first only read; None: the
            start and the end token.
    """

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int
    source_frame: Around | None = None
    target_frame: Around | None = None

    @property
    def read(self) -> Around:
        """What stands around a source."""
        return Around((), (self.source_eos,)) if self.source_frame is None else self.source_frame

    @property
    def said(self) -> Around:
        """What stands around a target."""
        return Around((self.target_bos,), (self.target_eos,)) if self.target_frame is None else self.target_frame

    def to_json(self) -> dict[str, Any]:
        """Return the ids as JSON values; frames that follow from the roles are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SpecialIds:
        """Read what `to_json` returned."""
        frames = {
            name: Around(tuple(content[name]["front"]), tuple(content[name]["behind"]))
            for name in ("source_frame", "target_frame")
            if name in content
        }
        return cls(**{**content, **frames})


@dataclass(frozen=True)
class Side:
    """The ids of one side, one text behind the other.

    Args:
        ids: all ids, without special ones.
        offsets: where each text starts, and behind the last one where it ends.
    """

    ids: Ids
    offsets: Int64[ndarray, " boundaries"]

    @property
    def lengths(self) -> Rows:
        """The number of ids of each text."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int | np.int64) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class PairStore:
    """Tokenised pairs in a folder, mapped into memory.

    Args:
        folder: what `write_store` wrote.

    Attributes:
        report: how many pairs the filter kept, and how many it dropped.
        special: the ids that batches add to the pairs.
        identity: a hash of all ids; a checkpoint remembers it.
        lines: for each pair, its number in the data it came from, counted from 0.

    Raises:
        InputError: the folder does not hold a whole store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            arrays, record = read_arrays(folder, _ARRAYS)
            self.report = FilterReport(**record["report"])
            self.special = SpecialIds.from_json(record["special"])
            self.identity = str(record["identity"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: not a whole store of tokenised pairs ({error}); prepare the data again"
            ) from None
        self._source = Side(arrays["source_ids"], np.array(arrays["source_offsets"]))
        self._target = Side(arrays["target_ids"], np.array(arrays["target_offsets"]))
        self.lines: Rows = np.array(arrays["lines"])
        for side in (self._source, self._target):
            if len(side.offsets) != len(self) + 1 or side.offsets[-1] != len(side.ids):
                raise InputError(f"{folder}: the parts of the store do not fit each other; prepare the data again")

    def __len__(self) -> int:
        return self.report.kept

    @property
    def source_side(self) -> Side:
        """The ids of all sources."""
        return self._source

    @property
    def target_side(self) -> Side:
        """The ids of all targets."""
        return self._target

    @property
    def source_lengths(self) -> Rows:
        """The number of tokens of each source, without what stands around it."""
        return self._source.lengths

    @property
    def target_lengths(self) -> Rows:
        """The number of tokens of each target, without what stands around it."""
        return self._target.lengths

    @property
    def read_lengths(self) -> Rows:
        """The number of ids that an encoder reads of each source."""
        return self._source.lengths + len(self.special.read)

    @property
    def said_lengths(self) -> Rows:
        """The number of ids that a decoder reads of each target, which is that of those it says."""
        return self._target.lengths + len(self.special.said) - 1

    def source(self, index: int | np.int64) -> Ids:
        """Return the source ids of one pair, without special ids."""
        return self._source[index]

    def target(self, index: int | np.int64) -> Ids:
        """Return the target ids of one pair, without special ids."""
        return self._target[index]


def keep_pairs(
    source_lengths: Rows,
    target_lengths: Rows,
    *,
    max_length: int,
    max_ratio: float | None,
    extra: tuple[int, int] = (1, 1),
) -> tuple[Bool[ndarray, " pairs"], FilterReport]:
    """Decide which pairs to keep; a pair with several faults counts once, for the first of them.

    Args:
        source_lengths: tokens of each source, without the end token.
        target_lengths: tokens of each target, without the end token.
        max_length: the longest side allowed, with what stands around it.
        max_ratio: how many times as long as the other a side may be, both with their end tokens; None: any.
        extra: how many ids stand around a source and around a target.

    Returns:
        True for each pair to keep, and the counts.
    """
    shorter, longer = np.minimum(source_lengths, target_lengths) + 1, np.maximum(source_lengths, target_lengths) + 1
    empty = shorter == 1
    too_long = ~empty & (np.maximum(source_lengths + extra[0], target_lengths + extra[1]) > max_length)
    mismatched = np.zeros_like(empty) if max_ratio is None else ~empty & ~too_long & (longer > max_ratio * shorter)
    keep = ~(empty | too_long | mismatched)
    return keep, FilterReport(*(int(group.sum()) for group in (keep, empty, too_long, mismatched)))


def pack(texts: Sequence[Sequence[int]], *, vocab_size: int) -> Side:
    """Put lists of ids behind each other, in the narrowest type that holds the vocabulary.

    Args:
        texts: the ids of each text.
        vocab_size: one more than the largest id.
    """
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)), out=offsets[1:])
    narrow = np.uint16 if vocab_size <= 1 << 16 else np.int32
    ids = np.fromiter(itertools.chain.from_iterable(texts), dtype=narrow, count=int(offsets[-1]))
    return Side(ids, offsets)


def select(side: Side, keep: Bool[ndarray, " pairs"]) -> Side:
    """Keep some texts of a side."""
    lengths = side.lengths
    return Side(side.ids[np.repeat(keep, lengths)], np.concatenate([[0], np.cumsum(lengths[keep])]))


def join(parts: Sequence[Side]) -> Side:
    """Put sides behind each other; at least one."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Side(np.concatenate([part.ids for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))


def write_store(
    folder: Path, *, source: Side, target: Side, lines: Rows, report: FilterReport, special: SpecialIds
) -> PairStore:
    """Write a store so that other processes see all of it or nothing, and open it.

    Args:
        folder: where it goes; when another process put a store there meanwhile, that one is opened.
        source: ids of the sources kept.
        target: ids of the targets kept.
        lines: for each pair kept, its number in the data it came from, counted from 0.
        report: the filter counts.
        special: the ids that batches add.

    Raises:
        RunFailure: the folder cannot be written.
    """
    arrays = (source.ids, source.offsets, target.ids, target.offsets, lines)
    write_arrays(
        folder, dict(zip(_ARRAYS, arrays, strict=True)), {"report": asdict(report), "special": special.to_json()}
    )
    return PairStore(folder)


def write_arrays(folder: Path, arrays: Mapping[str, ndarray], record: Mapping[str, Any]) -> None:
    """Write arrays and a record, together with a hash of the arrays, so that others see all of it or nothing.

    Args:
        folder: where they go; what another process put there meanwhile stays.
        arrays: by name, in the order in which they are hashed.
        record: JSON values; its key "identity" becomes the hash.

    Raises:
        RunFailure: the folder cannot be written.
    """
    with publishing(folder) as temporary:
        identity = hashlib.sha256()
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            identity.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        (temporary / _RECORD).write_text(json.dumps({**record, "identity": identity.hexdigest()}), encoding="utf-8")


def read_arrays(folder: Path, names: Sequence[str]) -> tuple[dict[str, ndarray], dict[str, Any]]:
    """Map the arrays that `write_arrays` wrote into memory, and read their record.

    Raises:
        OSError, ValueError: a file is missing or damaged.
    """
    record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(ndarray) for name in names}
    return arrays, record


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill, and put it in the place of `folder` when it is whole.

    Two processes may do this for one folder at once: the first to finish wins, and the other's work is thrown away.

    Raises:
        RunFailure: the folder cannot be written, for want of space or of permission.
    """
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        # A rename onto a folder that is not empty fails, which is how the loser of a race learns of it.
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise RunFailure(
            f"{folder.parent}: prepared data cannot be written ({error.strerror or error}); "
            "free some space, or set CLEARHEAD_CACHE to another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a damaged folder; a reader in another process never sees half of it."""
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(parent: Path) -> None:
    """Clear what killed processes left behind."""
    for left in parent.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
