"""Memory forecasts for each precision: bytes of weights, of the peak of a load, and of the KV cache per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.machine import free_memory, refuse_memory
from clearhead.base.printing import human_bytes
from clearhead.core import Transformer, build
from clearhead.fast.stack import KEPT, PlannedStack
from clearhead.fast.stored import INT8, store
from clearhead.spec import Attention, Model
from clearhead.spec.cost import cost_per_token

OVERHEAD: Final = 1.1
"""Peak of a load without the tensors in transit, in sizes of the weights."""
IN_TRANSIT: Final = 2
"""Tensors of the file that a load holds at once beside the weights."""


@dataclass(frozen=True)
class WeightFormat:
    """A precision that weights can have in memory.

    Args:
        precision: the value of the option `precision`.
        convert: puts the weights of a module into this form; they may be on the meta device.
        cache: dtype of the KV cache of the decoder.
    """

    precision: str
    convert: Callable[[Transformer], Transformer]
    cache: torch.dtype


FORMATS: Final = (
    WeightFormat("fp32", lambda module: module.float(), torch.float32),
    WeightFormat("bf16", lambda module: module.bfloat16(), torch.bfloat16),
    WeightFormat("int8", lambda module: store(module, INT8), torch.int8),
)
"""Every precision, the most exact first."""


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a model in one precision, in bytes.

    Args:
        precision: the precision of the weights.
        weight_bytes: bytes of the weights; shared tensors count once.
        load_bytes: bytes at the peak of a load, without those that the process has before.
        cache_bytes_per_target_token: bytes of the KV cache for a token of the decoder.
        cache_bytes_per_source_token: bytes of the KV cache for a token of the encoder.
    """

    precision: str
    weight_bytes: int
    load_bytes: int
    cache_bytes_per_target_token: int
    cache_bytes_per_source_token: int


def forecast_memory(model: Model, *, stored: torch.dtype | None = None) -> list[MemoryForecast]:
    """Return the memory forecast of a model for each precision that it can have.

    Args:
        model: the spec of the model.
        stored: dtype of the weights in the files; None means fp32.
    """
    stored = stored or torch.float32
    return [forecast for choice in FORMATS if (forecast := _forecast(choice, model, stored)) is not None]


def _forecast(choice: WeightFormat, model: Model, stored: torch.dtype) -> MemoryForecast | None:
    """Return the forecast for one precision; None if the model cannot have it."""
    plain = build(model, device="meta")
    largest = max(weight.numel() for weight in _weights(plain)) * stored.itemsize
    try:
        weights = sum(weight.nbytes for weight in _weights(choice.convert(plain)))
    except InputError:
        return None
    return MemoryForecast(choice.precision, weights, _peak(weights, largest), *cache_bytes(model, choice.cache))


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _peak(weights: int, largest: int) -> int:
    return int(OVERHEAD * weights) + IN_TRANSIT * largest


def cache_bytes(model: Model, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the KV cache for a token of the decoder and for a token of the encoder.

    Args:
        model: the spec of the model.
        dtype: dtype of the keys and values. In int8 each vector of a head has a scale in fp32, and the keys and values
            of the encoder's tokens are bf16.
    """
    cost = cost_per_token(model, 1, 1)
    if dtype != torch.int8:
        return cost.cache_numbers * dtype.itemsize, cost.memory_numbers * dtype.itemsize
    stack = model.decoder
    layers = () if stack is None else stack.depths
    functions = [branch.function for layer in layers for step in layer.steps for branch in step.branches]
    vectors = sum(2 * node.num_kv_heads for node in functions if isinstance(node, Attention) and node.source == "self")
    return cost.cache_numbers + torch.float32.itemsize * vectors, cost.memory_numbers * torch.bfloat16.itemsize


def refuse_load(
    module: Transformer, precision: str, subject: str, *, stored: torch.dtype, device: torch.device | None = None
) -> None:
    """Refuse to load a model whose forecast exceeds the free memory; the message names the precisions that fit.

    Args:
        module: the model on the meta device.
        precision: the precision of the weights in memory.
        subject: the folder or file, for the message.
        stored: dtype of the weights in the files.
        device: device of the weights; None means the CPU.

    Raises:
        LackOfMemory: the load needs more memory than this process can still take.
    """
    free = free_memory(device)
    numbers, largest = (f(weight.numel() for weight in _weights(module)) for f in (sum, max))
    # No precision needs more than fp32, and this sum is cheap.
    if _peak(numbers * torch.float32.itemsize, largest * torch.float32.itemsize) <= free:
        return
    forecasts = forecast_memory(module.spec, stored=stored)
    needed = next(forecast.load_bytes for forecast in forecasts if forecast.precision == precision)
    fitting = [f"{one.precision} ({human_bytes(one.load_bytes)})" for one in forecasts if one.load_bytes <= free]
    advice = f"load it with the precision {' or '.join(fitting)}" if fitting else "no precision fits; free some memory"
    refuse_memory(needed, f"{subject}: to load it in {precision}", free=free, advice=advice)


def cache_dtype(module: Transformer) -> torch.dtype:
    """Return the dtype of the KV cache of a tree: that in which its decoder computes."""
    if isinstance(module.decoder, PlannedStack):
        return KEPT[module.decoder.plan.kind]
    return next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)
