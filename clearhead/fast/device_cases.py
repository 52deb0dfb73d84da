"""Test cases for devices: shapes and layouts from public reports of silently wrong results.

Legend: B batch, T queries, S keys, H heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from clearhead.core.attention import attention_weights, repeat_heads
from clearhead.core.kernels.attention import fused_attention

FUSED: Final = "fused attention"
EAGER: Final = "eager attention"
_POINTED_SCALE: Final = 4.0
_UNIFORM_STEPS: Final = 2**20


@dataclass(frozen=True)
class DeviceCase:
    """Test case for a device: one computation, with its shape, masks and memory layout.

    Attributes:
        kind: name of the computation, a key of `KINDS`.
        report: public report of a device that computed this shape, or a larger one of its kind, wrong.
        shape: B, H, K, T, S, E for attention. For products, the axes of the rows and then the number of outputs. For
            other computations, the axes of the input.
        hidden: keys hidden by a mask: "future", "padding", "block" (of one text) or "all" (from one query).
        is_view: True if the inputs are views with an offset, and with axes in another order than in memory.
        scale: factor on the scores. None means E ** -0.5.
    """

    kind: str
    report: str
    shape: tuple[int, ...]
    hidden: str = ""
    is_view: bool = False
    scale: float | None = None

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        if self.kind == "attention":
            _, heads, kv_heads, queries, keys, size = self.shape
            shape = f"{queries} queries on {keys} keys, {heads} heads over {kv_heads} of size {size}"
        return shape + (f", hidden: {self.hidden}" if self.hidden else "") + (", views" if self.is_view else "")


CASES: Final = (
    DeviceCase("attention", "pytorch #195910", (1, 4, 4, 64, 64, 64), hidden="future"),
    DeviceCase("attention", "pytorch #174861", (1, 32, 2, 1, 1024, 128)),
    *(
        DeviceCase("attention", "pytorch #169222", (1, 4, 4, queries, keys, 64))
        for keys in (38, 39, 70)
        for queries in range(1, 9)
    ),
    DeviceCase("attention", "pytorch #181133", (84, 3, 3, 3, 3, 64), is_view=True),
    DeviceCase("attention", "pytorch #163597", (2, 12, 12, 8, 40, 64), is_view=True),
    DeviceCase("attention", "pytorch #103749", (3, 4, 2, 17, 17, 64), hidden="padding"),
    DeviceCase("attention", "pytorch #184180", (2, 4, 4, 8, 8, 64), hidden="block"),
    DeviceCase("attention", "pytorch #156707", (1, 1, 1, 2, 2, 8), hidden="all"),
    DeviceCase("attention", "pytorch #184122", (1, 2, 2, 4, 4, 8)),
    DeviceCase("attention", "pytorch #184122", (1, 2, 2, 4, 4, 8), scale=2.0),
    DeviceCase("products", "pytorch #180776", (1, 3, 28, 315, 315)),
    DeviceCase("products", "pytorch #162730", (3, 5, 64, 96), is_view=True),
    DeviceCase("products", "pytorch #193487", (25, 40, 25), is_view=True),
    DeviceCase("softmax", "pytorch #190791", (2, 4096)),
    DeviceCase("softmax", "burn #4815", (4, 3), is_view=True),
    DeviceCase("layer norm", "pytorch #131750", (3, 64), is_view=True),
    DeviceCase("RMS norm", "torch-spyre #1781", (1, 8, 64, 128), is_view=True),
    DeviceCase("embedding", "torch-spyre #3851", (8, 64, 128)),
    DeviceCase("sampling", "pytorch #92311", (10, 2)),
    DeviceCase("sampling", "pytorch #99802", (4, 128)),
)

Inputs = tuple[Tensor, ...]


def draw_inputs(case: DeviceCase, is_pointed: bool) -> Inputs:
    """Return the inputs of a case, on the CPU in double precision.

    Args:
        case: the case.
        is_pointed: True draws numbers for which all outputs are about equally large, so that a small error of one
            output shows. False draws outputs that mix all inputs, so that a missing or surplus input shows.
    """
    return KINDS[case.kind].draw(case, is_pointed, Generator().manual_seed(sum(case.shape)))


def visible_keys(case: DeviceCase) -> Tensor | None:
    """Return the attention mask [B, 1, T, S] of a case, True = may attend; None hides nothing."""
    if not case.hidden:
        return None
    batch, _, _, queries, keys, _ = case.shape
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if case.hidden == "future":
        return mask.tril()
    if case.hidden == "padding":
        return mask & (torch.arange(keys) < keys - 3 * torch.arange(batch)[:, None])[:, None, None]
    mask[0, :, queries // 2 :, 0 if case.hidden == "all" else keys // 2 :] = False
    return mask


def layout(x: Tensor, is_view: bool, device: torch.device) -> Tensor:
    """Copy a tensor to a device; a view begins at an offset in a larger tensor and has two axes swapped."""
    if not is_view:
        return x.to(device)
    first, second = (1, 2) if x.ndim == 4 else (x.ndim - 2, x.ndim - 1)
    swapped = x.transpose(first, second)
    return torch.cat([swapped[:1], swapped]).to(device)[1:].transpose(first, second)


def _magnitudes(generator: Generator, *shape: int) -> Tensor:
    """Return numbers of random sign and about equal size."""
    return _signs(generator, *shape) * (1.0 + 0.25 * torch.rand(shape, generator=generator, dtype=torch.float64))


def _signs(generator: Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2.0 - 1.0


def _normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _draw_attention(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    batch, heads, kv_heads, queries, keys, size = case.shape
    value_BKSE = _magnitudes(generator, batch, kv_heads, keys, size)
    if not is_pointed:
        query_BHTE, key_BKSE = (
            _normal(generator, batch, count, length, size) for count, length in ((heads, queries), (kv_heads, keys))
        )
        return query_BHTE, key_BKSE, value_BKSE
    # Each query attends to one key alone: the last visible key, and in other heads one of the keys before it.
    key_BKSE = _signs(generator, batch, kv_heads, keys, size)
    mask = visible_keys(case)
    visible_BTS = torch.ones(batch, queries, keys).bool() if mask is None else mask[:, 0]
    number_BTS = visible_BTS.flip(-1).cumsum(-1).flip(-1) * visible_BTS
    wanted_BHT = torch.arange(heads)[:, None] % number_BTS.amax(-1).clamp(min=1)[:, None] + 1
    target_BHT = (number_BTS[:, None] == wanted_BHT[..., None]).double().argmax(-1)
    target_BKXE = target_BHT.view(batch, kv_heads, -1, 1).expand(-1, -1, -1, size)
    query_BHTE = key_BKSE.gather(2, target_BKXE).view(batch, heads, queries, size)
    return _POINTED_SCALE * query_BHTE, key_BKSE, value_BKSE


def _draw_product(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    *axes, size, outputs = case.shape
    if not is_pointed:
        return _normal(generator, *axes, size), _normal(generator, outputs, size)
    rows = torch.arange(torch.Size(axes).numel()).view(*axes) * 7
    return F.one_hot((size - 1 - rows) % size, size).double(), _magnitudes(generator, outputs, size)


def _draw_softmax(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    return (_normal(generator, *case.shape) * (0.05 if is_pointed else 2.0),)


def _draw_norm(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    size, zero = case.shape[-1], torch.zeros(case.shape[-1]).double()
    if is_pointed:
        return _magnitudes(generator, *case.shape).abs() * (torch.arange(size) % 2 * 2 - 1), zero + 1.0, zero
    return _normal(generator, *case.shape) + 0.5, _normal(generator, size), _normal(generator, size)


def _draw_embedding(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    tables, rows, size = case.shape
    ids = torch.randint(0, tables * rows, (tables, rows), generator=generator)
    return ids, _magnitudes(generator, tables * rows, size)


def _draw_sampling(case: DeviceCase, is_pointed: bool, generator: Generator) -> Inputs:
    rows, vocabulary = case.shape
    # Logits are exact in 16 bits and far apart, so rounding changes no choice.
    logits_BV = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)]).double() / 64.0
    shares_BV = logits_BV.softmax(-1)
    chosen_B1 = torch.arange(rows)[:, None] * 37 % vocabulary
    middle_B1 = (shares_BV.cumsum(-1) - shares_BV / 2.0).gather(-1, chosen_B1)
    return logits_BV, (middle_B1 * _UNIFORM_STEPS).long()


def attend_fused(case: DeviceCase, inputs: Inputs) -> Tensor:
    """Attend with the fused kernel, called as in the core."""
    query_BHTE, key_BKSE, value_BKSE = inputs
    mask, scale, is_causal = visible_keys(case), case.scale or case.shape[-1] ** -0.5, case.hidden == "future"
    allowed = None if mask is None or is_causal else mask.to(query_BHTE.device)
    return fused_attention(query_BHTE, key_BKSE, value_BKSE, allowed, scale=scale, is_causal=is_causal)


def attend_eager(case: DeviceCase, inputs: Inputs) -> Tensor:
    """Attend step by step, like the eager kernel of the core."""
    query_BHTE, key_BKSE, value_BKSE = inputs
    mask, heads = visible_keys(case), query_BHTE.shape[1]
    scores = query_BHTE @ repeat_heads(key_BKSE, heads).transpose(-1, -2) * (case.scale or case.shape[-1] ** -0.5)
    mask = None if mask is None else mask.to(scores.device)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    return attention_weights(scores, mask) @ repeat_heads(value_BKSE, heads)


def _sample(_: DeviceCase, inputs: Inputs) -> Tensor:
    """Return the most probable ids of each row, and the id drawn by a uniform number."""
    logits_BV, steps_B1 = inputs
    running_BV = logits_BV.float().softmax(-1).cumsum(-1)
    drawn_B1 = torch.searchsorted(running_BV, steps_B1 / _UNIFORM_STEPS, right=True)
    return torch.cat([logits_BV.argmax(-1, keepdim=True), logits_BV.topk(2).indices, drawn_B1], -1)


@dataclass(frozen=True)
class DeviceComputation:
    """A computation that devices are tested on.

    Attributes:
        draw: function that returns the inputs of a case.
        operations: functions that make the computation, by the names in reports; the last one is the reference.
    """

    draw: Callable[[DeviceCase, bool, Generator], Inputs]
    operations: Mapping[str, Callable[[DeviceCase, Inputs], Tensor]]


KINDS: Final[Mapping[str, DeviceComputation]] = {
    "attention": DeviceComputation(_draw_attention, {FUSED: attend_fused, EAGER: attend_eager}),
    "softmax": DeviceComputation(_draw_softmax, {"softmax": lambda _, x: x[0].softmax(-1)}),
    "layer norm": DeviceComputation(
        _draw_norm, {"layer norm": lambda _, x: F.layer_norm(x[0], x[1].shape, x[1], x[2])}
    ),
    "RMS norm": DeviceComputation(_draw_norm, {"RMS norm": lambda _, x: F.rms_norm(x[0], x[1].shape, x[1])}),
    "products": DeviceComputation(_draw_product, {"matrix products": lambda _, x: F.linear(*x)}),
    "embedding": DeviceComputation(_draw_embedding, {"embedding lookups": lambda _, x: F.embedding(x[0][3], x[1])}),
    "sampling": DeviceComputation(_draw_sampling, {"sampling": _sample}),
}
