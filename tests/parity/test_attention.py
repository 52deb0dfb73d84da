"""`MultiHeadAttention` equals `torch.nn.MultiheadAttention`: outputs, weights and gradients, with masks of each kind.

Legend: B batch, T queries, S keys, D width, H heads.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import MultiHeadAttention
from clearhead.core.kernels import attention
from tests.laws.tiny import difference

B, T, S, D, H = 3, 7, 11, 26, 2


def torch_twin(ours: MultiHeadAttention, bias: bool) -> nn.MultiheadAttention:
    """The same weights in torch's layout."""
    theirs = nn.MultiheadAttention(D, H, bias=bias, batch_first=True)
    state = {"in_proj_weight": torch.cat([ours.query.weight, ours.key.weight, ours.value.weight])}
    state["out_proj.weight"] = ours.out.weight
    if bias:
        state["in_proj_bias"] = torch.cat([ours.query.bias, ours.key.bias, ours.value.bias])
        state["out_proj.bias"] = ours.out.bias
    theirs.load_state_dict(state)
    return theirs


def gradients_in_torch_layout(ours: MultiHeadAttention, bias: bool) -> dict[str, Tensor]:
    three = (ours.query, ours.key, ours.value)
    gradients = {
        "in_proj_weight": torch.cat([linear.weight.grad for linear in three]),
        "out_proj.weight": ours.out.weight.grad,
    }
    if bias:
        gradients |= {
            "in_proj_bias": torch.cat([linear.bias.grad for linear in three]),
            "out_proj.bias": ours.out.bias.grad,
        }
    return gradients


def masks(kind: str, keys: int) -> tuple[dict[str, Tensor], Tensor, spec.Full | spec.Causal]:
    """Return our arguments, the allowed pairs [B, T, keys] that they mean, and our mask of construction."""
    padding = torch.arange(keys) < torch.tensor([keys, 5, 3])[:, None]
    causal = torch.ones(T, keys, dtype=torch.bool).tril()
    arbitrary = torch.rand(B, T, keys) > 0.4
    arbitrary[..., 1] = True  # torch gives NaN where a query sees nothing, so every query sees one key
    everything = torch.ones(B, T, keys, dtype=torch.bool)
    seen = arbitrary.index_fill(2, torch.tensor(0), True)
    return {
        "none": ({}, everything, spec.Full()),
        "padding": ({"key_mask": padding}, everything & padding[:, None], spec.Full()),
        "causal": ({}, everything & causal, spec.Causal()),
        "both": ({"key_mask": padding}, causal & padding[:, None], spec.Causal()),
        "for all rows": ({"mask": arbitrary[0]}, everything & arbitrary[0], spec.Full()),
        "arbitrary": ({"mask": arbitrary}, arbitrary, spec.Full()),
        "arbitrary and padding": ({"mask": seen, "key_mask": padding}, seen & padding[:, None], spec.Full()),
        "arbitrary and causal": ({"mask": seen}, causal & seen, spec.Causal()),
    }[kind]


@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(
    "kind",
    ["none", "padding", "causal", "both", "for all rows", "arbitrary", "arbitrary and padding", "arbitrary and causal"],
)
def test_outputs_weights_and_gradients(
    kind: str, cross: bool, bias: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cross and kind in ("causal", "both", "arbitrary and causal"):  # these are about a stream and itself
        kind = "padding" if kind == "both" else "arbitrary"
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 0 if kernel == "fused" else 1000)
    keys = S if cross else T
    our_masks, allowed, structure = masks(kind, keys)
    ours = MultiHeadAttention(D, H, bias=bias, mask=structure)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = torch_twin(ours, bias)
    inputs = [torch.randn(B, T, D, requires_grad=True)]
    inputs += [torch.randn(B, S, D, requires_grad=True)] if cross else []
    query, memory = inputs[0], inputs[-1]
    cotangent = torch.randn(B, T, D)

    hidden = ~allowed.repeat_interleave(H, 0)
    expected, expected_weights = theirs(query, memory, memory, attn_mask=hidden, average_attn_weights=False)
    expected_inputs = torch.autograd.grad((expected * cotangent).sum(), inputs, retain_graph=True)
    (expected * cotangent).sum().backward()
    for tensor in inputs:
        tensor.grad = None

    actual = ours(query, memory if cross else None, **our_masks)
    (actual * cotangent).sum().backward()
    assert difference(actual, expected) <= 1e-5
    for tensor, gradient in zip(inputs, expected_inputs, strict=True):
        assert difference(tensor.grad, gradient) <= 1e-5
    for name, gradient in gradients_in_torch_layout(ours, bias).items():
        assert difference(gradient, theirs.get_parameter(name).grad) <= 1e-5, name
    _, weights = ours(query, memory if cross else None, **our_masks, return_weights=True)
    assert difference(weights, expected_weights) <= 1e-5


def test_a_mask_for_each_head() -> None:
    ours, x = MultiHeadAttention(D, H), torch.randn(B, T, D)
    allowed = torch.rand(B, H, T, T) > 0.4
    allowed[..., 2] = True
    expected, _ = torch_twin(ours, True)(x, x, x, attn_mask=~allowed.flatten(0, 1))
    assert difference(ours(x, mask=allowed), expected) <= 1e-5


def test_a_mask_of_as_many_texts_as_tokens_is_one_of_queries_and_keys() -> None:
    ours, x, causal = MultiHeadAttention(D, H), torch.randn(T, T, D), torch.ones(T, T, dtype=torch.bool).tril()
    expected, _ = torch_twin(ours, True)(x, x, x, attn_mask=~causal)
    assert difference(ours(x, mask=causal), expected) <= 1e-5


@pytest.mark.parametrize("queries", [1, 4, 5])
def test_more_queries_than_keys_or_fewer(queries: int) -> None:
    """Fewer queries are the last tokens of the keys; where there are more, both begin at the first."""
    ours, x, memory = MultiHeadAttention(D, H, mask=spec.Causal()), torch.randn(B, queries, D), torch.randn(B, 3, D)
    first = max(0, 3 - queries)
    hidden = torch.arange(3) > torch.arange(first, first + queries)[:, None]
    expected, _ = torch_twin(ours, True)(x, memory, memory, attn_mask=hidden)
    assert difference(ours(x, memory), expected) <= 1e-5
