"""FLOPs and cache size of custom modules: estimated by their dataclass, or measured on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead.core.attention import Attention
from clearhead.core.context import Cache, Context, Sequence
from clearhead.spec.registry import Part, Role

Build = Callable[[int, Any], nn.Module]
_LENGTHS: Final = (16, 32)


def sample_input(role: Role, size: int, length: int, device: torch.device | str = "cpu", batch: int = 1) -> Tensor:
    """Return a fixed input tensor to try or to measure a custom module, with the shape of its role.

    Args:
        role: role of the module.
        size: size that the module is built for.
        length: sequence length in tokens.
        device: device of the input.
        batch: number of sequences.
    """
    if role == "position":
        return torch.arange(length, device=device).expand(batch, length)
    shape = (batch, size, length, length) if role in ("scores", "weights") else (batch, length, size)
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32, device=device).mul(0.7).sin().view(shape)


def context_for(x: Tensor, length: int, memory: Tensor | None = None, cache: Cache | None = None) -> Context:
    """Return the `Context` for a call of a custom module on unpadded sequences, with the batch size of x."""
    ids = torch.zeros(len(x), length, dtype=torch.long, device=x.device)
    return Context.of(Sequence(ids), memory, None, cache)


def flops(build: Build, role: Role, node: Part, size: int) -> tuple[int, int]:
    """Return the FLOPs of a custom module's forward pass, per token and per pair of query and key.

    Args:
        build: function that builds the module from a size and a dataclass.
        role: role of the module.
        node: spec of the module; if its dataclass has a method `flops`, that method is used.
        size: size that the module is built for.
    """
    values = node.as_dataclass()
    if hasattr(values, "flops"):
        estimate = values.flops(size)
        return estimate if isinstance(estimate, tuple) else (estimate, 0)
    return _measure_flops(build, role, node, size)


@cache
def _measure_flops(build: Build, role: Role, node: Part, size: int) -> tuple[int, int]:
    short, long = _LENGTHS
    counts = [_count_flops(build, role, node, size, length) for length in _LENGTHS]
    # A count is the sum of a term linear in the length and a quadratic one.
    for_pair = (counts[1] * short - counts[0] * long) / (short * long * (long - short))
    for_token = counts[0] / short - for_pair * short
    return max(0, round(for_token)), max(0, round(for_pair))


def _count_flops(build: Build, role: Role, node: Part, size: int, length: int) -> int:
    try:
        return _count_flops_on(build, role, node, size, length, "meta")
    except (NotImplementedError, RuntimeError):  # the module needs values
        return _count_flops_on(build, role, node, size, length, "cpu")


def _count_flops_on(build: Build, role: Role, node: Part, size: int, length: int, device: str) -> int:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device(device):
        module = build(size, node.as_dataclass()).eval()
        x = sample_input(role, size, length, device)
        with FlopCounterMode(display=False) as counter:
            module(x) if role in ("norm", "position") else module(
                x, context_for(x, length, sample_input("norm", size, 3))
            )
    return int(counter.get_total_flops())


def cache_numbers(build: Build, role: Role, node: Part, size: int) -> int:
    """Return the count of numbers that a custom module caches per token during generation.

    The arguments are those of `flops`. If the dataclass has a method `cache_numbers`, that method is used. State whose
    size does not grow with the tokens is not counted.
    """
    values = node.as_dataclass()
    if hasattr(values, "cache_numbers"):
        return int(values.cache_numbers(size))
    with torch.device("meta"):
        module = build(size, values)
    if isinstance(module, Attention):
        return 2 * module.spec.num_kv_heads * module.spec.head_size
    return 0 if getattr(module, "keeps", None) is not None else size
