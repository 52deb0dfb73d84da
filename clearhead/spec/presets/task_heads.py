"""Heads for outputs other than words: data, no modules."""

from __future__ import annotations

from typing import Literal

from clearhead import spec

PoolBy = Literal["first", "mean", "last"]


def default_pool(model: spec.Model) -> PoolBy:
    """Return which states usually stand for the sequence: a decoder has read all of it in the last one only."""
    return "mean" if model.decoder is None else "last"


def label_head(width: int, count: int, *, pool: PoolBy, inner: Literal["tanh", "gelu"] | None = "tanh") -> spec.Head:
    """One score of a sequence for each label.

    Args:
        width: of the states.
        count: labels; 1 for a number.
        pool: which states stand for the sequence.
        inner: the activation of an inner layer; None: one layer without a bias is all.

    Source: arXiv 1810.04805, section 3.2 (an inner layer with tanh, then the labels).
    """
    if inner is None:
        return spec.Head(layers=(spec.Pool(by=pool), spec.Linear(size=count, bias=False)))
    layers = (spec.Linear(size=width), spec.Activation(function=inner), spec.Linear(size=count))
    return spec.Head(layers=(spec.Pool(by=pool), *layers))


def default_label_head(model: spec.Model, count: int, *, pool: PoolBy) -> spec.Head:
    """The head that published classifiers with such stacks have, so that one trained here can be saved as one of them.

    Args:
        model: whose stacks it reads.
        count, pool: as in `label_head`.

    Source: one linear layer on a decoder, the GPT-1 report, section 3.2; tanh behind an encoder with norms after the
    sum, arXiv 1810.04805, section 3.2, and behind two stacks, arXiv 1910.13461, section 3.1; GELU behind an encoder
    with norms before the branches, arXiv 2503.05500 and its released code.
    """
    top = model.decoder or model.encoder
    assert top is not None, "a validated model has a stack"
    if model.encoder is None:
        return label_head(top.width, count, pool=pool, inner=None)
    is_modern = model.decoder is None and top.final_norm is not None
    return label_head(top.width, count, pool=pool, inner="gelu" if is_modern else "tanh")


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
