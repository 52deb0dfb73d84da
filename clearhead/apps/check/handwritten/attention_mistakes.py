"""Reference attention in plain PyTorch, in which a changed setting reproduces each known mistake.

Legend: B batch, T queries, S keys, H heads, E head size, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.weights import LinearMap, LinearMaps

Split = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Probe:
    """Test input of an attention: query, memory and mask.

    Args:
        name: description for the report.
        query: source of the queries [B, T, D].
        memory: source of keys and values [B, S, D]; None means the query.
        allowed: mask [B or 1, 1, T or 1, S], True = may attend; None means no mask.
    """

    name: str
    query: Tensor
    memory: Tensor | None = None
    allowed: Tensor | None = None


def _split_interleaved(x: Tensor, heads: int) -> Tensor:
    apart: Tensor = x.unflatten(-1, (-1, heads))
    return apart.permute(0, 3, 1, 2)


SPLITS: dict[str, Split] = {
    "heads": lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2),
    "interleaved": _split_interleaved,
    "view": lambda x, heads: x.reshape(len(x), heads, x.shape[1], -1),
    "view of features first": lambda x, heads: x.mT.reshape(len(x), heads, x.shape[1], -1),
    "pieces of `heads` features": lambda x, heads: x.unflatten(-1, (-1, heads)).transpose(1, 2),
    "tokens first": lambda x, heads: x.unflatten(-1, (heads, -1)),
    "heads first": lambda x, heads: (
        x.unflatten(-1, (heads, -1)).permute(2, 0, 1, 3).reshape(len(x), heads, x.shape[1], -1)
    ),
    "view of batch": lambda x, heads: x.reshape(heads, len(x), x.shape[1], -1).transpose(0, 1),
    "reversed": lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2).flip(1),
    "shifted": lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2).roll(1, 1),
}
MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda mixed: mixed.transpose(1, 2).flatten(2),
    "interleaved": lambda mixed: mixed.permute(0, 2, 3, 1).flatten(2),
    "view": lambda mixed: mixed.reshape(len(mixed), mixed.shape[2], -1),
    "view of features first": lambda mixed: mixed.mT.reshape(len(mixed), mixed.shape[2], -1),
    "tokens first": lambda mixed: mixed.flatten(2),
    "batch and heads": lambda mixed: mixed.transpose(0, 1).permute(0, 2, 1, 3).reshape(len(mixed), mixed.shape[2], -1),
    "heads first": lambda mixed: mixed.transpose(0, 1).reshape(len(mixed), mixed.shape[2], -1),
    "heads, tokens, batch": lambda mixed: mixed.permute(2, 1, 0, 3).reshape(len(mixed), mixed.shape[2], -1),
    "tokens, batch": lambda mixed: mixed.permute(2, 0, 1, 3).reshape(len(mixed), mixed.shape[2], -1),
    "heads of the fold": lambda mixed: (
        mixed.reshape(mixed.shape[1], len(mixed), *mixed.shape[2:]).permute(1, 2, 0, 3).flatten(2)
    ),
    "heads of the fold, last": lambda mixed: (
        mixed.reshape(mixed.shape[1], len(mixed), *mixed.shape[2:])
        .transpose(0, 1)
        .reshape(len(mixed), mixed.shape[2], -1)
    ),
}
Scale = Callable[[int, int, int, int], float]
SCALES: dict[str, Scale] = {  # arguments: head size, heads, keys and width
    "root": lambda e, h, s, d: e**-0.5,
    "no_scaling": lambda e, h, s, d: 1.0,
    "scaled_by_width": lambda e, h, s, d: d**-0.5,
    "scaled_by_heads": lambda e, h, s, d: h**-0.5,
    "scaled_without_root": lambda e, h, s, d: 1.0 / e,
    "scaled_twice": lambda e, h, s, d: 1.0 / e,
    "scale_multiplied": lambda e, h, s, d: e**0.5,
    "scaled_by_length": lambda e, h, s, d: s**-0.5,
}
_MORE_SCALES: dict[str, tuple[Scale, ...]] = {
    "scaled_by_width": (lambda e, h, s, d: 1.0 / d,),
    "scaled_by_heads": (lambda e, h, s, d: 1.0 / h,),
    "scaled_twice": (lambda e, h, s, d: e**-1.5, lambda e, h, s, d: e**-0.75),
    "scale_multiplied": (lambda e, h, s, d: float(e),),
}


@dataclass(frozen=True)
class Steps:
    """Settings of the reference attention; the defaults are correct, other values are mistakes or variants.

    Args:
        scale: function that returns the factor on the scores.
        softmax: axis of the scores [B, H, T, S] over which the softmax is taken; -1 is correct.
        query_split, key_split, value_split, merge: keys of `SPLITS` and `MERGES`, which name the layouts of the heads.
        without: projections without bias, such as "query"; "output projection" if the output projection is missing.
        transposed: projections with a transposed weight, such as "query".
        roles: names of the projections that compute queries, keys and values.
        inputs: sources of queries, keys and values: 0 the query, 1 the memory.
        is_flipped: True computes the scores as k q^T.
        mask: operation that applies the mask, such as "hide" (the correct one) or "ignored".
        value: number that the scores of hidden keys are set to; operations such as "added" do not use it.
        is_causal: True adds a causal mask to the mask of the caller.
        diagonal: diagonal of the causal mask: 0 is right, 1 shows the next token.
        slices: "first" or "blocks" if tokens instead of features are sliced into heads; "" otherwise.
    """

    scale: Scale = SCALES["root"]
    softmax: int = -1
    query_split: str = "heads"
    key_split: str = "heads"
    value_split: str = "heads"
    merge: str = "heads"
    without: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    roles: tuple[str, str, str] = ("query", "key", "value")
    inputs: tuple[int, int, int] = (0, 1, 1)
    is_flipped: bool = False
    mask: str = "hide"
    value: float = -math.inf
    is_causal: bool = False
    diagonal: int = 0
    slices: str = ""


def attend(steps: Steps, weights: LinearMaps, probe: Probe, heads: int) -> Tensor:
    """Return the output [B, T, D] of the reference attention for a test input, with the settings in `steps`."""
    sources = probe.query, probe.query if probe.memory is None else probe.memory
    q, k, v = (
        _project(steps, weights, role, sources[which]) for role, which in zip(steps.roles, steps.inputs, strict=True)
    )
    if steps.slices:
        return _finish(steps, weights, _attend_over_slices(steps, q, k, v, heads))
    size = q.shape[-1] // heads
    groups = heads if steps.query_split.startswith("pieces") else k.shape[-1] // size
    q = SPLITS[steps.query_split](q, heads)
    k, v = SPLITS[steps.key_split](k, groups), SPLITS[steps.value_split](v, groups)
    if k.shape[1] != q.shape[1] and steps.query_split != "tokens first":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (k @ q.mT if steps.is_flipped else q @ k.mT) * steps.scale(
        q.shape[-1], heads, k.shape[2], probe.query.shape[-1]
    )
    return _finish(steps, weights, MERGES[steps.merge](_weights(steps, scores, probe) @ v))


def _project(steps: Steps, weights: LinearMaps, role: str, x: Tensor) -> Tensor:
    projection: LinearMap = weights[role]
    weight = projection.weight.T if role in steps.transposed else projection.weight
    return torch.nn.functional.linear(x, weight, None if role in steps.without else projection.bias)


def _finish(steps: Steps, weights: LinearMaps, merged: Tensor) -> Tensor:
    if "out" not in weights or "output projection" in steps.without:
        return merged
    return _project(steps, weights, "out", merged)


def _attend_over_slices(steps: Steps, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    width, size = q.shape[-1], q.shape[-1] // heads
    starts = [0] if steps.slices == "first" else range(0, q.shape[1], size)
    length = width if steps.slices == "first" else size
    pieces = []
    for start in starts:
        a, b, c = (x[:, start : start + length] for x in (q, k, v))
        pieces.append((a @ b.mT * steps.scale(width, heads, b.shape[1], width)).softmax(-1) @ c)
    return torch.cat(pieces, 1)


def _build_mask(steps: Steps, probe: Probe, queries: int, keys: int) -> Tensor | None:
    """Combine the caller's mask and the causal mask by `steps.mask`, True = may attend; None hides nothing."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(steps.diagonal) if steps.is_causal else None
    passed = probe.allowed
    if passed is not None and steps.mask == "ignored":
        passed = None
    if passed is None or causal is None:
        either = passed if causal is None else causal
        if either is None or steps.mask not in ("inverted", "transposed", "diagonal hidden"):
            return either
        if steps.mask == "diagonal hidden":
            return either & ~torch.eye(queries, keys, dtype=torch.bool)
        return ~either if steps.mask == "inverted" else either.mT
    match steps.mask:
        case "inverted":
            return causal & ~passed
        case "transposed":
            return causal & passed.mT
        case "either":
            return causal | passed
        case "only future":
            return ~causal & passed
        case "not both":
            return ~causal | passed
        case "differ":
            return causal ^ passed
        case "neither":
            return ~(causal | ~passed)
        case "nor":
            return ~(causal | passed)
        case "inverted both":
            return ~(causal & passed)
        case "own inverted, or given inverted":
            return ~causal | ~passed
        case "own alone":
            return causal
        case "given alone":
            return passed
    return causal & passed


def _weights(steps: Steps, scores: Tensor, probe: Probe) -> Tensor:
    allowed = _build_mask(steps, probe, *scores.shape[-2:])
    if allowed is None:
        return scores.softmax(steps.softmax)
    if steps.mask == "of other rows":
        rows = allowed.expand(len(scores), 1, *scores.shape[-2:])[:, 0]
        order = torch.arange(scores.shape[0] * scores.shape[1]) % len(scores)
        allowed = rows[order].view(scores.shape)
    match steps.mask:
        case "added":
            return (scores + allowed.to(scores.dtype)).softmax(steps.softmax)
        case "added inverted":
            return (scores + (~allowed).to(scores.dtype)).softmax(steps.softmax)
        case "subtracted":
            return (scores - (~allowed).to(scores.dtype)).softmax(steps.softmax)
        case "multiplied":
            return (scores * allowed).softmax(steps.softmax)
        case "multiplied inverted":
            return (scores * ~allowed).softmax(steps.softmax)
        case "after":
            return scores.softmax(steps.softmax) * allowed
        case "after inverted":
            return scores.softmax(steps.softmax) * ~allowed
        case "hide after":
            return scores.softmax(steps.softmax).masked_fill(~allowed, steps.value)
        case "hide after, inverted":
            return scores.softmax(steps.softmax).masked_fill(allowed, steps.value)
        case "plus":
            return (scores + (~allowed) * steps.value).softmax(steps.softmax)
    return scores.masked_fill(~allowed, steps.value).softmax(steps.softmax)


CONVENTIONS: tuple[dict[str, Any], ...] = tuple(
    {"query_split": split, "key_split": split, "value_split": value, "merge": value}
    for split in ("heads", "interleaved")
    for value in ("heads", "interleaved")
)
"""Layouts of heads among the features: any order is right if queries match keys, and values match the result."""


def list_mistakes(steps: Steps, weights: LinearMaps, has_mask: bool, has_memory: bool) -> Iterator[tuple[str, Steps]]:
    """Yield the name of each known mistake with settings of the reference attention that reproduce it."""
    for cause, change in _list_changes(weights, has_mask or steps.is_causal, has_memory, steps.is_causal):
        yield cause, replace(steps, **change)


def _list_changes(
    weights: LinearMaps, masks: bool, has_memory: bool, is_causal: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    for cause, scale in SCALES.items():
        if cause != "root":
            yield from ((cause, {"scale": variant}) for variant in (scale, *_MORE_SCALES.get(cause, ())))
    yield "softmax_over_queries", {"softmax": -2}
    yield "softmax_over_heads", {"softmax": 1}
    yield "softmax_over_batch", {"softmax": 0}
    if "out" in weights:
        yield "output_projection_missing", {"without": frozenset({"output projection"})}
    biased = [role for role, projection in weights.items() if projection.bias is not None]
    for roles in dict.fromkeys((*((role,) for role in biased), tuple(biased), tuple(set(biased) - {"out"}))):
        if roles:
            yield "bias_missing", {"without": frozenset(roles)}
    square = [role for role, projection in weights.items() if projection.weight.shape[0] == projection.weight.shape[1]]
    for roles in dict.fromkeys(((*square,), *((role,) for role in square), tuple(set(square) - {"out"}))):
        yield "weights_transposed", {"transposed": frozenset(roles)}
    yield from _list_swaps(has_memory)
    yield from _list_layouts()
    if masks:
        yield from _list_mask_mistakes(is_causal)


def _list_swaps(has_memory: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    flipped = "scores_transposed", {"is_flipped": True}
    swaps = (
        ("query_and_key_swapped", {"roles": ("key", "query", "value")}),
        ("query_and_key_swapped", {"inputs": (1, 0, 0)}),
        ("query_and_key_swapped", {"inputs": (1, 0, 1)}),
        ("query_and_key_swapped", {"inputs": (1, 1, 0)}),
        ("query_and_key_swapped", {"inputs": (1, 1, 1)}),
        ("query_and_key_swapped", {"inputs": (1, 0, 1), "roles": ("key", "query", "value")}),
        ("query_and_key_swapped", {"inputs": (1, 0, 0), "roles": ("key", "query", "value")}),
    )
    yield from ((*swaps, flipped) if has_memory else (flipped, swaps[0]))
    yield "key_and_value_swapped", {"roles": ("query", "value", "key")}
    yield "key_and_value_swapped", {"roles": ("key", "value", "query")}
    if has_memory:
        yield "key_and_value_swapped", {"inputs": (0, 1, 0)}
        yield "key_and_value_swapped", {"inputs": (0, 0, 1)}
        yield "key_and_value_swapped", {"inputs": (0, 0, 0)}


def _list_layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    def every(split: str) -> dict[str, str]:
        return {"query_split": split, "key_split": split, "value_split": split}

    pieces = every("pieces of `heads` features")
    of_head_size: Scale = lambda e, h, s, d: (d // h) ** -0.5  # noqa: E731
    for scale in (
        *(SCALES[name] for name in ("root", "no_scaling", "scaled_by_heads", "scaled_by_width")),
        of_head_size,
    ):
        for merge in MERGES:
            yield "split_by_number_of_heads", {**pieces, "scale": scale, "merge": merge}
    for kind in ("first", "blocks"):
        yield "time_sliced_for_features", {"slices": kind}
        yield "time_sliced_for_features", {"slices": kind, "scale": of_head_size}
    for split in ("view", "tokens first", "view of features first", "heads first", "view of batch"):
        cause = (
            "heads_without_transpose"
            if split in ("view", "tokens first", "view of features first")
            else "batch_mixed_into_heads"
        )
        for merge in MERGES:
            yield cause, {**every(split), "merge": merge}
    for merge in MERGES:
        batch = any(word in merge for word in ("batch", "heads first", "fold"))
        if merge not in ("heads", "interleaved", "tokens first"):
            yield "batch_mixed_into_heads" if batch else "heads_merged_without_transpose", {"merge": merge}
    yield "heads_merged_without_transpose", {"merge": "interleaved"}
    for other in ("interleaved", "reversed", "shifted", "view"):
        for role in ("query", "key", "value"):
            yield "heads_mismatched", {f"{role}_split": other}
        if other != "interleaved":
            yield "heads_mismatched", {"query_split": other, "key_split": other}
    for split in ("view", "heads first"):
        yield "heads_without_transpose", {"key_split": split, "value_split": split}
        yield "heads_without_transpose", {"query_split": split, "key_split": split}


def _list_mask_mistakes(is_causal: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "mask_ignored", {"mask": "ignored"}
    yield "mask_polarity", {"mask": "inverted"}
    if is_causal:
        yield "mask_polarity", {"mask": "transposed"}
    yield "mask_transposed", {"mask": "transposed"}
    for kind in ("added", "added inverted", "subtracted"):
        yield "mask_added_where_boolean", {"mask": kind}
    for kind in ("multiplied", "multiplied inverted"):
        yield "mask_multiplied_before_softmax", {"mask": kind}
    for kind in ("after", "after inverted"):
        yield "mask_after_softmax", {"mask": kind}
    for value in (-math.inf, -1e9, 1e-9, -1e-9, -1e20, -1e10, -1e4):
        for kind in ("hide after", "hide after, inverted"):
            yield "mask_after_softmax", {"mask": kind, "value": value}
    yield "batch_mixed_into_heads", {"mask": "of other rows"}
    yield "causal_diagonal_blocked", {"mask": "diagonal hidden"}
    for kind in ("either", "only future", "not both", "differ", "neither", "nor", "inverted both",
                 "own inverted, or given inverted"):  # fmt: skip
        yield "masks_combined_by_max", {"mask": kind}
    if is_causal:
        yield "causal_future_visible", {"diagonal": 1}
        yield "causal_future_visible", {"is_causal": False}
        yield "causal_diagonal_blocked", {"diagonal": -1}
        yield "mask_ignored", {"mask": "own alone"}
    values = (
        0.0,
        -1e-9,
        1e-9,
        -1.0,
        1.0,
        -2.0,
        -5.0,
        -10.0,
        -20.0,
        -50.0,
        -100.0,
        -1e3,
        -1e4,
        1e9,
        1e4,
        -0.5,
        -1e-6,
        -1e-4,
    )
    for value in values:
        for kind in ("hide", "plus"):
            yield "mask_value_too_small", {"mask": kind, "value": value}
