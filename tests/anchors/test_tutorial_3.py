"""Tutorial 3, a draft on attention and multi-head attention alone.

anchor              test
3.1                 test_attention_of_unequal_lengths
3.2                 test_no_bias_anywhere
3.3                 test_split_heads_example
3.4                 test_splitting_copies_nothing
3.b1 [run]          test_heads_by_count_and_not_by_size
3.b2 [run]          test_batch_items_stay_apart
3.b3                test_any_batch_and_length
3.b4 [run]          test_scale_keeps_the_dtype
3.b7                test_heads_must_divide_the_width, and the masks and dropout of tutorials 1 and 4
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.base.errors import InputError
from tests.anchors import builders

COUNTED = torch.arange(1, 17).view(4, 4)
HEADS_OF_COUNTED = [[[1, 2], [5, 6], [9, 10], [13, 14]], [[3, 4], [7, 8], [11, 12], [15, 16]]]


def test_attention_of_unequal_lengths() -> None:
    """m queries over n keys; more leading axes change nothing."""
    attention = builders.multi_head(10, 2)
    for batch in (1, 3):
        values, weights = attention(torch.randn(batch, 5, 10), torch.randn(batch, 7, 10), return_weights=True)
        assert (values.shape, weights.shape) == ((batch, 5, 10), (batch, 2, 5, 7))


def test_no_bias_anywhere() -> None:
    attention = builders.multi_head(12, 3, bias=False)
    assert {name for name, _ in attention.named_parameters()} == {
        f"{role}.weight" for role in ("query", "key", "value", "out")
    }
    assert attention(torch.zeros(2, 5, 12)).eq(0).all(), "nothing in, nothing out"


def identity_heads(x_TD: Tensor, num_heads: int) -> Tensor:
    """Return the input of each attention head, using identity projections and a head that attends to itself only."""
    length, width = x_TD.shape
    attention = builders.multi_head(width, num_heads, bias=False)
    heads = []
    with torch.no_grad():
        for name in ("query", "key", "value"):
            nn.init.eye_(attention.get_submodule(name).weight)
        for head in range(num_heads):
            # The output projection picks one head's columns, so what comes out is what that head mixed.
            columns = torch.arange(width) // (width // num_heads) == head
            attention.get_submodule("out").weight.copy_(torch.diag(columns.float()))
            mixed = attention(x_TD[None].float(), mask=torch.eye(length, dtype=torch.bool)[None])[0]
            heads.append(mixed[:, columns])
    return torch.stack(heads)


def test_split_heads_example() -> None:
    assert identity_heads(COUNTED, 2).tolist() == HEADS_OF_COUNTED


def test_splitting_copies_nothing() -> None:
    projected = torch.randn(3, 7, 12)
    heads = projected.unflatten(-1, (2, 6)).transpose(1, 2)
    assert heads.data_ptr() == projected.data_ptr()
    assert heads._is_view()


def tutorial_split_heads(x_TD: Tensor, num_heads: int) -> Tensor:
    """The tutorial passes the number of heads to torch.split, which takes a chunk size."""
    return torch.stack(x_TD.split(num_heads, dim=-1))


def test_heads_by_count_and_not_by_size() -> None:
    assert tutorial_split_heads(COUNTED, 2).tolist() == HEADS_OF_COUNTED, "right by luck: 4 columns are 2 heads of 2"
    x = torch.randn(5, 12)
    assert tutorial_split_heads(x, 2).shape == (6, 5, 2), "six heads of size 2 where two of size 6 were asked for"
    assert identity_heads(x, 2).shape == (2, 5, 6)
    torch.testing.assert_close(identity_heads(x, 2), torch.stack(x.chunk(2, dim=-1)))
    # The size is also what the scores are scaled by.
    attention = builders.multi_head(12, 2)
    query, key = (attention.get_submodule(n)(x[None]).unflatten(-1, (2, 6)).transpose(1, 2) for n in ("query", "key"))
    _, weights = attention(x[None], return_weights=True)
    torch.testing.assert_close(weights, (query @ key.mT / math.sqrt(6)).softmax(-1))
    assert (weights - (query @ key.mT / math.sqrt(2)).softmax(-1)).abs().max() > 1e-4


def tutorial_multi_head(x_BTD: Tensor, num_heads: int) -> Tensor:
    """The tutorial stacks heads before the batch axis, but merges them as if they were after it."""
    heads_HBTE = torch.stack(x_BTD.chunk(num_heads, dim=-1))
    weights = (heads_HBTE @ heads_HBTE.mT / math.sqrt(heads_HBTE.shape[-1])).softmax(dim=-1)
    return (weights @ heads_HBTE).permute(0, 2, 1, 3).reshape(x_BTD.shape)


def test_batch_items_stay_apart() -> None:
    x = torch.randn(2, 5, 6)
    changed = x.clone()
    changed[1] += 1.0
    moved = tutorial_multi_head(changed, 2)[0] - tutorial_multi_head(x, 2)[0]
    assert moved.abs().max() > 1e-2, "the output of item 0 followed a change of item 1"
    attention = builders.multi_head(6, 2)
    torch.testing.assert_close(attention(changed)[0], attention(x)[0], atol=0, rtol=0)
    assert (attention(changed)[1] - attention(x)[1]).abs().max() > 1e-2


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 5), (7, 2)])
def test_any_batch_and_length(batch: int, length: int) -> None:
    assert builders.multi_head(12, 3)(torch.randn(batch, length, 12)).shape == (batch, length, 12)


def test_scale_keeps_the_dtype() -> None:
    half = torch.randn(2, 5, 12, dtype=torch.float16)
    # The tutorial's root is a float32 tensor on a fixed device.
    assert (half / torch.sqrt(torch.FloatTensor([12]))).dtype == torch.float32
    with pytest.raises(RuntimeError, match="device"):
        half.to("meta") / torch.sqrt(torch.FloatTensor([12]))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        attention = builders.multi_head(12, 3).to(dtype)
        values, weights = attention(torch.randn(2, 5, 12, dtype=dtype), return_weights=True)
        assert values.dtype == weights.dtype == dtype
        assert attention(torch.randn(2, 5, 12, dtype=dtype)).dtype == dtype
    meta = builders.multi_head(12, 3).to("meta")
    assert meta(torch.empty(2, 5, 12, device="meta")).device.type == "meta"


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InputError, match="heads"):
        ch.MultiHeadAttention(12, 5)
