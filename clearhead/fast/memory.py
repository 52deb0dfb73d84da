"""Memory forecasts for each precision: bytes of the weights, of the peak of a load, and of the KV cache per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from clearhead.base import machine
from clearhead.base.errors import InputError
from clearhead.base.machine import refuse_memory
from clearhead.base.printing import human_bytes
from clearhead.core import Transformer, build
from clearhead.fast.stack import CACHE_DTYPES, PlannedStack
from clearhead.fast.stored import INT8, WeightForm, WeightPlan, choose_int4, require_formats
from clearhead.spec import Attention, Model
from clearhead.spec.cost import cost_per_token

OVERHEAD: Final = 1.1
"""Peak memory of a load relative to the weights that it copies, without the tensors in transit."""
IN_TRANSIT: Final = 2
"""Number of file tensors that a load holds at the same time, in addition to the weights."""
MOST_CACHE_TOKENS: Final = 2**20
CACHE_ROOM: Final = 2
"""Memory of a growing KV cache relative to its tokens: a full buffer is replaced by one of twice the length."""


@dataclass(frozen=True)
class WeightFormat:
    """Precision in which weights can be held in memory, with the dtype of its KV cache.

    Args:
        precision: the value of the option `precision`.
        form: the rule for the dtype and the storage formats of the weights.
        cache: dtype of the decoder's KV cache.
    """

    precision: str
    form: WeightForm
    cache: torch.dtype


FORMATS: Final = (
    WeightFormat("fp32", WeightForm(), torch.float32),
    WeightFormat("bf16", WeightForm(torch.bfloat16), torch.bfloat16),
    WeightFormat("int8", WeightForm(choose=lambda module, _: require_formats(module, INT8)), torch.int8),
    WeightFormat("int4", WeightForm(choose=lambda module, _: choose_int4(module)), torch.int8),
)
"""Every precision, the most exact first."""


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a model in one precision, in bytes.

    Args:
        precision: the precision of the weights.
        weight_bytes: bytes of the weights; shared tensors count once.
        load_bytes: bytes at the peak of a load, without the memory that the process already uses.
        cache_bytes_per_target_token: bytes of the KV cache for a token of the decoder.
        cache_bytes_per_source_token: bytes of the KV cache for a token of the encoder.
    """

    precision: str
    weight_bytes: int
    load_bytes: int
    cache_bytes_per_target_token: int
    cache_bytes_per_source_token: int

    def summary(self) -> str:
        """Return the memory of the weights, of the peak of a load and of the KV cache per token as text."""
        line = f"{human_bytes(self.weight_bytes)} of weights, peak while loading {human_bytes(self.load_bytes)}"
        target, source = self.cache_bytes_per_target_token, self.cache_bytes_per_source_token
        if target and source:
            line += f", KV cache {human_bytes(target)} for each target token and {human_bytes(source)} for each source "
            line += "token"
        elif target:
            line += f", KV cache {human_bytes(target)} for each token"
        return line


def forecast_memory(
    model: Model,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    is_mapped: bool = True,
    has_kernels: bool = True,
) -> list[MemoryForecast]:
    """Return the memory forecast of a model for each precision that the model can have.

    Args:
        model: the spec of the model.
        dtypes: dtypes of the files, by the addresses of weights. None means fp32.
        is_mapped: True if weights that need no conversion are mapped from their files instead of copied.
        has_kernels: True if kernels compute the decoder. Otherwise a model in 8 or 4 bits computes in fp32.
    """
    module, forecasts = build(model, device="meta"), []
    dtypes = dtypes or dict.fromkeys(module.state_dict(), torch.float32)
    for weight_format in FORMATS:
        try:
            plan = weight_format.form.plan(module, dtypes)
        except InputError:  # the model has no matrix for the format
            continue
        weights = sum(plan.num_bytes(address, slot) for address, slot in module.state_dict().items())
        peak = load_peak(module, plan, dtypes, is_mapped=is_mapped)
        cache = weight_format.cache if has_kernels or weight_format.form.choose is None else torch.float32
        forecasts.append(MemoryForecast(weight_format.precision, weights, peak, *cache_bytes(model, cache)))
    return forecasts


def load_peak(
    module: Transformer, plan: WeightPlan, dtypes: Mapping[str, torch.dtype], *, is_mapped: bool = True
) -> int:
    """Return the bytes at the peak of a load, without the memory that the process already uses.

    Args:
        module: the model on the meta device.
        plan: dtype or storage format of each weight in memory.
        dtypes, is_mapped: the arguments of `forecast_memory`.
    """
    mapped = copied = largest = 0
    for address, slot in module.state_dict().items():
        size = plan.num_bytes(address, slot)
        if is_mapped and plan.keeps(address, dtypes[address]):
            mapped += size
        else:
            copied += size
            largest = max(largest, slot.numel() * dtypes[address].itemsize)
    return mapped + int(OVERHEAD * copied) + IN_TRANSIT * largest


def cache_bytes(model: Model, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the KV cache per token of the decoder and per token of the encoder.

    Args:
        model: the spec of the model.
        dtype: dtype of the keys and values. In int8, each vector of a head has an fp32 scale, and the keys and values
            of encoder tokens are bf16.
    """
    cost = cost_per_token(model, 1, 1)
    if dtype != torch.int8:
        return cost.cache_numbers * dtype.itemsize, cost.memory_numbers * dtype.itemsize
    stack = model.decoder
    layers = () if stack is None else stack.depths
    functions = [branch.function for layer in layers for step in layer.steps for branch in step.branches]
    vectors = sum(2 * node.num_kv_heads for node in functions if isinstance(node, Attention) and node.source == "self")
    return cost.cache_numbers + torch.float32.itemsize * vectors, cost.memory_numbers * torch.bfloat16.itemsize


def cache_dtype(module: Transformer) -> torch.dtype:
    """Return the dtype of a model's KV cache: the dtype in which its decoder computes."""
    if isinstance(module.decoder, PlannedStack):
        return CACHE_DTYPES[module.decoder.plan.kind]
    dtypes = {weight.dtype for weight in module.parameters() if weight.dim() == 1}
    return torch.float32 if torch.float32 in dtypes else next(iter(dtypes), torch.float32)


def cache_tokens(module: Transformer) -> int:
    """Return the default maximum number of tokens in the KV cache of a batch on a GPU, including tokens to come.

    Keys and values may take half of the free memory, with the room that growing buffers keep, and at most 2^20 tokens.
    """
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    token_bytes = CACHE_ROOM * sum(cache_bytes(module.spec, cache_dtype(module)))
    return min(MOST_CACHE_TOKENS, max(1, machine.free_memory(device) // 2 // max(1, token_bytes)))


def refuse_load(
    module: Transformer,
    plan: WeightPlan,
    dtypes: Mapping[str, torch.dtype],
    subject: object,
    *,
    is_mapped: bool = True,
) -> None:
    """Refuse to load a model if the forecast exceeds the free memory; the message names the precisions that fit.

    Args:
        module: the model on the meta device.
        plan: dtype or storage format of each weight in memory.
        dtypes, is_mapped: the arguments of `forecast_memory`.
        subject: folder or file, for the message.

    Raises:
        LackOfMemory: the load needs more memory than this process can get.
    """
    needed, free = load_peak(module, plan, dtypes, is_mapped=is_mapped), machine.free_memory()
    if needed <= free:
        return
    forecasts = forecast_memory(module.spec, dtypes, is_mapped=is_mapped)
    fitting = [
        f"{forecast.precision} ({human_bytes(forecast.load_bytes)})"
        for forecast in forecasts
        if forecast.load_bytes <= free
    ]
    advice = f"load it with the precision {' or '.join(fitting)}" if fitting else "no precision fits: free some memory"
    refuse_memory(needed, f"{subject}: to load it", free=free, advice=advice)
