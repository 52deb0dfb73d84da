"""Few shapes: lengths and numbers of rows are rounded, because some kernels are made anew for every shape.

On CPUs with matrix units oneDNN makes each product in 16 bits for its number of rows * tokens: some milliseconds and
almost a megabyte for each.
"""

from __future__ import annotations

from clearhead.core.kernels.linear_cross_entropy import shape_step

# With it, and with the steps of rows, Multi30k has 51 different products of rows and tokens instead of 102, for 2.5 %
# more padding.
_LEAST_LENGTH_STEP = 2


def padded_length(longest: int, limit: int) -> int:
    """Return how many tokens the rows of a batch have.

    Args:
        longest: tokens of the longest row, at least 1.
        limit: the longest row of all data, which no batch exceeds: a model may have no more positions.
    """
    step = max(_LEAST_LENGTH_STEP, shape_step(longest))
    return min(-(-longest // step) * step, limit)


def rounded_rows(most: int) -> int:
    """Return how many rows a batch has where it may have so many, at least 1."""
    return most - most % shape_step(most)
