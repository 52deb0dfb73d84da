"""Helpers of the objectives: windows as ragged rows, ranks and sums within rows, and checks.

Shape suffixes: N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64, Integer
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, positions
from clearhead.data.batches.base import Batch, seq2seq_batch
from clearhead.text.tokenizer import Tokenizer

Window = Integer[ndarray, " _"]


def concat_windows(windows: Sequence[Window]) -> Ragged:
    """Concatenate whole windows, special ids included, into a ragged array."""
    lengths = np.array([len(window) for window in windows], dtype=np.int64)
    return Ragged.of(np.concatenate(windows).astype(np.int64), lengths)


def without_special(windows: Sequence[Window], tokenizer: Tokenizer) -> Ragged:
    """Concatenate windows, without their special ids, into a ragged array."""
    special = tokenizer.special_tokens.for_text
    assert all(len(window) >= len(special) for window in windows), "a window lacks the tokenizer's special ids"
    return concat_windows([window[len(special.prefix) : len(window) - len(special.suffix)] for window in windows])


def denoising_batch(source: Ragged, target: Ragged, tokenizer: Tokenizer) -> Batch:
    """Make an encoder-decoder batch of sources and targets that share one tokenizer; special ids are added here."""
    return seq2seq_batch(source, target, tokenizer, tokenizer, np.arange(len(source)))


def rank_in_rows(keys_N: Float[ndarray, " items"], counts: Int64[ndarray, " rows"]) -> Int64[ndarray, " items"]:
    """Return the rank of each item within its row, by its key, counted from 0."""
    rows = np.repeat(np.arange(len(counts)), counts)
    ranks_N = np.empty(len(keys_N), dtype=np.int64)
    ranks_N[np.lexsort((keys_N, rows))] = positions(counts)
    return ranks_N


def sum_rows(values_N: Integer[ndarray, " items"], counts: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
    """Return the sum of the items of each row."""
    totals = np.concatenate([[0], np.cumsum(values_N, dtype=np.int64)])
    ends = np.cumsum(counts)
    added: Int64[ndarray, " rows"] = totals[ends] - totals[ends - counts]
    return added


def check_share(share: float) -> float:
    """Check the share of tokens that noise changes, and return it.

    Raises:
        InputError: the share is not above 0 and below 1.
    """
    if not 0.0 < share < 1.0:
        raise InputError(f"the share of noise is {share}; expected a number above 0 and below 1, such as 0.15")
    return share


def need_mask_id(tokenizer: Tokenizer) -> int:
    """Return the id of the mask token.

    Raises:
        InputError: the tokenizer has no mask token.
    """
    if tokenizer.mask_id is None:
        raise InputError(
            "this objective needs a mask token, but the tokenizer has none: train a tokenizer with a mask token, "
            "or choose another tokenizer"
        )
    return tokenizer.mask_id
