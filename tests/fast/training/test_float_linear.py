"""Linear layers in fp32 by oneDNN are those of PyTorch, forward and backward, and are chosen by processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from clearhead.fast.probe import processor
from clearhead.fast.training import float_linear as fast_float
from clearhead.fast.training import tree as fast
from clearhead.fast.training.float_linear import has_faster_products, linear, multiplies
from clearhead.fast.training.tree import FloatLinear, training_tree

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")


def gradients(layer: nn.Linear, x: Tensor, *, is_fast: bool) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    assert multiplies(x, layer.weight)
    y = linear(x, layer.weight, layer.bias) if is_fast else layer(x)
    y.square().sum().backward()
    tensors = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
    assert all(tensor is not None for tensor in tensors)
    return [tensor.detach().clone() for tensor in tensors if tensor is not None]


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 13), (3, 5, 13), (2, 1, 3, 13)])
def test_values_and_gradients_are_those_of_pytorch(shape: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(13, 11, bias=has_bias)
    x = torch.randn(*shape)
    for actual, expected in zip(gradients(layer, x, is_fast=True), gradients(layer, x, is_fast=False), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_rows_that_lie_apart_are_read_where_they_lie() -> None:
    layer, x = nn.Linear(13, 11), torch.randn(13, 7, 3).transpose(0, 2)
    for actual, expected in zip(gradients(layer, x, is_fast=True), gradients(layer, x, is_fast=False), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_other_work_is_left_to_the_layer_itself() -> None:
    weight, x = nn.Linear(3, 2).weight, torch.randn(5, 3)
    assert multiplies(x, weight)
    for other in (x.bfloat16(), torch.randn(3), torch.randn(0, 3)):
        assert not multiplies(other, weight)
    with torch.no_grad():
        assert not multiplies(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not multiplies(x, weight)


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)],
)
def test_the_choice_is_by_processor(
    vendor: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(processor(), vendor=vendor, torch_kernels=capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(fast_float, "processor", lambda: changed)
    has_faster_products.cache_clear()
    try:
        assert has_faster_products() == expected
    finally:
        has_faster_products.cache_clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_faster", [True, False])
def test_layers_are_replaced_where_that_is_faster(
    precision: str, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "has_faster_products", lambda: is_faster)
    monkeypatch.setattr(fast, "has_fast_bf16", lambda device: False)
    module = nn.Sequential(nn.Linear(3, 2))
    tree = training_tree(module, precision)
    assert isinstance(tree[0], FloatLinear) == (is_faster and precision == "fp32")
    assert type(module[0]) is nn.Linear and tree[0].weight is module[0].weight


def test_layers_of_another_kind_compute_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(nn.Linear):
        """Such as one with LoRA."""

    monkeypatch.setattr(fast, "has_faster_products", lambda: True)
    module = nn.Sequential(Narrow(3, 2))
    assert type(training_tree(module, "fp32")[0]) is Narrow
