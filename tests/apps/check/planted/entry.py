"""Entries of the tables of planted mistakes, and readers for weights of each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor | None]


@dataclass(frozen=True)
class Planted:
    """A student's code: `make(width, heads)` builds it; `cause` names its mistake, and None means that it is right.

    `inputs` are its arguments: x, or q k v, then perhaps mask. `mask` is the meaning of the mask: attend (True =
    attend), block (True = block), additive (0 and -inf), or ones (int 1 = attend). A causal part masks by itself;
    "causal attend" also takes a mask, and "float ones" is ones as floats.
    `weights` reads q, k, v, o (out, in) and the biases qb, kb, vb, ob. None means that the part is a function of x,
    wq, wk, wv, wo (in, out) and heads.
    `shows` is the result that reveals the mistake: output, empty_row (a fully masked row), half (float16), or caller (a
    changed mask). It may also be long (one head, more steps than the width).
    """

    name: str
    make: Callable[[int, int], Any]
    cause: str | None = None
    inputs: str = "x"
    mask: str = "none"
    weights: Callable[[Any], Weights] | None = None
    time_first: bool = False
    shows: str = "output"


def separate(*names: str) -> Callable[[nn.Module], Weights]:
    """Weights of four linear layers by their names: query, key, value and perhaps the output."""

    def read(candidate: nn.Module) -> Weights:
        weights: Weights = {}
        for letter, name in zip("qkvo", names, strict=False):
            layer = getattr(candidate, name)
            weights |= {letter: layer.weight, letter + "b": layer.bias}
        return weights

    return read


def read_fused(name: str, out: str, heads: str | None = None) -> Callable[[nn.Module], Weights]:
    """Weights of one linear layer [q|k|v], or [h][q, k, v] where `heads` names the number of heads."""

    def read(candidate: nn.Module) -> Weights:
        layer, last = getattr(candidate, name), getattr(candidate, out)
        weights: Weights = {"o": last.weight, "ob": last.bias}
        for suffix, tensor in (("", layer.weight), ("b", layer.bias)):
            if tensor is None:
                continue
            if heads is None:
                thirds = tensor.chunk(3)
            else:
                grouped = tensor.unflatten(0, (getattr(candidate, heads), 3, -1))
                thirds = [grouped[:, i].flatten(0, 1) for i in range(3)]
            weights |= {letter + suffix: third for letter, third in zip("qkv", thirds, strict=True)}
        return weights

    return read


def read_stacked(candidate: nn.Module) -> Weights:
    """Weights of raw parameters (heads, width, head) and (heads, head, width)."""
    weights: Weights = {a: getattr(candidate, "W_" + a.upper()).transpose(1, 2).flatten(0, 1) for a in "qkv"}
    return {**weights, "o": candidate.W_O.flatten(0, 1).T}


def per_head(candidate: nn.Module) -> Weights:
    """Weights of lists with one linear layer per head."""
    weights: Weights = {
        a: torch.cat([m.weight for m in getattr(candidate, n)]) for a, n in zip("qkv", NAMES, strict=True)
    }
    return {**weights, "o": candidate.proj.weight, "ob": candidate.proj.bias}


NAMES = ("queries", "keys", "values")
