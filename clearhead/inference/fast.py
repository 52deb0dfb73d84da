"""Fast linear layers: inside a with block, those of a model on a CPU run by compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.core.head import Linear as HeadLinear
from clearhead.inference.int8 import Int8Linear, Int8Matrix
from clearhead.machine import has_fast_bf16
from clearhead.native.linear import Run, float_linear, int8_linear, mixed_linear

LEAST_WEIGHTS: Final = 2**23
"""A model with fewer numbers in its linear layers stays in the caches, where products in bf16 gain nothing."""


@contextmanager
def fast_linears(module: nn.Module) -> Iterator[None]:
    """Let the linear layers of a model run by compiled kernels, where there are some for its weights.

    Results are those of the plain layers up to the order of sums; with weights in 8 bits, up to rounding the inputs to
    8 bits as well, and with products in bf16 (`multiply_in_bf16`), up to rounding inputs and weights to bf16. Weights
    must not be moved inside the block. The plain layers run where gradients are recorded, in a model whose activations
    are being watched, and in fp32 in a model without a decoder: it reads whole texts, where PyTorch is as fast.
    """
    in_bf16 = vars(module).get("products") == torch.bfloat16
    has_few_rows = getattr(module, "decoder", None) is not None
    changed = []
    for part in () if _is_watched(module) else module.modules():
        run = None if "forward" in vars(part) else _fast_forward(part, in_bf16, has_few_rows)
        if run is not None:
            vars(part)["forward"] = run
            changed.append(part)
    try:
        yield
    finally:
        for part in changed:
            del vars(part)["forward"]


def multiply_in_bf16(module: nn.Module) -> bool:
    """Let the fast linear layers of an fp32 model multiply in bf16, if that is faster on this processor; say whether.

    Weights stay as they are beside rounded copies, and all else is computed in fp32.
    """
    weights = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
    is_large = sum(weight.numel() for weight in weights) >= LEAST_WEIGHTS
    is_fit = is_large and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    if is_fit and has_fast_bf16(torch.device("cpu")):
        vars(module)["products"] = torch.bfloat16
    return "products" in vars(module)


@contextmanager
def exact_products(module: nn.Module) -> Iterator[None]:
    """Multiply in the precision of the weights inside a with block, for numbers that depend on no processor."""
    products = vars(module).pop("products", None)
    try:
        yield
    finally:
        if products is not None:
            vars(module)["products"] = products


def _is_watched(module: nn.Module) -> bool:
    """Return whether something reads or changes activations on their way."""
    return any(
        getattr(part, "watchers", None) or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )


def _fast_forward(part: nn.Module, in_bf16: bool, has_few_rows: bool) -> Run | None:
    if isinstance(part, Int8Linear):
        return int8_linear(part.weight_int8, part.weight_scale, part.bias)
    if type(part) is nn.Linear:
        return _of_weight(part, part.weight, part.bias, in_bf16, has_few_rows)
    if not isinstance(part, HeadLinear):
        return None
    holder = part.borrowed[0] if part.borrowed else part
    if isinstance(holder, Int8Matrix):
        run: Run | None = int8_linear(holder.weight_int8, holder.weight_scale, part.bias)
    else:
        run = _of_weight(part, part.projection.weight_VD, part.bias, in_bf16, has_few_rows)
    return run if run is None or part.scale == 1.0 else _scaled(run, part.scale)


def _of_weight(part: nn.Module, weight: Tensor, bias: Tensor | None, in_bf16: bool, has_few_rows: bool) -> Run | None:
    if not in_bf16:
        return float_linear(weight, bias) if has_few_rows or weight.dtype != torch.float32 else None
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = vars(part).get("rounded_weight")
    if known is None or known[0] != state:
        known = vars(part)["rounded_weight"] = (state, weight.detach().bfloat16().contiguous())
    return mixed_linear(known[1], bias)


def _scaled(run: Run, scale: float) -> Run:
    return lambda x: run(x * scale)
