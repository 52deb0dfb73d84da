"""The backward pass of attention by products is that of the plain computation, and only training in bf16 uses it.

Axis sizes are distinct primes: B batch, H heads, T queries, S keys, E head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.core import Transformer, build
from clearhead.core.attention import Attention
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training import fast_attention as module_under_test
from clearhead.training.fast_attention import attention, fast_attention

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


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    monkeypatch.setattr(module_under_test, "has_fast_bf16", lambda device: True)
    torch.manual_seed(2)
    hparams = Hyperparameters(layers=2, width=14, heads=2, dropout=0.0, tie="none")
    return build(build_spec(hparams, source_vocab=11, target_vocab=13)).train()


def gradients(model: Transformer, precision: str) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids, target_ids = (torch.randint(0, size, (3, 67), generator=generator) for size in (11, 13))
    mask = torch.arange(67) < torch.tensor([[67], [5], [40]])
    with fast_attention(model, precision), torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, target_ids, mask=mask).logits
        loss = logits.float().logsumexp(-1).square().sum()
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_model_has_the_same_loss_and_the_same_gradients_up_to_rounding(model: Transformer) -> None:
    loss, ours = gradients(model, "bf16")
    plain_loss, theirs = gradients(model, "fp32")
    assert torch.equal(loss, plain_loss)  # the forward pass is the same
    assert any(not torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    together = torch.cat([one.flatten() for one in ours]), torch.cat([one.flatten() for one in theirs])
    assert far(together[0], together[1].double()) < 0.02


def test_outside_the_block_attentions_have_their_own_functions(model: Transformer) -> None:
    with fast_attention(model, "bf16"):
        assert all("mix" in vars(part) for part in model.modules() if isinstance(part, Attention))
    assert not any("mix" in vars(part) for part in model.modules())
    with fast_attention(model, "fp32"):
        assert not any("mix" in vars(part) for part in model.modules())
