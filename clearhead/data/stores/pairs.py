"""Pairs as ids, made once and mapped into memory: what a second run opens instead of tokenising again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from clearhead.data.sources.pairs import Pair, PairSource, read_pairs
from clearhead.data.stores.arrays import (
    Ids,
    Ragged,
    Rows,
    discard_folder,
    join,
    pack,
    read_arrays,
    select,
    write_arrays,
)
from clearhead.data.stores.cache import Progress, cache_folder
from clearhead.errors import InputError
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix

_ARRAYS = ("source_ids", "source_offsets", "target_ids", "target_offsets", "lines")


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
    source_frame: PrefixSuffix | None = None
    target_frame: PrefixSuffix | None = None

    @property
    def read(self) -> PrefixSuffix:
        """What stands around a source."""
        return PrefixSuffix((), (self.source_eos,)) if self.source_frame is None else self.source_frame

    @property
    def said(self) -> PrefixSuffix:
        """What stands around a target."""
        return PrefixSuffix((self.target_bos,), (self.target_eos,)) if self.target_frame is None else self.target_frame

    def to_json(self) -> dict[str, Any]:
        """Return the ids as JSON values; frames that follow from the roles are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SpecialIds:
        """Read what `to_json` returned."""
        frames = {
            name: PrefixSuffix(tuple(content[name]["prefix"]), tuple(content[name]["suffix"]))
            for name in ("source_frame", "target_frame")
            if name in content
        }
        return cls(**{**content, **frames})


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
        self._source = Ragged(arrays["source_ids"], np.array(arrays["source_offsets"]))
        self._target = Ragged(arrays["target_ids"], np.array(arrays["target_offsets"]))
        self.lines: Rows = np.array(arrays["lines"])
        for side in (self._source, self._target):
            if len(side.offsets) != len(self) + 1 or side.offsets[-1] != len(side.ids):
                raise InputError(f"{folder}: the parts of the store do not fit each other; prepare the data again")

    def __len__(self) -> int:
        return self.report.kept

    @property
    def source_side(self) -> Ragged:
        """The ids of all sources."""
        return self._source

    @property
    def target_side(self) -> Ragged:
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


def write_store(
    folder: Path, *, source: Ragged, target: Ragged, lines: Rows, report: FilterReport, special: SpecialIds
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


_CHUNK_PAIRS = 20_000


def prepare_pairs(
    source: PairSource,
    tokenizers: TokenizerPair,
    *,
    max_length: int,
    max_ratio: float | None,
    training: bool,
    extra: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> PairStore:
    """Tokenise and filter the pairs of a source, or open what an earlier run made of the same content.

    Args:
        source: where the pairs come from.
        tokenizers: what turns them into ids.
        max_length: the longest side kept, in tokens with what stands around it.
        max_ratio: how many times as long as the other a side may be, counted with the end tokens; None: any.
        extra: how many ids stand around a source and around a target; None: as many as in a translation.
        training: False keeps badly matched pairs, because a score on hand-picked pairs flatters.
        progress: called with pairs done and pairs in all, as the work goes on.

    Returns:
        The pairs that were kept; `report` counts the others.

    Raises:
        InputError: the source is unusable, the limits are, or no pair is left.
        RunFailure: the cache cannot be written.
    """
    _check_limits(max_length, max_ratio)
    ratio = max_ratio if training else None
    counted = [] if extra is None else [list(extra)]
    folder = cache_folder("pairs", source.identity(), tokenizers.fingerprint, max_length, ratio, *counted)
    if folder.is_dir():
        try:
            return PairStore(folder)
        except InputError:
            discard_folder(folder)
    sources, targets = _encoded(source, tokenizers, progress)
    special = _special(tokenizers)
    keep, report = keep_pairs(
        sources.lengths,
        targets.lengths,
        max_length=max_length,
        max_ratio=ratio,
        extra=(len(special.read), len(special.said) - 1) if extra is None else extra,
    )
    if not report.kept:
        raise InputError(
            f"{source.place(0)}: no pair is left to use of those from here on ({report}); "
            f"max_length is {max_length} tokens, max_ratio is {'off' if ratio is None else ratio}"
        )
    return write_store(
        folder,
        source=select(sources, keep),
        target=select(targets, keep),
        lines=np.flatnonzero(keep),
        report=report,
        special=special,
    )


def _check_limits(max_length: int, max_ratio: float | None) -> None:
    if max_length < 2:
        raise InputError(f"max_length is {max_length}; expected at least 2, one token and the end token")
    if max_ratio is not None and not max_ratio >= 1:
        raise InputError(f"max_ratio is {max_ratio}; expected a number of at least 1")


def _encoded(source: PairSource, tokenizers: TokenizerPair, progress: Progress | None) -> tuple[Ragged, Ragged]:
    """Return the ids of both sides of all pairs."""
    pairs = read_pairs(source)
    chunks = []
    for start in range(0, len(pairs), _CHUNK_PAIRS):
        chunk = pairs[start : start + _CHUNK_PAIRS]
        chunks.append(_encode(chunk, tokenizers))
        if progress is not None:
            progress(start + len(chunk), len(pairs))
    return join([chunk[0] for chunk in chunks]), join([chunk[1] for chunk in chunks])


def _encode(pairs: Sequence[Pair], tokenizers: TokenizerPair) -> tuple[Ragged, Ragged]:
    source, target = tokenizers.source, tokenizers.target
    return (
        pack(source.encode_batch([pair[0] for pair in pairs]), vocab_size=source.vocab_size),
        pack(target.encode_batch([pair[1] for pair in pairs]), vocab_size=target.vocab_size),
    )


def _special(tokenizers: TokenizerPair) -> SpecialIds:
    source, target = tokenizers.source, tokenizers.target
    return SpecialIds(
        source_pad=source.pad_id,
        source_eos=source.eos_id,
        target_pad=target.pad_id,
        target_bos=target.bos_id,
        target_eos=target.eos_id,
        source_frame=source.special_tokens.for_source if source.has_own_special_tokens else None,
        target_frame=target.special_tokens.target if target.has_own_special_tokens else None,
    )
