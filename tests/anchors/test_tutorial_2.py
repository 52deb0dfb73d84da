"""Tutorial 2, notes on self-attention.

anchor              test
2.1                 test_attention_without_parameters
2.2                 test_rows_sum_to_one, test_permutation_equivariance, test_positions_break_the_equivariance
2.3, 2.4            test_parameter_counts
2.5                 test_heads_must_divide_the_width
2.6                 test_loop_equals_batch_equals_fused
2.7                 test_three_inputs_and_a_mask
2.8                 test_blocks_stack_in_either_order
2.9                 test_next_tokens_are_hidden_from_a_decoder_only
2.b2                test_scores_compare_queries_with_keys
2.b4 [run]          test_heads_are_slices_of_the_width
2.b8                test_three_inputs_and_a_mask
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.attention import Attention
from tests.anchors import builders


def set_identity(attention: nn.Module) -> None:
    with torch.no_grad():
        for module in attention.modules():
            if isinstance(module, nn.Linear):
                nn.init.eye_(module.weight)


def test_attention_without_parameters() -> None:
    """The basic form, softmax(x x^T) x, is our attention with identity projections and a scale of one."""
    x = torch.randn(34, 20, 10)
    attention = builders.multi_head(10, 1, bias=False, scale=1.0)
    set_identity(attention)
    values, weights = attention(x, return_weights=True)
    expected = (x @ x.mT).softmax(dim=-1)
    assert weights.shape == (34, 1, 20, 20)
    assert values.shape == (34, 20, 10)
    torch.testing.assert_close(weights[:, 0], expected)
    torch.testing.assert_close(values, expected @ x)


def test_rows_sum_to_one() -> None:
    _, weights = builders.multi_head(12, 3)(torch.randn(5, 7, 12), return_weights=True)
    assert weights.ge(0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(5, 3, 7))


def test_permutation_equivariance() -> None:
    attention = builders.multi_head(12, 3)
    x, order = torch.randn(5, 7, 12), torch.randperm(7)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])


def test_positions_break_the_equivariance() -> None:
    stack = builders.stack(12, 3, vocabulary=17, inner=24)
    placeless = stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"position": None})})
    ids, order = torch.randperm(17)[None, :7], torch.tensor([6, 4, 2, 0, 1, 3, 5])
    differences = []
    for choice in (placeless, stack):
        module = ch.build(spec.Model(encoder=choice)).eval()
        differences.append((module(ids[:, order]).hidden - module(ids).hidden[:, order]).abs().max())
    assert differences[0] < 1e-5 < 1e-2 < differences[1]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts() -> None:
    width, heads = 256, 4
    only_out = Attention(width, builders.attention(width, heads, bias=False, out_bias=True))
    assert count(only_out) == 4 * width**2 + width == 262_400
    assert width // heads == 64
    projections = [getattr(only_out, name).weight.numel() for name in ("query", "key", "value")]
    assert sum(projections) == 3 * heads * width * (width // heads) == 3 * width**2 == 196_608


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InputError, match="heads"):
        ch.MultiHeadAttention(256, 3)


def loop_over_heads(attention: nn.Module, x_BTD: Tensor, num_heads: int) -> Tensor:
    """The tutorial's first form: one head after another, then concatenated."""
    projected = (attention.get_submodule(name)(x_BTD).chunk(num_heads, dim=-1) for name in ("query", "key", "value"))
    outputs = []
    for query, key, value in zip(*projected, strict=True):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        outputs.append(scores.softmax(dim=-1) @ value)
    joined: Tensor = attention.get_submodule("out")(torch.cat(outputs, dim=-1))
    return joined


def folded_batch(attention: nn.Module, x_BTD: Tensor, num_heads: int) -> Tensor:
    """The tutorial's second form: heads folded into the batch, one bmm for all."""
    batch, length, width = x_BTD.shape
    query, key, value = (
        attention.get_submodule(name)(x_BTD).view(batch, length, num_heads, -1).transpose(1, 2).flatten(0, 1)
        for name in ("query", "key", "value")
    )
    scores = torch.bmm(query, key.mT) / math.sqrt(width // num_heads)
    mixed = torch.bmm(scores.softmax(dim=-1), value).view(batch, num_heads, length, -1)
    joined: Tensor = attention.get_submodule("out")(mixed.transpose(1, 2).reshape(batch, length, width))
    return joined


def test_loop_equals_batch_equals_fused() -> None:
    attention = builders.multi_head(20, 5, bias=False).eval()
    x = torch.randn(3, 7, 20)
    explicit, _ = attention(x, return_weights=True)
    for other in (attention(x), loop_over_heads(attention, x, 5), folded_batch(attention, x, 5)):
        torch.testing.assert_close(other, explicit, atol=1e-6, rtol=1e-5)


def test_three_inputs_and_a_mask() -> None:
    attention = builders.multi_head(12, 3)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    mask = torch.rand(2, 1, 5, 7) < 0.5
    mask[..., 0] = True
    values, weights = attention(x, memory, mask=mask, return_weights=True)
    assert (values.shape, weights.shape) == ((2, 5, 12), (2, 3, 5, 7))
    assert weights[~mask.expand_as(weights)].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))


@pytest.mark.parametrize("pre", [False, True])
def test_blocks_stack_in_either_order(pre: bool) -> None:
    module = ch.build(spec.Model(encoder=builders.stack(12, 3, vocabulary=17, inner=24, layers=5, pre=pre)))
    out = module(torch.randint(17, (2, 7))).hidden
    assert out.shape == (2, 7, 12)
    assert out.isfinite().all()


def test_next_tokens_are_hidden_from_a_decoder_only() -> None:
    """All next-token predictions of a sequence in one pass equal those made one at a time."""
    stack = builders.stack(12, 3, vocabulary=17, inner=24, causal=True)
    module = ch.build(spec.Model(decoder=stack, head=spec.Head(layers=(spec.Linear(size=17),)))).eval()
    ids = torch.randint(17, (2, 7))
    at_once = module(ids).logits
    for length in range(1, 8):
        torch.testing.assert_close(module(ids[:, :length]).logits[:, -1], at_once[:, length - 1])


def test_scores_compare_queries_with_keys() -> None:
    """The tutorial prints the score as q.x over the root of the width; it is q.k over the root of the head size."""
    attention = builders.multi_head(16, 1, bias=False)
    x = torch.randn(3, 7, 16)
    query, key = (attention.get_submodule(name)(x) for name in ("query", "key"))
    _, weights = attention(x, return_weights=True)
    torch.testing.assert_close(weights[:, 0], (query @ key.mT / math.sqrt(16)).softmax(-1))
    assert (weights[:, 0] - (query @ x.mT / math.sqrt(16)).softmax(-1)).abs().max() > 1e-3


def tutorial_slices(projected_BTD: Tensor, num_heads: int) -> list[Tensor]:
    """The tutorial slices axis 1, which is time, instead of the width."""
    size = projected_BTD.shape[-1] // num_heads
    return [projected_BTD[:, start : start + size] for start in range(0, projected_BTD.shape[-1], size)]


def test_heads_are_slices_of_the_width() -> None:
    x = torch.randn(3, 7, 20)
    wrong = tutorial_slices(x, 4)
    assert wrong[0].shape == (3, 5, 20), "five time steps of the whole width, not seven of five columns"
    with pytest.raises(RuntimeError):
        F.linear(wrong[0] @ wrong[0].mT, torch.zeros(20, 20))
    long = torch.randn(3, 23, 20)
    assert tutorial_slices(long, 1)[0].shape == (3, 20, 20), "with one head, three time steps are gone without a word"

    for length, heads in ((7, 4), (23, 1)):
        attention = builders.multi_head(20, heads)
        values, weights = attention(torch.randn(3, length, 20), return_weights=True)
        assert (values.shape, weights.shape) == ((3, length, 20), (3, heads, length, length))
