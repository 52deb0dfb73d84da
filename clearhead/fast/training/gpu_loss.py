"""Cross-entropy of a head's last linear map on a GPU, with its gradients, aligned logits and no host reads.

The logits of one chunk of rows exist at a time. The number of columns in memory is a multiple of 64: matrix products
of other widths run several times slower.

Legend: N rows (tokens), P rows with padding, C rows of one chunk, D width, V vocabulary, W columns with padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.head import Head, Projection
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL

ALIGNMENT: Final = 64
"""Divisor of the number of columns of the logits in memory, and of the number of rows of a chunk."""

_CHUNK_BYTES: Final = 512 << 20
# The number of rows for which kernels are compiled. Without it, the batch that comes first would choose the kernels,
# and a resumed run could round differently.
_TYPICAL_ROWS: Final = 4096


class CompiledHead(Head):
    """Head of a compiled training tree: on a GPU, the passes over its logits are compiled too."""


def gpu_cross_entropy(
    states_ND: Float[Tensor, "rows width"],
    projection: Projection,
    labels_N: Int[Tensor, " rows"],
    *,
    label_smoothing: float = 0.0,
    compiles: bool = False,
) -> Float[Tensor, ""]:
    """Return the summed cross-entropy of the rows that have a label, in nats, without a host read.

    If a gradient is needed, the forward pass computes it together with the loss. Any device is supported.

    Args:
        states_ND: inputs of the linear map.
        projection: the linear map.
        labels_N: vocabulary ids; NO_LABEL for rows without a loss.
        label_smoothing: share of the target that is spread evenly over the vocabulary, at least 0 and below 1.
        compiles: True compiles the passes over the logits into one kernel, if a gradient is needed.
    """
    device = states_ND.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if has_autocast else states_ND.dtype
    setting = _LossSetting(label_smoothing, projection.scale, projection.soft_cap, dtype, compiles)
    tensors = (states_ND, projection.weight_VD, projection.bias_V)
    with torch.autocast(device, enabled=False) if has_autocast else contextlib.nullcontext():
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            loss: Tensor = _CrossEntropy.apply(*tensors, labels_N, setting)  # type: ignore[no-untyped-call]
            return loss
        return _add_chunks(tensors, labels_N, setting, (False, False, False))[0]


@dataclass(frozen=True)
class _LossSetting:
    label_smoothing: float
    scale: float
    soft_cap: float | None
    product_dtype: torch.dtype
    compiles: bool

    def rescale(self, values: Tensor) -> Tensor:
        """Return the values times the scale of the linear map."""
        return values if self.scale == 1.0 else values * self.scale


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, setting: _LossSetting
    ) -> Tensor:
        inputs = (states_ND, weight_VD, bias_V)
        loss, gradients = _add_chunks(inputs, labels_N, setting, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0]
        return *(None if saved is None else saved * factor.to(saved.dtype) for saved in ctx.saved_tensors), None, None


def softmax_gradient(
    logits_CW: Float[Tensor, "rows columns"],
    labels_C: Int[Tensor, " rows"],
    bias_V: Float[Tensor, " vocabulary"] | None,
    label_smoothing: float,
    soft_cap: float | None,
    num_entries: int,
    has_gradient: bool,
) -> Float[Tensor, " rows"]:
    """Return the loss of each row in nats, and replace the logits by their gradients.

    Args:
        logits_CW: logits without bias and cap, and columns of padding.
        labels_C: vocabulary ids; rows with NO_LABEL have loss and gradients of zero.
        bias_V: numbers to add to the logits. None means no bias.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        soft_cap: bound on the logits, cap * tanh(logits / cap). None means no bound.
        num_entries: size of the vocabulary.
        has_gradient: False leaves the logits without a defined value.
    """
    logits_CV = logits_CW[:, :num_entries]
    # Always a copy: the compiler writes slower code for steps that change the logits themselves.
    values_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32), copy=True)
    labels_C1, share = labels_C[:, None], 1.0 - label_smoothing
    rate_C1 = (labels_C1 != NO_LABEL).to(values_CV.dtype)
    if bias_V is not None:
        values_CV.add_(bias_V)
    slope_CV = None
    if soft_cap is not None:
        values_CV.div_(soft_cap).tanh_()
        slope_CV = 1.0 - values_CV * values_CV
        values_CV.mul_(soft_cap)
    # The maximum is always subtracted: whether it is needed could only be read by the host.
    top_C1 = values_CV.amax(1, keepdim=True)
    losses_C1 = top_C1 - share * values_CV.gather(1, labels_C1.clamp(min=0))
    even = label_smoothing / num_entries
    if even:
        losses_C1 = losses_C1 - even * values_CV.sum(1, keepdim=True)
    exp_CV = values_CV.sub_(top_C1).exp_()
    total_C1 = exp_CV.sum(1, keepdim=True)
    losses_C1 = (losses_C1 + total_C1.log()) * rate_C1
    if has_gradient:
        gradient_CV = exp_CV.mul_(rate_C1 / total_C1)
        if even:
            gradient_CV.sub_(even * rate_C1)
        is_label_CV = torch.arange(num_entries, device=exp_CV.device) == labels_C1
        gradient_CV.add_(is_label_CV, alpha=-share)
        if slope_CV is not None:
            gradient_CV.mul_(slope_CV)
        # Compiled code writes whole rows faster than slices; eager code would need one more pass for the padding.
        if torch.compiler.is_compiling():
            logits_CW.copy_(F.pad(gradient_CV, (0, logits_CW.shape[1] - num_entries)))
        else:
            logits_CV.copy_(gradient_CV)
    return losses_C1[:, 0]


@cache
def _compile_softmax_gradient() -> Callable[..., Tensor]:
    """Return the compiled `softmax_gradient`: one graph for any number of rows, for each vocabulary and setting."""
    compiled = torch.compile(softmax_gradient, dynamic=False, options={"deterministic": True})

    def run(logits_CW: Tensor, labels_C: Tensor, *options: Any) -> Tensor:
        for tensor in (logits_CW, labels_C):
            torch._dynamo.mark_dynamic(tensor, 0, hint_override=_TYPICAL_ROWS)
        # This graph has no parameters whose gradients several processes could send earlier.
        with torch._dynamo.config.patch(optimize_ddp=False):
            return compiled(logits_CW, labels_C, *options)

    return run


def _add_chunks(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    labels_N: Tensor,
    setting: _LossSetting,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the summed loss and the gradients of states, weight and bias; None if a gradient is not needed."""
    (states_ND, weight_VD, bias), product = inputs, setting.product_dtype
    dtype, num_rows, entries = torch.promote_types(product, torch.float32), len(states_ND), len(weight_VD)
    weight_WD = weight_VD.new_zeros(_round_up(entries, ALIGNMENT), weight_VD.shape[1], dtype=product)
    weight_WD[:entries] = weight_VD
    bias_V = None if bias is None else bias.to(dtype)
    size = _chunk_rows(num_rows, len(weight_WD) * product.itemsize)
    extra = _round_up(max(1, num_rows), size) - num_rows
    # Zeros in place of states without a label: otherwise one that is not finite would reach the gradient of the weight.
    states_PD = setting.rescale(states_ND).masked_fill((labels_N == NO_LABEL)[:, None], 0.0).to(product)
    labels_P = labels_N
    if extra:  # padding by nothing is a copy
        states_PD, labels_P = F.pad(states_PD, (0, 0, 0, extra)), F.pad(labels_N, (0, extra), value=NO_LABEL)
    logits_CW, loss = states_PD.new_empty(size, len(weight_WD)), states_PD.new_zeros((), dtype=dtype)
    run = _compile_softmax_gradient() if setting.compiles and any(needed) else softmax_gradient
    state_gradients: list[Tensor] = []
    gradient_WD = gradient_V = None
    for states_CD, labels_C in zip(states_PD.split(size), labels_P.split(size), strict=True):
        torch.mm(states_CD, weight_WD.t(), out=logits_CW)
        loss += run(logits_CW, labels_C, bias_V, setting.label_smoothing, setting.soft_cap, entries, any(needed)).sum()
        if needed[0]:
            state_gradients.append(setting.rescale(_multiply(logits_CW, weight_WD, dtype)).to(states_ND.dtype))
        if needed[1]:
            gradient_WD = _add(gradient_WD, _multiply(logits_CW.t(), states_CD, dtype))
        if needed[2]:
            gradient_V = _add(gradient_V, logits_CW[:, :entries].sum(0, dtype=dtype))
    gradients = (
        torch.cat(state_gradients)[:num_rows] if needed[0] else None,
        None if gradient_WD is None else gradient_WD[:entries],
        gradient_V,
    )
    return loss, _round_gradients(gradients, inputs)


def _round_gradients(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return each gradient in the dtype of its input."""
    return [
        None if gradient is None or values is None else gradient.to(values.dtype)
        for gradient, values in zip(gradients, inputs, strict=True)
    ]


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    """Add a value to a total in place; None means a total of zero."""
    return value if total is None else total.add_(value)


def _multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two matrices; the sums of 16-bit products are not rounded where PyTorch can return them."""
    if left.dtype != dtype and left.device.type in ("cuda", "meta") and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def _chunk_rows(num_rows: int, bytes_per_row: int) -> int:
    """Return the number of rows of equal chunks, a multiple of `ALIGNMENT`."""
    most = max(ALIGNMENT, _CHUNK_BYTES // bytes_per_row // ALIGNMENT * ALIGNMENT)
    num_chunks = max(1, -(-num_rows // most))
    return _round_up(max(1, -(-num_rows // num_chunks)), ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
