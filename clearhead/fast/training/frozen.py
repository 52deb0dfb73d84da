"""Training with frozen 16-bit weights: one matrix at a time is widened, and never stored in the graph.

Autograd would keep each widened matrix until the backward pass, and so a second copy of the model. The functions here
keep the stored matrix instead, and convert it again in the backward pass. In bf16, a bf16 matrix needs no conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.core.feedforward import activate
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.head import Projection
from clearhead.core.rare.mixture_of_experts import ExpertMaps, Experts, Map, Tokens
from clearhead.fast.replica import override, plain_type
from clearhead.fast.stored import IN_16_BITS, Stored
from clearhead.fast.training.float_linear import multiplies_frozen
from clearhead.fast.training.float_linear import product as onednn_product

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def multiply_frozen(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, product: Product = F.linear) -> Tensor:
    """Compute x weight^T + bias with a frozen 16-bit weight, in the dtype of x, or in that of autocast.

    Results and gradients have the bits of the same product with a widened weight.

    Args:
        x: rows [*axes, inputs].
        weight_NK: bf16 or fp16 weights [outputs, inputs], which get no gradient.
        bias_N: bias [outputs]. None means no bias.
        product: function that multiplies, with the arguments of `F.linear`.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    x, bias_N = x.to(dtype), None if bias_N is None else bias_N.to(dtype)
    if torch.compiler.is_compiling():
        return F.linear(x, weight_NK.to(dtype), bias_N)
    with torch.autocast(device, enabled=False):
        y: Tensor = _FrozenLinear.apply(x, weight_NK, bias_N, product)  # type: ignore[no-untyped-call]
    return y


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(weight_NK)
        ctx.product = product
        return product(x, weight_NK.to(x.dtype), bias_N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (weight_NK,), (gradient,) = ctx.saved_tensors, gradients
        gradient_MN = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        x_gradient = None
        if wants_x:
            x_gradient_MK = ctx.product(gradient_MN, weight_NK.to(gradient.dtype).t(), None)
            x_gradient = x_gradient_MK.view(*gradient.shape[:-1], weight_NK.shape[1])
        return x_gradient, None, gradient_MN.sum(0) if wants_bias else None, None


def find_stored_weight(module: nn.Module) -> Tensor | None:
    """Return the 16-bit matrix of a stored module, without widening it; None if the module has none."""
    weight: Tensor | None = vars(module)["_parameters"].get("weight")
    return weight if isinstance(module, Stored) and weight is not None and weight.dtype in IN_16_BITS else None


def freeze_stored(tree: nn.Module) -> None:
    """Let the modules of a training tree that hold frozen 16-bit matrices compute without a widened copy in the graph.

    Args:
        tree: the replica that is trained.
    """
    for module in list(tree.modules()):
        if isinstance(module, HeadLinear):
            if _head_weight(module) is not None:
                override(module, FrozenHead)
        elif isinstance(module, Experts):
            if any(find_stored_weight(maps) is not None for maps in module.children()):
                override(module, FrozenExperts)
        elif find_stored_weight(module) is not None:
            if isinstance(module, ExpertMaps):
                override(module, FrozenExpertMaps)
            elif plain_type(module) is nn.Linear:
                override(module, FrozenLinear)


class FrozenLinear(nn.Linear):
    """Linear layer with a frozen 16-bit weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        weight_NK = find_stored_weight(self)
        assert weight_NK is not None, "the layer holds its weight in 16 bits"
        return multiply_frozen(x, weight_NK, self.bias, onednn_product if multiplies_frozen(x) else F.linear)


class FrozenHead(HeadLinear):
    """Linear layer of a head whose weight, or the table that it is tied to, is frozen in 16 bits."""

    @property
    def projection(self) -> Projection:
        """The projection; under autocast it has the stored weight, else a widened copy."""
        weight_VD = _head_weight(self)
        assert weight_VD is not None, "the head or its table holds its weight in 16 bits"
        if not torch.is_autocast_enabled(weight_VD.device.type):
            weight_VD = weight_VD.float()
        return Projection(weight_VD, self.bias, self.scale)


def _head_weight(head: HeadLinear) -> Tensor | None:
    """Return the 16-bit matrix of a head's linear layer, or of the table that it is tied to; None if it has none."""
    is_tied = vars(head)["_parameters"].get("weight") is None
    return find_stored_weight(head.tied.module if is_tied else head)


class FrozenExpertMaps(ExpertMaps):
    """Linear layers of experts with frozen 16-bit weights."""

    def split(self) -> list[Map]:
        """Return the stored weight and the bias of each expert."""
        weight = find_stored_weight(self)
        assert weight is not None, "the experts hold their weights in 16 bits"
        weights = weight.unbind()
        return list(zip(weights, [None] * len(weights) if self.bias is None else self.bias.unbind(), strict=True))


class FrozenExperts(Experts):
    """Feed-forward networks of experts, of which some matrices are frozen in 16 bits."""

    def run(self, x_ND: Tokens, maps: tuple[Map, Map | None, Map]) -> Tokens:
        """Compute the network of one expert; the results equal those with widened weights."""
        up, gate, down = maps
        inner = activate(self.spec.activation, _multiply(x_ND, up), None if gate is None else _multiply(x_ND, gate))
        return _multiply(self.dropout(inner), down)


def _multiply(x: Tensor, linear_map: Map) -> Tensor:
    return (multiply_frozen if linear_map[0].dtype in IN_16_BITS else F.linear)(x, *linear_map)
