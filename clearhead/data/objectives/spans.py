"""Span corruption and text infilling: the model predicts hidden spans, or reconstructs the whole text.

Shape suffixes: N tokens of all windows, B windows, S spans of all windows, M tokens of all corrupted windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged
from clearhead.data.batches.base import Batch
from clearhead.data.objectives.rows import (
    Window,
    check_share,
    denoising_batch,
    need_mask_id,
    rank_in_rows,
    sum_rows,
    without_special,
)
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import WordBoundaries, word_boundaries

Counts = Int64[ndarray, " rows"]


class SpanCorruption:
    """Objective of span corruption (T5): spans are replaced by sentinels, and the target holds the spans.

    The source is the text with a sentinel in place of each span, and an end token. The target is sentinel, span,
    sentinel, span, ..., end token. Together they contain the whole text.

    Args:
        tokenizer: a tokenizer with at least as many sentinels as a window has spans.
        share: the share of the tokens of a window that are removed, above 0 and below 1.
        mean_span: the mean number of tokens in a span, at least 1.

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
                "span corruption replaces spans by sentinels, but the tokenizer has none: train a tokenizer "
                "with sentinels, or choose another tokenizer"
            )

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return a batch of the windows as sources and targets, for an encoder-decoder.

        Args:
            windows: the ids of each window, special ids included; at least one window.
            generator: the random generator of the spans.

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
        """Return the sentinel of each token's span, or of the last span before it; each row starts at sentinel 0."""
        spans_B = sum_rows(first_N.astype(np.int64), rows.lengths)
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
    """Return the number of sentinels that a window needs.

    Args:
        length: the number of tokens of the window, without special tokens.
        share: the share of the tokens that are removed, above 0 and below 1.
        mean_span: the mean number of tokens in a span, at least 1.

    Raises:
        InputError: the share or the mean is out of range.
    """
    counts = np.array([length], dtype=np.int64)
    return int(_span_counts(counts, check_share(share), _check_mean(mean_span))[1][0])


def noise_mask(
    lengths_B: Counts, *, share: float, mean_span: float, generator: np.random.Generator
) -> Bool[ndarray, " tokens"]:
    """Choose the spans to remove from concatenated texts; returns a mask that is True at the tokens to remove.

    Visible and removed spans alternate, and a visible span comes first. The lengths of both are drawn evenly from all
    ways to cut their tokens into this number of spans. A text of one token is removed as a whole.

    Args:
        lengths_B: the number of tokens of each text.
        share: the share of the tokens to remove.
        mean_span: the mean number of tokens in a span.
        generator: the random generator of the lengths.

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
    """Return the number of tokens to remove from each text, and the number of spans; both rounded half to even."""
    noise_B = np.clip(np.rint(lengths_B * share), 1, np.maximum(lengths_B - 1, 1)).astype(np.int64)
    noise_B = np.minimum(noise_B, lengths_B)
    kept_B = np.maximum(lengths_B - noise_B, 1)
    spans_B = np.clip(np.rint(noise_B / mean_span), 1, np.minimum(kept_B, np.maximum(noise_B, 1))).astype(np.int64)
    return noise_B, np.minimum(spans_B, lengths_B)


def _segments(items_B: Counts, segments_B: Counts, generator: np.random.Generator) -> Int64[ndarray, " spans"]:
    """Cut each row of items at random into a number of non-empty segments, and return the sizes of the segments."""
    keys_N = generator.random(int(items_B.sum()))
    keys_N[np.cumsum(items_B) - items_B] = -1.0  # the first item of a row always begins a segment
    begins = np.flatnonzero(rank_in_rows(keys_N, items_B) < np.repeat(segments_B, items_B))
    return np.diff(np.append(begins, len(keys_N)))


def _target(
    rows: Ragged,
    noise_N: Bool[ndarray, " tokens"],
    first_N: Bool[ndarray, " tokens"],
    sentinels_N: Int64[ndarray, " tokens"],
) -> Ragged:
    """Return the decoder targets of span corruption: the removed spans of each row, each after its sentinel."""
    taken, first = rows.keep(noise_N), first_N[noise_N]
    spans_B = sum_rows(first_N.astype(np.int64), rows.lengths)
    target_index = np.arange(len(first)) + np.cumsum(first)
    ids = np.empty(len(first) + int(first.sum()), dtype=np.int64)
    ids[target_index] = taken.ids
    ids[target_index[first] - 1] = sentinels_N[first_N]
    return Ragged.of(ids, taken.lengths + spans_B)


def _check_mean(mean_span: float) -> float:
    if not mean_span >= 1.0:
        raise InputError(f"the mean length of a span is {mean_span}; expected at least 1 token, such as 3")
    return mean_span


_LARGEST_MEAN = 100.0


class TextInfilling:
    """Objective of text infilling (BART): shuffles the sentences of a window, and replaces each span by one mask token.

    The lengths of spans follow a Poisson distribution; a span of length 0 inserts a mask token and removes no token.
    The target is the original text. With its end token, a source is never longer than its window. Spans of length 0
    that would exceed this limit are left out, which happens only if spans are very short.

    Args:
        tokenizer: a tokenizer with a mask token.
        share: the share of the tokens of a window that spans cover, above 0 and below 1.
        mean_span: the mean number of tokens in a span, above 0 and at most 100.
        permute: True if sentences are shuffled.

    Raises:
        InputError: the tokenizer has no mask token, or the share or the mean is out of range.

    Source: arXiv 1910.13461, section 2.2.
    """

    def __init__(self, tokenizer: Tokenizer, share: float = 0.3, mean_span: float = 3.0, permute: bool = True) -> None:
        if not 0.0 < mean_span <= _LARGEST_MEAN:
            raise InputError(
                f"the mean length of a span is {mean_span}; expected above 0 and at most {_LARGEST_MEAN:g} tokens, "
                "such as 3"
            )
        self._tokenizer = tokenizer
        self._mask_id = need_mask_id(tokenizer)
        self._share = check_share(share)
        self._poisson = _poisson_table(mean_span)
        self._words = word_boundaries(tokenizer) if permute else None

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return a batch with corrupted windows as sources and whole windows as targets, for an encoder-decoder.

        Args:
            windows: the ids of each window, special ids included; at least one window.
            generator: the random generator of the noise.
        """
        target = without_special(windows, self._tokenizer)
        source = target if self._words is None else _permute(target, self._words, generator)
        return denoising_batch(self._infill(source, generator), target, self._tokenizer)

    def _infill(self, rows: Ragged, generator: np.random.Generator) -> Ragged:
        """Replace spans of each row by masks: masks and visible tokens are placed in a random order."""
        covered_B = np.floor(self._share * rows.lengths + generator.random(len(rows.lengths))).astype(np.int64)
        covered_B = np.clip(covered_B, np.minimum(1, rows.lengths), rows.lengths)
        lengths_S, spans_B = self._spans(covered_B, generator)
        slots_B = rows.lengths - covered_B + spans_B
        is_mask_M = rank_in_rows(generator.random(int(slots_B.sum())), slots_B) < np.repeat(spans_B, slots_B)
        widths_M = np.ones(len(is_mask_M), dtype=np.int64)
        widths_M[is_mask_M] = lengths_S
        # A mask after the last token has no token to read: the index is clamped, and the value is not used.
        begins_M = np.minimum(np.cumsum(widths_M) - widths_M, max(len(rows.ids) - 1, 0))
        kept_M = rows.ids[begins_M] if len(rows.ids) else begins_M
        return Ragged.of(np.where(is_mask_M, self._mask_id, kept_M), slots_B)

    def _spans(
        self, covered_B: Int64[ndarray, " rows"], generator: np.random.Generator
    ) -> tuple[Int64[ndarray, " spans"], Int64[ndarray, " rows"]]:
        """Return drawn span lengths, which sum to `covered_B` in each row, and the number of spans of each row."""
        drawn = np.zeros((len(covered_B), 0), dtype=np.int64)
        while (drawn.sum(axis=1) < covered_B).any():
            draws = generator.random((len(covered_B), 8 + int(covered_B.max())))
            drawn = np.concatenate([drawn, np.searchsorted(self._poisson, draws, side="right")], axis=1)
        before = np.cumsum(drawn, axis=1) - drawn
        used = before < covered_B[:, None]
        is_empty = used & (drawn == 0)
        room_B = covered_B + 1 - (used & ~is_empty).sum(axis=1)
        used &= ~is_empty | (np.cumsum(is_empty, axis=1) <= room_B[:, None])
        lengths_S = np.minimum(drawn, covered_B[:, None] - before)[used]
        return lengths_S, used.sum(axis=1).astype(np.int64)


def _permute(rows: Ragged, words: WordBoundaries, generator: np.random.Generator) -> Ragged:
    """Shuffle the sentences of each row."""
    begins_N = np.concatenate([[True], words.ends_sentence(rows.ids)[:-1]])[: len(rows.ids)]
    begins_N |= rows.positions == 0
    sentence_N = np.cumsum(begins_N) - 1
    keys_N = generator.random(int(begins_N.sum()))[sentence_N]
    # Sorting is stable, so the tokens of a sentence stay in order.
    return Ragged.of(rows.ids[np.lexsort((keys_N, rows.row_numbers))], rows.lengths)


def _poisson_table(mean: float) -> Float[ndarray, " lengths"]:
    """Return the cumulative Poisson probabilities of span lengths of at most 0, 1, 2, ... tokens."""
    terms = [float(np.exp(-mean))]
    while len(terms) <= mean or terms[-1] > np.finfo(np.float64).tiny:
        terms.append(terms[-1] * mean / len(terms))
    return np.cumsum(terms)
