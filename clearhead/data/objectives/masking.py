"""Masked language modelling: some tokens are masked, and the model predicts them.

Shape suffixes: N tokens of all windows, W words of all windows, B windows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.arrays import Ragged, positions
from clearhead.data.batches.base import Batch, find_label_rows, pad_rows
from clearhead.data.objectives.rows import Window, check_share, concat_windows, need_mask_id, sum_rows
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import word_boundaries

_MASKED, _REPLACED = 0.8, 0.1


class MaskedLM:
    """Objective of masked language modelling: chooses a share of the tokens of each window and labels them.

    80 % of the chosen tokens become the mask token, 10 % become a random ordinary token, and 10 % stay. The choice is
    new in every call. Special tokens are never chosen. If a window has an ordinary token, at least one is chosen.

    Args:
        tokenizer: a tokenizer with a mask token.
        share: the share of ordinary tokens of a window that are chosen, above 0 and below 1. The average over many
            windows is exact, unless the share of a window is less than one token.
        whole_words: True if all tokens of a word are chosen together; every kind of vocabulary is supported.

    Raises:
        InputError: the tokenizer has no mask token, or the share is out of range.

    Source: arXiv 1810.04805, section 3.1 and appendix A.1; a new choice in every call: arXiv 1907.11692, section 4.1.
    """

    def __init__(self, tokenizer: Tokenizer, share: float = 0.15, whole_words: bool = False) -> None:
        self._tokenizer = tokenizer
        self._mask_id = need_mask_id(tokenizer)
        self._share = check_share(share)
        self._whole_words = whole_words
        self._words = word_boundaries(tokenizer)
        self._ordinary_ids = np.flatnonzero(self._words.ordinary)

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return the windows with some tokens masked, for a model of one stack.

        Args:
            windows: the ids of each window, special ids included; at least one window.
            generator: the random generator of the choices.
        """
        rows = concat_windows(windows)
        chosen_N = self._choose(rows, generator)
        noisy_N = self._hide(rows.ids, chosen_N, generator)
        read = pad_rows(Ragged.of(noisy_N, rows.lengths), fill=self._tokenizer.pad_id)
        labels = pad_rows(Ragged.of(np.where(chosen_N, rows.ids, NO_LABEL), rows.lengths), fill=NO_LABEL)
        return Batch(
            ids=read.ids,
            mask=read.padding_mask,
            labels=labels.ids,
            num_labels=int(chosen_N.sum()),
            num_tokens=len(rows.ids),
            rows=np.arange(len(windows)),
            label_rows=find_label_rows(labels.ids),
        )

    def _choose(self, rows: Ragged, generator: np.random.Generator) -> Bool[ndarray, " tokens"]:
        """Choose random words (or tokens) of each row until their share of the row's tokens is reached.

        The last word is taken with the probability that makes the share exact on average.
        """
        ordinary_N = self._words.ordinary[rows.ids]
        begins_N = self._words.begins(rows.ids) if self._whole_words else np.ones(len(rows.ids), dtype=np.bool_)
        begins_N[rows.positions == 0] = True
        word_N = np.cumsum(begins_N) - 1
        sizes_W = np.bincount(word_N)
        row_W = rows.row_numbers[begins_N]
        # A word with an unknown character cannot be masked as a whole.
        allowed_W = np.bincount(word_N, weights=ordinary_N) == sizes_W
        budget_B = self._share * sum_rows(ordinary_N.astype(np.int64), rows.lengths)

        order = np.lexsort((generator.random(len(sizes_W)), row_W, ~allowed_W))[: int(allowed_W.sum())]
        sizes, counts_B = sizes_W[order], np.bincount(row_W[order], minlength=len(rows.lengths))
        totals = np.concatenate([[0], np.cumsum(sizes)])
        before = totals[:-1] - np.repeat(totals[np.cumsum(counts_B) - counts_B], counts_B)
        limits = budget_B[row_W[order]] - sizes * generator.random(len(rows.lengths))[row_W[order]]
        taken = (before < limits) | (positions(counts_B) == 0)
        chosen_W = np.zeros(len(sizes_W), dtype=np.bool_)
        chosen_W[order[taken]] = True
        chosen_N: Bool[ndarray, " tokens"] = chosen_W[word_N]
        return chosen_N

    def _hide(
        self, ids_N: Int64[ndarray, " tokens"], chosen_N: Bool[ndarray, " tokens"], generator: np.random.Generator
    ) -> Int64[ndarray, " tokens"]:
        draws = generator.random(int(chosen_N.sum()))
        random_ids = self._ordinary_ids[(generator.random(len(draws)) * len(self._ordinary_ids)).astype(np.int64)]
        noisy_N = ids_N.copy()
        noisy_N[chosen_N] = np.select(
            [draws < _MASKED, draws < _MASKED + _REPLACED],
            [np.full(len(draws), self._mask_id), random_ids],
            ids_N[chosen_N],
        )
        return noisy_N
