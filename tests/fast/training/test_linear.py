"""Linear layers and feed-forward networks by the compiled kernels are those of the plain computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.feedforward import FeedForward
from clearhead.fast.training.linear import ACTIVATIONS, feed_forward, is_served, linears, serves_network

needs_kernels = pytest.mark.usefixtures("bf16_kernels")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm().clamp_min(1e-9)).detach())


# Rows that fill blocks of 32 or not, a depth of several parts, and one whose sums are added to, forward and backward.
@needs_kernels
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 32, [32]),
        (77, 64, [96, 32, 64]),
        (600, 96, [288]),
        (1100, 1056, [64, 32]),
        (64, 32, [32, 1120]),
        (70, 4128, [64]),
        (40, 64, [96, 4128]),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layers_and_their_gradients_are_those_of_exact_arithmetic(
    rows: int, inputs: int, outputs: list[int], has_bias: bool
) -> None:
    torch.manual_seed(1)
    parts = [nn.Linear(inputs, count, bias=has_bias) for count in outputs]
    # Weights that are whole in bf16: all that is left is the rounding of results.
    for layer in parts:
        layer.weight.data = layer.weight.data.bfloat16().float()
    x = torch.randn(rows, inputs).bfloat16().requires_grad_()
    exact, theirs = x.detach().double().requires_grad_(), [copy.deepcopy(layer).double() for layer in parts]
    actual, expected = linears(x, parts), [layer(exact) for layer in theirs]
    gradients = [torch.randn(y.shape).bfloat16() for y in actual]
    tensors = [tensor for layer in parts for tensor in layer.parameters()]
    ours = torch.autograd.grad(actual, [x, *tensors], gradients)
    beside = torch.autograd.grad(
        expected,
        [exact, *(tensor for layer in theirs for tensor in layer.parameters())],
        [gradient.double() for gradient in gradients],
    )
    assert all(
        y.dtype == torch.bfloat16 and relative_error(y, other) < 0.003
        for y, other in zip(actual, expected, strict=True)
    )
    assert relative_error(ours[0], beside[0]) < 0.003
    # Sums in fp32 that are not rounded.
    assert all(relative_error(*pair) < 1e-6 for pair in zip(ours[1:], beside[1:], strict=True))


@needs_kernels
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_networks_and_their_gradients_are_those_of_exact_arithmetic(
    activation: spec.ActivationName, is_gated: bool
) -> None:
    torch.manual_seed(2)
    network = FeedForward(96, spec.FeedForward(size=160, activation=activation, gated=is_gated))
    assert serves_network(network)
    x = torch.randn(1, 67, 96).bfloat16().requires_grad_()
    exact, theirs = x.detach().double().requires_grad_(), copy.deepcopy(network).double()
    gradient = torch.randn(1, 67, 96).bfloat16()
    actual, expected = feed_forward(network, x), theirs(exact)
    ours = torch.autograd.grad(actual, [x, *network.parameters()], gradient)
    beside = torch.autograd.grad(expected, [exact, *theirs.parameters()], gradient.double())
    # The slope of a ReLU jumps, and rounding moves a few inner numbers over the place.
    bound = 0.05 if activation == "relu" else 0.01
    assert relative_error(actual, expected) < 0.005
    assert all(relative_error(*pair) < bound for pair in zip(ours, beside, strict=True))


@needs_kernels
def test_frozen_weights_and_inputs_without_a_gradient() -> None:
    parts = [nn.Linear(32, 64), nn.Linear(32, 64)]
    parts[0].requires_grad_(False)
    x = torch.randn(5, 32)
    sum(y.float().sum() for y in linears(x, parts)).backward()  # type: ignore[union-attr]
    assert parts[0].weight.grad is None
    assert parts[1].weight.grad is not None
    assert torch.allclose(parts[1].weight.grad, x.bfloat16().float().sum(0).expand(64, 32), atol=1e-4)


@needs_kernels
def test_rows_that_lie_apart_and_slices_of_them() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(3, 7, 96).bfloat16()
    for rows in (x[..., 32:64], x.transpose(0, 1)[..., :32], x[:, ::2, 5:37]):
        (actual,) = linears(rows, [layer])
        assert actual.shape == (*rows.shape[:-1], 32)
        assert relative_error(actual, F.linear(rows.float(), layer.weight, layer.bias)) < 0.005


def test_other_layers_are_not_served() -> None:
    class Other(nn.Linear):
        pass

    assert is_served(nn.Linear(32, 64))
    watched = nn.Linear(32, 64)
    watched.register_forward_hook(lambda *_: None)
    for layer in (nn.Linear(33, 64), nn.Linear(32, 65), nn.Linear(32, 64).double(), Other(32, 64), watched):
        assert not is_served(layer)
    network = FeedForward(32, spec.FeedForward(size=64, dropout=0.1))
    assert not serves_network(network)
    assert serves_network(network.eval())
