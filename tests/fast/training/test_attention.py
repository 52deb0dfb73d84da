"""Attention by the compiled kernels is that of the plain computation, forward and backward.

Axis sizes are distinct primes: B batch, H heads, T queries, S keys, E head size.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.kernels.positions import rotate as plain_rotation
from clearhead.fast.training.attention import attention, rotation
from clearhead.fast.training.dropout import SeededDropout

pytestmark = pytest.mark.usefixtures("bf16_kernels")
B, H, T, S, E = 5, 3, 139, 151, 7


def leaves(queries: int, keys: int, size: int = E) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((B, queries, H, size), (B, keys, H, size), (B, keys, H, size))
    return [torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]


def masks(queries: int, keys: int) -> dict[str, Tensor]:
    real = torch.arange(keys) < torch.tensor([keys, 31, 2, 100, 0])[:, None]  # the last row may attend to nothing
    window = (torch.arange(queries)[:, None] - torch.arange(keys)).abs() <= 17
    return {"padding": real[:, None, None], "window": window[None, None], "both": (real[:, None] & window)[:, None]}


def plain(
    inputs: list[Tensor], mask: Tensor | None, bias: Tensor | None = None, factors: Tensor | float = 1.0
) -> Tensor:
    scores = inputs[0] @ inputs[1].mT * 0.3 + (0.0 if bias is None else bias)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) * factors @ inputs[2]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


# Less than a block of 32, several blocks, and more queries than the backward pass takes at a time.
@pytest.mark.parametrize(("queries", "keys", "size"), [(T, S, E), (5, 3, 16), (541, 37, 64)])
@pytest.mark.parametrize("kind", ["causal", "padding", "window", "both", "nothing"])
def test_outputs_and_gradients_are_those_of_the_plain_computation(
    kind: str, queries: int, keys: int, size: int
) -> None:
    is_causal = kind == "causal"
    keys = queries if is_causal else keys
    mask = masks(queries, keys).get(kind)
    inputs = leaves(queries, keys, size)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = plain(exact, torch.ones(queries, queries, dtype=torch.bool).tril() if is_causal else mask)
    actual = attention(*inputs, mask, scale=0.3, is_causal=is_causal)
    assert relative_error(actual, expected) < 0.005
    gradient = torch.randn(B, H, queries, size).bfloat16()
    ours = torch.autograd.grad(actual, inputs, gradient)
    theirs = torch.autograd.grad(expected, exact, gradient.double())
    assert all(relative_error(*pair) < 0.01 for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize(("queries", "keys"), [(T, S), (541, 37)])
@pytest.mark.parametrize("kind", ["causal", "padding", "both", "nothing"])
def test_a_bias_is_added_to_the_scores_and_has_a_gradient(kind: str, queries: int, keys: int, rows: int) -> None:
    is_causal = kind == "causal"
    keys = queries if is_causal else keys
    mask = masks(queries, keys).get(kind)
    inputs = [*leaves(queries, keys), torch.randn(rows, H, queries, keys, requires_grad=True)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    seen = torch.ones(queries, queries, dtype=torch.bool).tril() if is_causal else mask
    expected = plain(exact[:3], seen, exact[3])
    actual = attention(*inputs[:3], mask, inputs[3], scale=0.3, is_causal=is_causal)
    assert relative_error(actual, expected) < 0.005
    gradient = torch.randn(actual.shape).bfloat16()
    ours = torch.autograd.grad(actual, inputs, gradient)
    theirs = torch.autograd.grad(expected, exact, gradient.double())
    assert all(relative_error(*pair) < 0.01 for pair in zip(ours, theirs, strict=True))


def dropped_weights(queries: int, keys: int, is_causal: bool, mask: Tensor | None, dropout: SeededDropout) -> Tensor:
    """Return the scaled mask of a dropout: True weights are seen where values are unit vectors."""
    heads = [torch.zeros(B, H, tokens, keys, dtype=torch.bfloat16) for tokens in (queries, keys)]
    units = torch.eye(keys, dtype=torch.bfloat16).expand(B, H, keys, keys)
    weights = attention(*heads, units, mask, scale=0.3, is_causal=is_causal, dropout=dropout)
    return weights.ne(0.0) * dropout.kept_scale


@pytest.mark.parametrize(("kind", "has_bias"), [("causal", False), ("both", True), ("nothing", False)])
@pytest.mark.parametrize(("queries", "keys", "size"), [(T, S, E), (5, 3, 16), (541, 37, 64)])
def test_dropout_is_that_of_the_plain_computation_with_the_same_mask(
    kind: str, queries: int, keys: int, size: int, has_bias: bool
) -> None:
    is_causal, dropout = kind == "causal", SeededDropout.draw(0.3)
    keys = queries if is_causal else keys
    mask = masks(queries, keys).get(kind)
    inputs = leaves(queries, keys, size)
    inputs += [torch.randn(1, H, queries, keys, requires_grad=True)] if has_bias else []
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    factors = dropped_weights(queries, keys, is_causal, mask, dropout)
    seen = torch.ones(queries, queries, dtype=torch.bool).tril() if is_causal else mask
    expected = plain(exact[:3], seen, exact[3] if has_bias else None, factors.double())
    actual = attention(*inputs[:3], mask, *inputs[3:], scale=0.3, is_causal=is_causal, dropout=dropout)
    assert relative_error(actual, expected) < 0.005
    gradient = torch.randn(B, H, queries, size).bfloat16()
    ours = torch.autograd.grad(actual, inputs, gradient)
    theirs = torch.autograd.grad(expected, exact, gradient.double())
    assert all(relative_error(*pair) < 0.01 for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_each_weight_is_dropped_by_chance_alone(p: float) -> None:
    """The share of dropped weights is p in every row, column and head, and no two of them are alike."""
    torch.manual_seed(7)
    dropout = SeededDropout.draw(p)
    factors = dropped_weights(T, S, False, None, dropout)
    gone = factors.eq(0.0).double()
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3), (0, 1, 2, 3)):
        count = math.prod(gone.shape[axis] for axis in axes)
        assert float((gone.mean(axes) - p).abs().max()) < 5 * (p * (1 - p) / count) ** 0.5
    signs = (gone - p) / (p * (1 - p)) ** 0.5
    for rows in (signs.flatten(0, 1).flatten(1), signs[0, 0], signs[0, 0].mT, signs[:, :, 0].flatten(0, 1)):
        correlations = (rows @ rows.mT / rows.shape[1]).fill_diagonal_(0.0)
        assert float(correlations.abs().max()) < 6 * rows.shape[1] ** -0.5
    assert not torch.equal(factors, dropped_weights(T, S, False, None, SeededDropout.draw(p)))


def test_dropout_has_the_same_bits_with_any_number_of_threads() -> None:
    inputs, dropout, before, results = leaves(T, T), SeededDropout.draw(0.3), torch.get_num_threads(), []
    gradient = torch.randn(B, H, T, E).bfloat16()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            actual = attention(*inputs, None, scale=0.3, is_causal=True, dropout=dropout)
            results.append([actual, *torch.autograd.grad(actual, inputs, gradient)])
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, result, results[0])) for result in results)


def test_gradients_are_about_as_near_as_those_of_the_fused_kernel() -> None:
    inputs = leaves(T, T)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    gradient = torch.randn(B, H, T, E).bfloat16()
    theirs = torch.autograd.grad(plain(exact, torch.ones(T, T, dtype=torch.bool).tril()), exact, gradient.double())
    ours = torch.autograd.grad(attention(*inputs, None, scale=0.3, is_causal=True), inputs, gradient)
    fused = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3), inputs, gradient)
    for actual, other, expected in zip(ours, fused, theirs, strict=True):
        assert relative_error(actual, expected) < 1.5 * relative_error(other, expected)


def test_large_scores_and_numbers_that_are_none() -> None:
    inputs = leaves(T, T)
    with torch.no_grad():
        inputs[0].mul_(1e4)
    actual = attention(*inputs, None, scale=0.3, is_causal=True)
    assert (
        relative_error(actual, plain([tensor.double() for tensor in inputs], torch.ones(T, T, dtype=torch.bool).tril()))
        < 0.01
    )
    with torch.no_grad():
        inputs[0][1, 1, 7] = torch.nan
    actual = attention(*inputs, None, scale=0.3, is_causal=True)
    assert actual[1, 1, 7].isnan().all()
    assert actual.isnan().sum() == E


@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (19, 7)])
@pytest.mark.parametrize("has_positions", [False, True])
def test_rotations_and_their_gradients_are_those_of_the_plain_computation(
    size: int, pairs: int, has_positions: bool
) -> None:
    heads = leaves(T, S, size)[0]
    exact = heads.detach().double().requires_grad_()
    angles = torch.randn(B if has_positions else 1, 1, T, pairs)
    gradient = torch.randn(B, H, T, size).bfloat16()
    actual, expected = (
        rotate(x, angles.cos().to(kind), angles.sin().to(kind))
        for rotate, x, kind in ((rotation, heads, torch.float32), (plain_rotation, exact, torch.float64))
    )
    assert relative_error(actual, expected) < 0.003
    (ours,), (theirs,) = (
        torch.autograd.grad(y, x, gradient.to(y.dtype)) for y, x in ((actual, heads), (expected, exact))
    )
    assert relative_error(ours, theirs) < 0.003
    assert torch.equal(actual[..., 2 * pairs :], heads[..., 2 * pairs :])
