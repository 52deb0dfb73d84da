"""The one equation: x <- out(x + sum_b scale_b * dropout(post_b(f_b(pre_b(pre(x))))))."""

from __future__ import annotations

import torch
from torch import nn

from clearhead import spec
from clearhead.core.attention import Context
from clearhead.core.context import Masking
from clearhead.core.feedforward import ACTIVATIONS, FeedForward
from clearhead.core.stack import Step

WIDTH = 7


def context(length: int) -> Context:
    position = torch.arange(length)[None]
    return Context(Masking(length, length), position, position)


def test_every_slot_of_the_equation() -> None:
    """Two branches that share the step's norm, each with its own norms and scale."""
    step = Step(
        WIDTH,
        spec.Step(
            pre=spec.LayerNorm(),
            out=spec.RMSNorm(),
            branches=(
                spec.Branch(function=spec.FeedForward(size=11), pre=spec.RMSNorm(), scale=0.3),
                spec.Branch(function=spec.FeedForward(size=5, gated=True, activation="silu"), post=spec.LayerNorm()),
            ),
        ),
        None,
    )
    for parameter in step.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, WIDTH)
    shared, (first, second) = step.pre(x), step.branches
    expected = step.out(x + 0.3 * first.function(first.pre(shared)) + second.post(second.function(shared)))
    torch.testing.assert_close(step(x, context(3)), expected)
    assert isinstance(first.post, nn.Identity) and isinstance(second.pre, nn.Identity)


def test_feed_forward_with_and_without_a_gate() -> None:
    x = torch.randn(2, 3, WIDTH)
    plain = FeedForward(WIDTH, spec.FeedForward(size=11, activation="gelu", bias_in=False))
    torch.testing.assert_close(plain(x), plain.down(nn.functional.gelu(x @ plain.up.weight.T)))
    assert plain.up.bias is None and plain.down.bias is not None
    gated = FeedForward(WIDTH, spec.FeedForward(size=11, activation="gelu_tanh", gated=True, bias_out=False))
    inner = nn.functional.gelu(gated.gate(x), approximate="tanh") * gated.up(x)
    torch.testing.assert_close(gated(x), inner @ gated.down.weight.T)
    far = torch.linspace(-3, 3, 101)
    assert 1e-4 < (ACTIVATIONS["gelu"](far) - ACTIVATIONS["gelu_tanh"](far)).abs().max() < 6e-4


def test_branch_dropout_comes_after_the_post_norm() -> None:
    branch = spec.Branch(function=spec.FeedForward(size=11), post=spec.LayerNorm(), dropout=0.5)
    step = Step(WIDTH, spec.Step(branches=(branch,)), None).train()
    x = torch.randn(23, 5, WIDTH)
    added = step(x, context(5)) - x
    assert 0.4 < (added == 0).float().mean() < 0.6
