"""Specs of heads for labels, token labels and vectors."""

from __future__ import annotations

from typing import Literal

from clearhead import spec

PoolBy = Literal["first", "mean", "last"]


def default_pool(model: spec.Model) -> PoolBy:
    """Return the default pooling: the mean for an encoder, the last state for a decoder, which has read all tokens."""
    return "mean" if model.decoder is None else "last"


def label_head(width: int, count: int, *, pool: PoolBy, inner: Literal["tanh", "gelu"] | None = "tanh") -> spec.Head:
    """Return a head that gives each sequence one score per label.

    Args:
        width: the width of the hidden states.
        count: the number of labels; 1 for a regression.
        pool: the states that represent the sequence.
        inner: the activation of an inner layer; None means a single linear layer without bias.

    Source: arXiv 1810.04805, section 3.2 (an inner layer with tanh, then the labels).
    """
    if inner is None:
        return spec.Head(layers=(spec.Pool(by=pool), spec.Linear(size=count, bias=False)))
    layers = (spec.Linear(size=width), spec.Activation(function=inner), spec.Linear(size=count))
    return spec.Head(layers=(spec.Pool(by=pool), *layers))


def default_label_head(model: spec.Model, count: int, *, pool: PoolBy) -> spec.Head:
    """Return the label head of published classifiers with the same stacks, so that transformers can load the model.

    Args:
        model: the spec with the stacks.
        count, pool: the arguments of `label_head`.

    A decoder gets one linear layer. An encoder with norms after the sum, and a model with two stacks, get an inner
    layer with tanh. An encoder with norms before the branches gets an inner layer with GELU.

    Source: the GPT-1 report, section 3.2 (decoder); arXiv 1810.04805, section 3.2 (encoder); arXiv 1910.13461, section
    3.1 (two stacks); arXiv 2503.05500 and its released code (norms before the branches).
    """
    top = model.decoder or model.encoder
    assert top is not None, "a validated model has a stack"
    if model.encoder is None:
        return label_head(top.width, count, pool=pool, inner=None)
    is_modern = model.decoder is None and top.final_norm is not None
    return label_head(top.width, count, pool=pool, inner="gelu" if is_modern else "tanh")


def token_head(count: int) -> spec.Head:
    """Return a head that gives each token one score per label. Source: arXiv 1810.04805, sections 4.1 and 5.3."""
    return spec.Head(layers=(spec.Linear(size=count),))


def vector_head(*, pool: PoolBy) -> spec.Head:
    """Return a head that gives each sequence one vector of length 1. Source: arXiv 1908.10084, section 3."""
    return spec.Head(layers=(spec.Pool(by=pool), spec.L2Normalize()))


def with_head(model: spec.Model, head: spec.Head) -> spec.Model:
    """Return a spec with the same stacks and another head.

    Raises:
        InputError: the head does not fit the stacks; one report names all faults.
    """
    return spec.validate(model.model_copy(update={"head": head}))
