"""Fast layers: inside a with block, those of a model on a CPU run by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.core.head import Linear as HeadLinear
from clearhead.core.stack import Stack
from clearhead.fast.int8 import Int8Linear, Int8Matrix
from clearhead.fast.linear import Run, float_linear, int8_linear, mixed_linear
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.rounding import rounded_weight
from clearhead.fast.stack import compiled_layers

LEAST_WEIGHTS: Final = 2**23
"""A model with fewer numbers in its linear layers stays in the caches, where products in bf16 gain nothing."""


@contextmanager
def fast_layers(module: nn.Module) -> Iterator[None]:
    """Let the layers of a model run by compiled kernels: whole stacks where they serve the call, else linear layers.

    Results are those of the plain layers up to the order of sums; with weights in 8 bits, up to rounding the inputs to
    8 bits as well, and with products in bf16 (`multiply_in_bf16`), up to rounding inputs and weights to bf16. Weights
    must not be moved inside the block. The plain layers run where gradients are recorded, in a model whose activations
    are being watched, and in fp32 in a model without a decoder: it reads whole texts, where PyTorch is as fast.
    """
    changed: list[tuple[nn.Module, str]] = []
    for part, name, run in _replacements(module):
        if name not in vars(part):
            vars(part)[name] = run
            changed.append((part, name))
    try:
        yield
    finally:
        for part, name in changed:
            del vars(part)[name]


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


Replacement = tuple[nn.Module, str, Callable[..., Tensor]]


class _Known:
    """The replacements in a model, kept until its parts or weights change; a copy of the model has its own."""

    def __init__(self) -> None:
        self.parts: list[tuple[nn.Module, tuple[nn.Module | None, ...]]] = []  # each with its children
        self.weights: list[int] = []
        self.found: list[Replacement] = []

    def __deepcopy__(self, memo: object) -> _Known:
        return _Known()

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return _Known, ()


def _replacements(module: nn.Module) -> list[Replacement]:
    """Return the compiled functions of a model: in which part, in place of which method."""
    known: _Known = vars(module).setdefault("compiled_layers", _Known())
    if not known.parts or any(tuple(part._modules.values()) != children for part, children in known.parts):
        known.parts = [(part, tuple(part._modules.values())) for part in module.modules()]
        known.weights = []
    parts = [part for part, _ in known.parts]
    if any(getattr(part, "watchers", None) or part._forward_hooks or part._forward_pre_hooks for part in parts):
        return []
    in_bf16 = vars(module).get("products") == torch.bfloat16
    weights = [int(in_bf16), *(number for part in parts for number in _state(part))]
    if known.weights != weights:
        has_few_rows = getattr(module, "decoder", None) is not None
        stacks = [part for part in parts if isinstance(part, Stack)]
        linears = ((part, "forward", _fast_forward(part, in_bf16, has_few_rows)) for part in parts)
        known.found = [(part, name, run) for part, name, run in linears if run is not None]
        known.found += [(part, name, run) for part in stacks for name, run in compiled_layers(part, in_bf16).items()]
        known.weights = weights
    return known.found


def _state(part: nn.Module) -> Iterator[int]:
    """Yield numbers that change where a weight does."""
    for weight in (*part._parameters.values(), *part._buffers.values()):
        if weight is not None:
            yield id(weight)
            # Weights that are spread over processes have no address.
            yield 0 if hasattr(weight, "placements") else weight.data_ptr()
            yield 0 if weight.is_inference() else weight._version


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
    return mixed_linear(rounded_weight(part, weight), bias)


def _scaled(run: Run, scale: float) -> Run:
    return lambda x: run(x * scale)
