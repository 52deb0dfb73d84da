"""Few shapes: lengths and numbers of rows are rounded, because some kernels are made anew for every shape.

On CPUs with matrix units oneDNN makes each product in 16 bits for its number of rows * tokens: some milliseconds and
almost a megabyte for each.
"""

from __future__ import annotations

# Between one power of two and the next come at most so many lengths, and so many numbers of rows. On Multi30k both
# together take 102 different products of rows and tokens down to 51, for 2.5 % more padding.
_STEPS = 16
_LEAST_LENGTH_STEP = 2


def padded_length(longest: int, limit: int) -> int:
    """Return how many tokens the rows of a batch have.

    Args:
        longest: tokens of the longest row, at least 1.
        limit: the longest row of all data, which no batch exceeds: a model may have no more positions.
    """
    step = max(_LEAST_LENGTH_STEP, _power_of_two(longest) // _STEPS)
    return min(-(-longest // step) * step, limit)


def rounded_rows(most: int) -> int:
    """Return how many rows a batch has where it may have so many, at least 1."""
    step = max(1, _power_of_two(most) // _STEPS)
    return most // step * step


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)
