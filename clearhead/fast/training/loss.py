"""Cross-entropy of a head's last linear map in bf16 by CPU kernels, with its gradients.

Legend: N rows (tokens), D width, V vocabulary, W the next multiple of 32 of V, G rows of one group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.core.head import Projection
from clearhead.fast.native.abi import NO_ACTIVATION, LinearArgs, LinearCall, LossCall, address, index_address
from clearhead.fast.training.linear import BLOCK, has_products, run

# Each group reads and updates the gradient of the weights once, so a group's logits may be as large as the weights.
_LEAST_BYTES: Final = 16 << 20
_MOST_BYTES: Final = 128 << 20
# exp(60) and exp(-60) are normal float32 numbers, and so is a sum of millions of them.
_SAFE_EXPONENT: Final = 60.0


def fast_cross_entropy(
    states_ND: Float[Tensor, "rows width"],
    projection: Projection,
    labels_N: Int[Tensor, " rows"],
    *,
    label_smoothing: float,
    plain: Callable[..., Float[Tensor, ""]],
) -> Float[Tensor, ""]:
    """Return the summed cross-entropy, computed by compiled kernels if they support it, else by a plain function.

    The gradients are computed together with the loss. Logits are not rounded, but their exponentials are.

    Args:
        states_ND: inputs of the linear map.
        projection: the linear map.
        labels_N: vocabulary ids.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        plain: function with the same arguments that is used without kernels.

    Raises:
        UnfitTensor: the kernels run, and a label is not an id of the vocabulary.
    """
    weight, is_capped = projection.weight_VD, projection.soft_cap is not None or projection.bias_V is not None
    is_plain = weight.dtype == torch.float32 and weight.is_contiguous() and weight.device.type == "cpu"
    is_fit = is_plain and not is_capped and weight.shape[1] % BLOCK == 0 and weight.requires_grad and len(labels_N) > 0
    is_trained = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not (is_fit and is_trained and states_ND.requires_grad and has_products()):
        return plain(states_ND, projection, labels_N, label_smoothing=label_smoothing)
    x_ND = states_ND if projection.scale == 1.0 else states_ND * projection.scale
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND.to(torch.bfloat16), weight, labels_N, label_smoothing
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, smoothing: float) -> Tensor:
        x_ND = x_ND.contiguous()
        (rows, width), entries = x_ND.shape, len(weight_VD)
        losses_N, rates_N = weight_VD.new_empty(rows), weight_VD.new_empty(rows)
        x_gradient_ND, weight_gradient_VD = torch.empty_like(x_ND), torch.empty_like(weight_VD)
        all_entries = -(-entries // BLOCK) * BLOCK
        room = max(_LEAST_BYTES, min(weight_VD.nbytes, _MOST_BYTES))
        group = max(1, min(rows, room // (2 * all_entries)))
        powers_GW = x_ND.new_empty(group, all_entries)
        call = LossCall(V=entries, D=width, x_stride=width)
        call.weight = address(weight_VD, torch.float32, entries, width)
        call.powers = address(powers_GW, torch.bfloat16, group, all_entries)
        call.is_bounded, call.share = _is_bounded(x_ND, weight_VD), 1.0 - smoothing
        for start in range(0, rows, group):
            x_GD = x_ND[start : start + group]
            rates_G1 = rates_N[start : start + group, None]
            call.N = len(x_GD)
            call.x = address(x_GD, torch.bfloat16, call.N, width)
            call.labels = index_address(labels_N[start : start + group], call.N, entries)
            call.losses, call.rates = (
                address(values[start : start + group], torch.float32, call.N) for values in (losses_N, rates_N)
            )
            run("loss_forward", call)
            # A row of the softmax is its powers times its rate; the rate multiplies the small operand of each product.
            scaled_GD = (x_GD * rates_G1).to(x_ND.dtype)
            made_GD = x_gradient_ND[start : start + group]
            run("linear_backward", _products(scaled_GD, weight_VD, powers_GW, made_GD, weight_gradient_VD, start > 0))
            made_GD.mul_(rates_G1)
        loss = losses_N.sum()
        if smoothing:
            loss -= _spread(x_ND, weight_VD, smoothing / entries, x_gradient_ND, weight_gradient_VD)
        ctx.save_for_backward(x_gradient_ND, weight_gradient_VD)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_ND, weight_VD = ctx.saved_tensors
        if float(gradients[0]) != 1.0:
            x_ND, weight_VD = x_ND * gradients[0].to(x_ND.dtype), weight_VD * gradients[0]
        return x_ND, weight_VD, None, None


def _products(
    x_GD: Tensor, weight_VD: Tensor, powers_GW: Tensor, x_gradient_GD: Tensor, weight_gradient_VD: Tensor, adds: bool
) -> ctypes.Structure:
    """Return the kernel arguments for the gradients of input and weights; `adds` keeps earlier weight gradients."""
    (rows, width), entries = x_GD.shape, powers_GW.shape[1]
    call = LinearCall(count=1, M=rows, K=width, x_stride=width, result_stride=width, activation=NO_ACTIVATION)
    call.x, call.result = (address(tensor, torch.bfloat16, rows, width) for tensor in (x_GD, x_gradient_GD))
    weight, gradient = (
        address(tensor, torch.float32, len(weight_VD), width) for tensor in (weight_VD, weight_gradient_VD)
    )
    powers = address(powers_GW[:rows], torch.bfloat16, rows, entries)
    call.layers[0] = LinearArgs(
        weight=weight, y=powers, weight_gradient=gradient, rows=len(weight_VD), adds=adds, N=entries, y_stride=entries,
    )  # fmt: skip
    return call


def _is_bounded(x_ND: Tensor, weight_VD: Tensor) -> bool:
    """Return whether all logits are near zero, by the Cauchy-Schwarz inequality."""
    norms = [torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32).max() for matrix in (x_ND, weight_VD)]
    return bool(norms[0] * norms[1] < _SAFE_EXPONENT)


def _spread(x_ND: Tensor, weight_VD: Tensor, share: float, x_gradient_ND: Tensor, weight_gradient_VD: Tensor) -> Tensor:
    """Return the label-smoothing term, a share of the sum of all logits, and subtract its gradients in place."""
    x_sum_D, weight_sum_D = x_ND.sum(0, dtype=torch.float32), weight_VD.sum(0)
    x_gradient_ND.sub_(weight_sum_D.to(x_ND.dtype), alpha=share)
    weight_gradient_VD.sub_(x_sum_D, alpha=share)
    return share * (x_sum_D @ weight_sum_D)
