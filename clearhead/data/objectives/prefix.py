"""Prefix language modelling: a text is cut once, and the model continues its beginning.

Shape suffixes: N tokens of all windows, B windows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.data.batches.base import Batch
from clearhead.data.objectives.rows import Window, denoising_batch, without_special
from clearhead.text.tokenizer import Tokenizer


class PrefixSplit:
    """Objective of prefix language modelling: cuts each window into a source and a target, for an encoder-decoder.

    Every length of the prefix, from 0 tokens to all but one, is equally likely.

    Args:
        tokenizer: the tokenizer, which defines the special ids and the padding id.

    Source: arXiv 1801.10198, section 4.1 (a continuation as the target of a source); arXiv 1910.10683, section 3.3.1.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, windows: Sequence[Window], generator: np.random.Generator) -> Batch:
        """Return a batch with the prefix of each window as source and the rest as target, both with an end token.

        Args:
            windows: the ids of each window, special ids included; at least one window.
            generator: the random generator of the cuts.
        """
        rows = without_special(windows, self._tokenizer)
        is_prefix_N = rows.positions < np.repeat(_cuts(rows.lengths, generator), rows.lengths)
        return denoising_batch(rows.keep(is_prefix_N), rows.keep(~is_prefix_N), self._tokenizer)


def _cuts(counts_B: Int64[ndarray, " rows"], generator: np.random.Generator) -> Int64[ndarray, " rows"]:
    """Draw a random length for the prefix of each row, below the length of the row."""
    cuts_B: Int64[ndarray, " rows"] = np.floor(generator.random(len(counts_B)) * counts_B).astype(np.int64)
    return cuts_B
