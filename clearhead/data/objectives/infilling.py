"""Text infilling and sentence permutation: the model reads a corrupted text and reconstructs the original.

Shape suffixes: N tokens of all windows, B windows, S spans of all windows, M slots of all corrupted windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged
from clearhead.data.batches.base import Batch
from clearhead.data.objectives.rows import Window, check_share, denoising_batch, need_mask_id, ranks, without_special
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import WordBoundaries, word_boundaries

_LARGEST_MEAN = 100.0


class TextInfilling:
    """Shuffles the sentences of a window and replaces some spans by one mask token each.

    The lengths of spans follow a Poisson distribution; a span of length 0 inserts a mask token and removes none. The
    target is the original text. With its end token, a source is never longer than its window: spans of length 0 beyond
    that are left out, which happens only if spans are very short.

    Args:
        tokenizer: has a mask token.
        share: of the tokens of a window that spans cover, above 0 and below 1.
        mean_span: mean number of tokens in a span, above 0 and at most 100.
        permute: whether sentences are shuffled.

    Raises:
        InputError: the tokenizer has no mask token, or the share or the mean is out of range.

    Source: arXiv 1910.13461, section 2.2.
    """

    def __init__(self, tokenizer: Tokenizer, share: float = 0.3, mean_span: float = 3.0, permute: bool = True) -> None:
        if not 0.0 < mean_span <= _LARGEST_MEAN:
            raise InputError(
                f"the mean length of a span is {mean_span}; expected above 0 and at most {_LARGEST_MEAN:g} tokens, "
                "3 is usual"
            )
        self._tokenizer = tokenizer
        self._mask_id = need_mask_id(tokenizer)
        self._share = check_share(share)
        self._poisson = _poisson_table(mean_span)
        self._words = word_boundaries(tokenizer) if permute else None

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return corrupted windows as sources and whole windows as targets, for a model of two stacks.

        Args:
            windows: ids with special ids; at least one.
            generator: draws the noise.
        """
        target = without_special(windows, self._tokenizer)
        source = target if self._words is None else _permute(target, self._words, generator)
        return denoising_batch(self._infill(source, generator), target, self._tokenizer)

    def _infill(self, rows: Ragged, generator: np.random.Generator) -> Ragged:
        """Put masks and kept tokens in a random order; each mask replaces its span."""
        covered_B = np.floor(self._share * rows.lengths + generator.random(len(rows.lengths))).astype(np.int64)
        covered_B = np.clip(covered_B, np.minimum(1, rows.lengths), rows.lengths)
        lengths_S, spans_B = self._spans(covered_B, generator)
        slots_B = rows.lengths - covered_B + spans_B
        is_mask_M = ranks(generator.random(int(slots_B.sum())), slots_B) < np.repeat(spans_B, slots_B)
        widths_M = np.ones(len(is_mask_M), dtype=np.int64)
        widths_M[is_mask_M] = lengths_S
        # A mask behind the last token has no token to read; what is read there is not used.
        begins_M = np.minimum(np.cumsum(widths_M) - widths_M, max(len(rows.ids) - 1, 0))
        kept_M = rows.ids[begins_M] if len(rows.ids) else begins_M
        return Ragged.of(np.where(is_mask_M, self._mask_id, kept_M), slots_B)

    def _spans(
        self, covered_B: Int64[ndarray, " rows"], generator: np.random.Generator
    ) -> tuple[Int64[ndarray, " spans"], Int64[ndarray, " rows"]]:
        """Draw spans for each row until they cover its tokens, the last one cut to fit; return lengths and counts."""
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
    """Put the sentences of each row in a random order."""
    begins_N = np.concatenate([[True], words.ends_sentence(rows.ids)[:-1]])[: len(rows.ids)]
    begins_N |= rows.positions == 0
    sentence_N = np.cumsum(begins_N) - 1
    keys_N = generator.random(int(begins_N.sum()))[sentence_N]
    # Sorting is stable, so the tokens of a sentence stay in order.
    return Ragged.of(rows.ids[np.lexsort((keys_N, rows.row_numbers))], rows.lengths)


def _poisson_table(mean: float) -> Float[ndarray, " lengths"]:
    """Return the probability of a length of at most 0, 1, 2, ... tokens."""
    terms = [float(np.exp(-mean))]
    while len(terms) <= mean or terms[-1] > np.finfo(np.float64).tiny:
        terms.append(terms[-1] * mean / len(terms))
    return np.cumsum(terms)
