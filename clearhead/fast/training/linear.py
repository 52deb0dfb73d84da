"""Linear layers and feed-forward networks in bf16 by CPU kernels, forward and backward.

Layers that read the same rows are computed together: the rows are read once, and so is their gradient in the backward
pass. Gradients of weights are fp32 sums that are never rounded.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.base.hooks import is_seen
from clearhead.core.feedforward import FeedForward
from clearhead.fast.native import load
from clearhead.fast.native.abi import ACTIVATIONS, NO_ACTIVATION, LinearArgs, LinearCall, address
from clearhead.fast.native.options import TRAINING
from clearhead.fast.replica import plain_type
from clearhead.fast.stored import Stored

Rows = Float[Tensor, "*axes inputs"]
Outputs = Float[Tensor, "*axes outputs"]

BLOCK: Final = 32
"""The numbers of inputs and outputs must be multiples of this number."""


def has_products() -> bool:
    """Return whether the compiled kernels can multiply bf16 here: the processor must have AMX or AVX-512 for bf16."""
    return load.has_gemm(TRAINING)


def is_served(module: nn.Module) -> bool:
    """Return whether the kernels support a module: a plain fp32 linear layer whose sizes are multiples of `BLOCK`."""
    if plain_type(module) is not nn.Linear or isinstance(module, Stored) or is_seen(module):
        return False
    assert isinstance(module, nn.Linear)
    weight = module.weight
    bias: Tensor | None = module.bias
    is_plain = weight.dtype == torch.float32 and type(weight) is nn.Parameter and weight.is_contiguous()
    return is_plain and not any(size % BLOCK for size in weight.shape) and (bias is None or bias.dtype == weight.dtype)


def serves_network(network: FeedForward) -> bool:
    """Return whether the kernels support a whole feed-forward network."""
    layers = [layer for layer in (network.up, network.gate, network.down) if layer is not None]
    is_dropped = network.training and network.dropout.p > 0.0
    return not is_dropped and network.spec.activation in ACTIVATIONS and all(map(is_served, layers))


def linears(x: Rows, layers: Sequence[nn.Linear]) -> tuple[Outputs, ...]:
    """Apply up to three linear layers to the same input rows in one kernel call, in bf16.

    Args:
        x: fp32 or bf16 rows.
        layers: at most three layers, all supported by the kernels.
    """
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    outputs: tuple[Tensor, ...] = _Linears.apply(x.to(torch.bfloat16), *tensors)  # type: ignore[no-untyped-call]
    return outputs


def feed_forward(network: FeedForward, x: Rows) -> Rows:
    """Compute a feed-forward network in bf16, if the kernels support its layers and its activation."""
    first = [network.up] if network.gate is None else [network.gate, network.up]
    tensors = [tensor for linear in (*first, network.down) for tensor in (linear.weight, linear.bias)]
    assert isinstance(network.spec.activation, str)
    form = ACTIVATIONS[network.spec.activation]
    y: Tensor = _FeedForward.apply(x.to(torch.bfloat16), form, *tensors)  # type: ignore[no-untyped-call]
    return y


@dataclass
class _Linear:
    """Weights, outputs and gradients of one linear layer in one kernel call."""

    weight: Tensor
    bias: Tensor | None
    y: Tensor | None = None
    derivative: Tensor | None = None
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None

    def arguments(self, rows: int, inputs: int) -> ctypes.Structure:
        """Return the arguments of the layer for a call with this number of rows."""
        outputs = self.weight.shape[0]  # `len` takes five times as long, noticeable for small batches
        layer_args = LinearArgs(rows=outputs, N=outputs, weight=address(self.weight, torch.float32, outputs, inputs))
        if self.bias is not None:
            layer_args.bias = address(self.bias, torch.float32, outputs)
        if self.y is not None:
            layer_args.y, layer_args.y_stride = (
                address(self.y, torch.bfloat16, rows, outputs, by_row=True),
                self.y.stride(0),
            )
        if self.derivative is not None:
            layer_args.derivative = address(self.derivative, torch.bfloat16, rows, outputs, by_row=True)
            layer_args.y_stride = self.derivative.stride(0)
        if self.weight_gradient is not None:
            layer_args.weight_gradient = address(self.weight_gradient, torch.float32, outputs, inputs)
        if self.bias_gradient is not None:
            layer_args.bias_gradient = address(self.bias_gradient, torch.float32, outputs)
        return layer_args


def _call(
    x: Tensor, layers: Sequence[_Linear], result: Tensor | None = None, activation: int = NO_ACTIVATION
) -> ctypes.Structure:
    rows, inputs = x.shape
    call = LinearCall(
        x=address(x, torch.bfloat16, rows, inputs, by_row=True), count=len(layers), M=rows, K=inputs,
        x_stride=x.stride(0), activation=activation,
    )  # fmt: skip
    if result is not None:
        size = inputs if activation == NO_ACTIVATION else layers[0].weight.shape[0]
        call.result = address(result, torch.bfloat16, rows, size, by_row=True)
        call.result_stride = result.stride(0)
    for index, layer in enumerate(layers):
        call.layers[index] = layer.arguments(rows, inputs)
    return call


def run(name: str, call: ctypes.Structure) -> None:
    """Run a training kernel with the address of its arguments."""
    kernel = load.function(name, pointers=1, kernels=TRAINING)
    assert kernel is not None, "the compiled kernels for training must be available"
    kernel(ctypes.addressof(call))


def _rows(x: Tensor) -> Tensor:
    """Flatten a tensor to rows whose features are adjacent in memory."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 and rows.stride(0) % BLOCK == 0 else rows.contiguous()


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        x_MK, weights, biases = _rows(x), tensors[::2], tensors[1::2]
        sizes = [weight.shape[0] for weight in weights if weight is not None]
        y_MN = x_MK.new_empty(x_MK.shape[0], sum(sizes))  # one matrix, so that one product computes the gradient of x
        outputs = y_MN.split(sizes, 1)
        layers = [_Linear(*layer) for layer in zip(weights, biases, outputs, strict=True)]  # type: ignore[arg-type]
        run("linear_forward", _call(x_MK, layers))
        ctx.save_for_backward(x_MK, *weights)
        ctx.has_bias, ctx.shape = [bias is not None for bias in biases], x.shape
        return tuple(output.unflatten(0, x.shape[:-1]) for output in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, *weights = ctx.saved_tensors
        wants_x, wants = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:])
        layers = [
            _gradients(weight, has_bias, _rows(gradient), wants)
            for weight, has_bias, gradient in zip(weights, ctx.has_bias, gradients, strict=True)
        ]
        x_gradient_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype) if wants_x else None
        run("linear_backward", _call(x_MK, layers, x_gradient_MK))
        parameter_gradients = [tensor for layer in layers for tensor in (layer.weight_gradient, layer.bias_gradient)]
        return None if x_gradient_MK is None else x_gradient_MK.view(ctx.shape), *parameter_gradients


def _gradients(weight: Tensor, has_bias: bool, y_gradient: Tensor, wants: bool) -> _Linear:
    layer = _Linear(weight, None, y_gradient)
    if wants:
        layer.weight_gradient = torch.empty_like(weight)
        layer.bias_gradient = weight.new_empty(weight.shape[0]) if has_bias else None
    return layer


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: int, *tensors: Tensor | None) -> Tensor:
        x_MK, weights, biases = _rows(x), tensors[::2], tensors[1::2]
        inner, rows = weights[0].shape[0], x_MK.shape[0]  # type: ignore[union-attr]
        derivatives = [x_MK.new_empty(rows, inner) for _ in weights[:-1]]
        inner_MN = x_MK.new_empty(rows, inner)
        first = [
            _Linear(weight, bias, derivative=derivative)  # type: ignore[arg-type]
            for weight, bias, derivative in zip(weights[:-1], biases[:-1], derivatives, strict=True)
        ]
        run("linear_forward", _call(x_MK, first, inner_MN, form))
        y_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype)
        run("linear_forward", _call(inner_MN, [_Linear(weights[-1], biases[-1], y_MK)]))  # type: ignore[arg-type]
        ctx.save_for_backward(x_MK, inner_MN, *derivatives, *weights)
        ctx.has_bias, ctx.shape = [bias is not None for bias in biases], x.shape
        return y_MK.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, inner_MN, *others = ctx.saved_tensors
        count = len(others) // 2
        derivatives, weights, wants = others[:count], others[count:], ctx.needs_input_grad
        down = _gradients(weights[-1], ctx.has_bias[-1], _rows(gradients[0]), any(wants[-2:]))
        call, inner_gradients = _call(inner_MN, [down]), [torch.empty_like(derivative) for derivative in derivatives]
        call.result_stride = inner_MN.stride(0)
        for index in range(count):
            call.derivatives[index] = address(derivatives[index], torch.bfloat16, *inner_MN.shape)
            call.inner_gradients[index] = address(inner_gradients[index], torch.bfloat16, *inner_MN.shape)
        run("linear_backward", call)
        first = [
            _gradients(weight, has_bias, gradient, any(wants[2:-2]))
            for weight, has_bias, gradient in zip(weights[:-1], ctx.has_bias[:-1], inner_gradients, strict=True)
        ]
        x_gradient_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype) if wants[0] else None
        run("linear_backward", _call(x_MK, first, x_gradient_MK))
        of_layers = [tensor for layer in (*first, down) for tensor in (layer.weight_gradient, layer.bias_gradient)]
        return None if x_gradient_MK is None else x_gradient_MK.view(ctx.shape), None, *of_layers
