"""Span corruption: spans of a text are replaced by sentinels, and the model predicts each span.

Shape suffixes: N tokens of all windows, B windows, S spans of all windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged
from clearhead.data.batches.base import Batch
from clearhead.data.objectives.rows import Window, check_share, denoising_batch, ranks, sums, without_special
from clearhead.text.tokenizer import Tokenizer

Counts = Int64[ndarray, " rows"]


class SpanCorruption:
    """Replaces spans by sentinels; the target is each sentinel followed by its span.

    The source is the rest of the text with a sentinel for each span, then the end token; the target is sentinel, span,
    sentinel, span, ..., end token. Together they hold the whole text.

    Args:
        tokenizer: has as many sentinels as a window has spans.
        share: of the tokens of a window that are removed, above 0 and below 1.
        mean_span: mean number of tokens in a span, at least 1.

    Raises:
        InputError: the share or the mean is out of range, or the tokenizer has no sentinels.

    Source: arXiv 1910.10683, sections 3.1.4 and 3.3.4.
    """

    def __init__(self, tokenizer: Tokenizer, share: float = 0.15, mean_span: float = 3.0) -> None:
        self._tokenizer = tokenizer
        self._share = check_share(share)
        self._mean_span = _check_mean(mean_span)
        self._sentinels = np.array(tokenizer.sentinel_ids, dtype=np.int64)
        if not len(self._sentinels):
            raise InputError(
                "span corruption puts sentinels in place of the spans, but the tokenizer has none: train a tokenizer "
                "with sentinels, or take one that has them"
            )

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return the windows as sources and targets, for a model of two stacks.

        Args:
            windows: ids with special ids; at least one.
            generator: draws the spans.

        Raises:
            InputError: a window needs more sentinels than the tokenizer has.
        """
        rows = without_special(windows, self._tokenizer)
        noise_N = noise_mask(rows.lengths, share=self._share, mean_span=self._mean_span, generator=generator)
        first_N = noise_N & ~np.concatenate([[False], noise_N[:-1]])
        first_N |= noise_N & (rows.positions == 0)
        sentinels_N = self._number(rows, first_N)
        source = Ragged.of(np.where(first_N, sentinels_N, rows.ids), rows.lengths).keep(~noise_N | first_N)
        return denoising_batch(source, _target(rows, noise_N, first_N, sentinels_N), self._tokenizer)

    def _number(self, rows: Ragged, first_N: Bool[ndarray, " tokens"]) -> Int64[ndarray, " tokens"]:
        """Return the sentinel of the span that each token is in or behind, counted within its row."""
        spans_B = sums(first_N.astype(np.int64), rows.lengths)
        most = int(spans_B.max())
        if most > len(self._sentinels):
            longest = int(rows.lengths[int(spans_B.argmax())])
            raise InputError(
                f"a window of {longest} tokens has {most} spans, but the tokenizer has {len(self._sentinels)} "
                "sentinels: shorten max_length, raise mean_span, or train the tokenizer with more sentinels"
            )
        number_N = np.cumsum(first_N) - 1 - np.repeat(np.cumsum(spans_B) - spans_B, rows.lengths)
        sentinels_N: Int64[ndarray, " tokens"] = self._sentinels[np.maximum(number_N, 0)]
        return sentinels_N


def num_sentinels(length: int, *, share: float = 0.15, mean_span: float = 3.0) -> int:
    """Return how many sentinels a window needs.

    Args:
        length: tokens of its text, without special tokens.
        share: of the tokens that are removed, above 0 and below 1.
        mean_span: mean number of tokens in a span, at least 1.

    Raises:
        InputError: the share or the mean is out of range.
    """
    counts = np.array([length], dtype=np.int64)
    return int(_span_counts(counts, check_share(share), _check_mean(mean_span))[1][0])


def noise_mask(
    lengths_B: Counts, *, share: float, mean_span: float, generator: np.random.Generator
) -> Bool[ndarray, " tokens"]:
    """Choose the spans of many texts: True at the tokens to remove, for texts behind each other.

    Kept and removed spans alternate, a kept one first; both are drawn evenly from all ways to cut their tokens into
    that many spans. A text of one token is removed as a whole.

    Args:
        lengths_B: tokens of each text.
        share: of the tokens to remove.
        mean_span: mean number of tokens in a span.
        generator: draws the lengths.

    Source: arXiv 1910.10683, section 3.3.4, and `random_spans_noise_mask` of its code.
    """
    noise_B, spans_B = _span_counts(lengths_B, share, mean_span)
    long_B = lengths_B > 1
    noise_S = _segments(noise_B[long_B], spans_B[long_B], generator)
    kept_S = _segments((lengths_B - noise_B)[long_B], spans_B[long_B], generator)
    mask_N = np.ones(int(lengths_B.sum()), dtype=np.bool_)
    turns = np.tile([False, True], len(noise_S))
    mask_N[np.repeat(long_B, lengths_B)] = np.repeat(turns, np.stack([kept_S, noise_S], axis=1).ravel())
    return mask_N


def _span_counts(lengths_B: Counts, share: float, mean_span: float) -> tuple[Counts, Counts]:
    """Return how many tokens to remove from each text, and in how many spans; both rounded half to even."""
    noise_B = np.clip(np.rint(lengths_B * share), 1, np.maximum(lengths_B - 1, 1)).astype(np.int64)
    noise_B = np.minimum(noise_B, lengths_B)
    kept_B = np.maximum(lengths_B - noise_B, 1)
    spans_B = np.clip(np.rint(noise_B / mean_span), 1, np.minimum(kept_B, np.maximum(noise_B, 1))).astype(np.int64)
    return noise_B, np.minimum(spans_B, lengths_B)


def _segments(items_B: Counts, segments_B: Counts, generator: np.random.Generator) -> Int64[ndarray, " spans"]:
    """Cut each row of items into that many parts, none empty, every way equally likely; return their sizes."""
    keys_N = generator.random(int(items_B.sum()))
    keys_N[np.cumsum(items_B) - items_B] = -1.0  # the first item of a row always begins a part
    begins = np.flatnonzero(ranks(keys_N, items_B) < np.repeat(segments_B, items_B))
    return np.diff(np.append(begins, len(keys_N)))


def _target(
    rows: Ragged,
    noise_N: Bool[ndarray, " tokens"],
    first_N: Bool[ndarray, " tokens"],
    sentinels_N: Int64[ndarray, " tokens"],
) -> Ragged:
    """Put the removed spans behind each other, each behind its sentinel."""
    taken, first = rows.keep(noise_N), first_N[noise_N]
    spans_B = sums(first_N.astype(np.int64), rows.lengths)
    place = np.arange(len(first)) + np.cumsum(first)
    ids = np.empty(len(first) + int(first.sum()), dtype=np.int64)
    ids[place] = taken.ids
    ids[place[first] - 1] = sentinels_N[first_N]
    return Ragged.of(ids, taken.lengths + spans_B)


def _check_mean(mean_span: float) -> float:
    if not mean_span >= 1.0:
        raise InputError(f"the mean length of a span is {mean_span}; expected at least 1 token, 3 is usual")
    return mean_span
