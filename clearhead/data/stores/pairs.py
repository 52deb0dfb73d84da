"""Tokenized pairs: filtered by length, stored once and memory-mapped from then on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from clearhead.data.sources.pairs import read_pairs, same_sides
from clearhead.data.sources.tables import TableSource
from clearhead.data.stores.arrays import Arrays, ArrayStore, Rows, encode_texts, write_arrays
from clearhead.data.stores.cache import load_or_make
from clearhead.errors import InputError
from clearhead.text.pair import TokenizerPair


@dataclass(frozen=True)
class FilterReport:
    """How many pairs a filter kept, and how many it dropped for which reason.

    Args:
        kept: pairs in the store.
        empty: dropped because a side has no token.
        too_long: dropped because a side, with its special tokens, is longer than allowed.
        mismatched: dropped because one side is too many times as long as the other.
        note: what is strange about them.
    """

    kept: int
    empty: int = 0
    too_long: int = 0
    mismatched: int = 0
    note: str = ""

    def __str__(self) -> str:
        dropped = self.empty + self.too_long + self.mismatched
        reasons = f"{self.empty:,} empty, {self.too_long:,} too long, {self.mismatched:,} badly matched"
        return f"{self.kept + dropped:,} pairs read, {self.kept:,} kept, {dropped:,} dropped ({reasons})" + (
            f"; {self.note}" if self.note else ""
        )


class PairStore(ArrayStore):
    """Tokenized pairs.

    Args:
        folder: the store's folder.
        tokenizers: what the pairs were tokenized with.

    Attributes:
        report: how many pairs the filter kept, and how many it dropped.
        sources, targets: the ids of each side, without special ids.
        lines: for each pair, its number in the data it came from, counted from 0.
    """

    contents: ClassVar[str] = "tokenized pairs"

    def __init__(self, folder: Path, tokenizers: TokenizerPair) -> None:
        super().__init__(folder)
        self.tokenizers = tokenizers
        self.report: FilterReport = FilterReport(**self.record["report"])
        self.sources, self.targets = self.ragged("source"), self.ragged("target")
        self.lines: Rows = self.arrays["lines"]

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def input_lengths(self) -> tuple[Rows, Rows]:
        """The number of ids that the encoder and the decoder read of each pair, special ids included."""
        source, target = (
            self.tokenizers.source.special_tokens.for_source,
            self.tokenizers.target.special_tokens.for_target,
        )
        return self.sources.lengths + len(source), self.targets.lengths + len(target) - 1

    @property
    def num_tokens(self) -> int:
        """The number of ids in all pairs together, without special ids; it takes no decoder to count them."""
        return len(self.sources.ids) + len(self.targets.ids)


def keep_pairs(
    source_lengths: Rows,
    target_lengths: Rows,
    *,
    max_length: int,
    max_ratio: float | None,
    num_special: tuple[int, int] = (1, 1),
) -> tuple[Bool[ndarray, " rows"], FilterReport]:
    """Decide which pairs to keep; a pair with several faults counts once, for the first of them.

    Args:
        source_lengths: tokens of each source, without special tokens.
        target_lengths: tokens of each target, without special tokens.
        max_length: the longest side allowed, special tokens included.
        max_ratio: how many times as long as the other a side may be, both with an end token; None: any.
        num_special: special tokens of a source and of a target.

    Returns:
        True for each pair to keep, and the counts.
    """
    shorter, longer = np.minimum(source_lengths, target_lengths) + 1, np.maximum(source_lengths, target_lengths) + 1
    empty = shorter == 1
    longest = np.maximum(source_lengths + num_special[0], target_lengths + num_special[1])
    too_long = ~empty & (longest > max_length)
    mismatched = np.zeros_like(empty) if max_ratio is None else ~empty & ~too_long & (longer > max_ratio * shorter)
    keep = ~(empty | too_long | mismatched)
    return keep, FilterReport(int(keep.sum()), int(empty.sum()), int(too_long.sum()), int(mismatched.sum()))


def prepare_pairs(
    source: TableSource,
    tokenizers: TokenizerPair,
    *,
    max_length: int,
    max_ratio: float | None,
    training: bool,
    extra: tuple[int, int] | None = None,
) -> PairStore:
    """Tokenize and filter the pairs of a source, or open what an earlier run made of the same content.

    Args:
        source: where the pairs come from.
        tokenizers: the tokenizers of both sides.
        max_length: the longest side kept, in tokens, special tokens included.
        max_ratio: how many times as long as the other a side may be, counted with the end tokens; None: any.
        training: False keeps badly matched pairs, because a score on hand-picked pairs flatters.
        extra: special tokens of a source and of a target; None: as many as in a translation.

    Returns:
        The pairs that were kept; `report` counts the others.

    Raises:
        InputError: the source is unusable, the limits are, or no pair is left.
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

    def make(folder: Path) -> None:
        data = read_pairs(source)
        sources = encode_texts(data["source"], tokenizers.source)
        targets = encode_texts(data["target"], tokenizers.target)
        keep, report = keep_pairs(
            sources.lengths, targets.lengths, max_length=max_length, max_ratio=ratio, num_special=num_special
        )
        if not report.kept:
            raise InputError(
                f"{data.place(0)}: no pair is left to use of those from here on ({report}); "
                f"max_length is {max_length} tokens, max_ratio is {'off' if ratio is None else ratio}"
            )
        arrays: Arrays = {
            "source": sources.truncate(sources.lengths, keep),
            "target": targets.truncate(targets.lengths, keep),
            "lines": np.flatnonzero(keep),
        }
        write_arrays(folder, arrays, {"report": asdict(replace(report, note=same_sides(data)))})

    inputs = [source.identity(), tokenizers.fingerprint, max_length, ratio, num_special]
    return load_or_make("pairs", inputs, lambda folder: PairStore(folder, tokenizers), make)
