"""The backward pass of attention by products is that of the plain computation.

Axis sizes are distinct primes: B batch, H heads, T queries, S keys, E head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.training import fast_attention as module_under_test
from clearhead.training.fast_attention import attention

B, H, T, S, E = 5, 3, 139, 151, 7


def leaves(dtype: torch.dtype, queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((B, queries, H, E), (B, keys, H, E), (B, keys, H, E))
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def masks() -> dict[str, Tensor]:
    real = torch.arange(S) < torch.tensor([S, 31, 2, 100, 0])[:, None]  # the last row may attend to nothing
    window = (torch.arange(T)[:, None] - torch.arange(S)).abs() <= 17
    return {"padding": real[:, None, None], "window": window[None, None], "both": (real[:, None] & window)[:, None]}


def plain(inputs: list[Tensor], mask: Tensor | None) -> Tensor:
    scores = inputs[0] @ inputs[1].mT * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ inputs[2]


def far(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("chunk", [1, 1 << 21])
@pytest.mark.parametrize("kind", ["causal", "padding", "window", "both", "nothing"])
def test_gradients_are_those_of_the_plain_computation(monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    monkeypatch.setattr(module_under_test, "_CHUNK", chunk)
    is_causal = kind == "causal"
    mask = masks().get(kind)
    inputs = leaves(torch.float32, T, T if is_causal else S)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    triangle = torch.ones(T, T, dtype=torch.bool).tril()
    expected = plain(exact, triangle if is_causal else mask)
    found = attention(*inputs, mask, scale=0.3, is_causal=is_causal)
    assert far(found, expected) < 1e-5
    gradient = torch.randn(B, H, T, E)
    ours = torch.autograd.grad(found, inputs, gradient)
    theirs = torch.autograd.grad(expected, exact, gradient.double())
    assert all(far(*pair) < 1e-5 for pair in zip(ours, theirs, strict=True))


def test_in_bf16_gradients_are_about_as_near_as_those_of_the_fused_kernel() -> None:
    inputs = leaves(torch.bfloat16, T, T)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    gradient = torch.randn(B, H, T, E).bfloat16()
    theirs = torch.autograd.grad(plain(exact, torch.ones(T, T, dtype=torch.bool).tril()), exact, gradient.double())
    ours = torch.autograd.grad(attention(*inputs, None, scale=0.3, is_causal=True), inputs, gradient)
    fused = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3), inputs, gradient)
    for one, other, expected in zip(ours, fused, theirs, strict=True):
        assert far(one, expected) < max(0.01, 2 * far(other, expected))
