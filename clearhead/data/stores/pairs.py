"""Tokenized pairs: filtered by length, stored once and memory-mapped from then on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Rows, encode_texts
from clearhead.data.sources.pairs import read_pairs, same_sides
from clearhead.data.sources.tables import WHOLE, Share, TableSource
from clearhead.data.stores.store import Arrays, Encoded, Store, StoreKind, prepare_store, read_apart
from clearhead.text.pair import TokenizerPair


def _report(store: Store) -> str:
    counts = store.facts["report"]
    return "; ".join(filter(None, [_filtered(counts), counts["note"]]))


def _filtered(counts: Mapping[str, int]) -> str:
    """Return the report of a filter."""
    dropped = counts["empty"] + counts["too_long"] + counts["mismatched"]
    return (
        f"{counts['kept'] + dropped:,} pairs read, {counts['kept']:,} kept, {dropped:,} dropped "
        f"({counts['empty']:,} empty, {counts['too_long']:,} too long, {counts['mismatched']:,} badly matched)"
    )


PAIRS = StoreKind("pairs", "tokenized pairs", ("source", "target"), _report, read_apart)
"""Stores of pairs: their texts are sources and targets, "lines" the number of each pair in its data, from 0."""


def keep_pairs(
    source_lengths: Rows,
    target_lengths: Rows,
    *,
    max_length: int,
    max_ratio: float | None,
    num_special: tuple[int, int] = (1, 1),
) -> tuple[Bool[ndarray, " rows"], dict[str, int]]:
    """Decide which pairs to keep; a pair with several faults counts once, for the first of them.

    Args:
        source_lengths: tokens of each source, without special tokens.
        target_lengths: tokens of each target, without special tokens.
        max_length: the longest side allowed, special tokens included.
        max_ratio: how many times as long as the other a side may be, both with an end token; None: any.
        num_special: special tokens of a source and of a target.

    Returns:
        True for each pair to keep; and how many are kept, and dropped for which reason.
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
    """Tokenize and filter the pairs of a source, or open what an earlier run made of the same content.

    Args:
        source: where the pairs come from.
        tokenizers: the tokenizers of both sides.
        max_length: the longest side kept, in tokens, special tokens included.
        max_ratio: how many times as long as the other a side may be, counted with the end tokens; None: any.
        training: False keeps badly matched pairs, because a score on hand-picked pairs flatters.
        extra: special tokens of a source and of a target; None: as many as in a translation.
        share: the share of the pairs to read, as for `read_table`.

    Returns:
        The pairs that were kept, as of `PAIRS`; the report counts the others.

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

    def encode() -> Encoded:
        data = read_pairs(source, share)
        sources = encode_texts(data["source"], tokenizers.source)
        targets = encode_texts(data["target"], tokenizers.target)
        keep, counts = keep_pairs(
            sources.lengths, targets.lengths, max_length=max_length, max_ratio=ratio, num_special=num_special
        )
        if not counts["kept"]:
            raise InputError(
                f"{data.location(0)}: no pair is left to use of those from here on ({_filtered(counts)}); "
                f"max_length is {max_length} tokens, max_ratio is {'off' if ratio is None else ratio}"
            )
        arrays: Arrays = {
            "source": sources.truncate(sources.lengths, keep),
            "target": targets.truncate(targets.lengths, keep),
            "lines": np.flatnonzero(keep),
        }
        return arrays, {"report": {**counts, "note": same_sides(data)}}

    inputs = [source.identity(), tokenizers.fingerprint, max_length, ratio, num_special, share]
    return prepare_store(PAIRS, inputs, encode, special=num_special)
