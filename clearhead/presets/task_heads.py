"""Heads for outputs other than words: data, no modules."""

from __future__ import annotations

from typing import Literal

from clearhead import spec

PoolBy = Literal["first", "mean", "last"]


def label_head(width: int, count: int, *, pool: PoolBy) -> spec.Head:
    """One score of a sequence for each label.

    Args:
        width: of the states.
        count: labels; 1 for a number.
        pool: which states stand for the sequence.

    Source: arXiv 1810.04805, section 3.2 (an inner layer with tanh, then the labels).
    """
    inner = spec.Linear(size=width)
    return spec.Head(layers=(spec.Pool(by=pool), inner, spec.Activation(function="tanh"), spec.Linear(size=count)))


def token_head(count: int) -> spec.Head:
    """One score of a token for each label. Source: arXiv 1810.04805, section 4.1 and 5.3."""
    return spec.Head(layers=(spec.Linear(size=count),))


def vector_head(*, pool: PoolBy) -> spec.Head:
    """One vector of length 1 for a sequence. Source: arXiv 1908.10084, section 3."""
    return spec.Head(layers=(spec.Pool(by=pool), spec.L2Normalize()))


def with_head(model: spec.Model, head: spec.Head) -> spec.Model:
    """Return the same stacks with another head.

    Raises:
        InputError: the head does not fit the stacks; every fault is named.
    """
    return spec.validate(model.model_copy(update={"head": head}))
