"""The inputs on which attentions are compared, and the ways in which a hand-written one can be called.

Legend: B batch, T queries, S keys, D width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.attention_mistakes import SPLITS, Probe
from clearhead.apps.check.handwritten.calling import Argument, Given, call_arguments
from clearhead.apps.check.handwritten.libraries import LIBRARIES
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.handwritten.running import Runner, described, tensors_of
from clearhead.apps.check.handwritten.weights import Reading

SHAPES = (
    "[batch, 1, queries, keys]",
    "[batch, queries, keys]",
    "[queries, keys]",
    "[batch, keys]",
    "[batch, 1, 1, keys]",
)
_OF_MEMORY = re.compile("(context|memory|cross|encoder)(_key_padding)?_mask")
KEY_SHAPES = SHAPES[3:]
BATCH = 2


@dataclass(frozen=True)
class Way:
    """One way to call a part: what its mask means and which shape it has, and whether the batch comes first."""

    meaning: str = "attend"
    shape: str = SHAPES[0]
    argument: str | None = None
    is_batch_first: bool = True
    is_expected: bool = True


@dataclass
class Session:
    """A part while it is compared."""

    runner: Runner
    arguments: list[Argument]
    width: int
    heads: int
    readings: list[Reading]
    numbers: dict[str, Any]
    causal: bool | None
    is_split: bool = False
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_library(self) -> bool:
        """Whether the part is of a library, which leaves out a step on purpose."""
        return type(self.runner.part).__module__.split(".")[0] in LIBRARIES

    @property
    def mask_arguments(self) -> list[str]:
        """The names of the arguments that are masks."""
        return [one.name for one in self.arguments if one.role == "mask"]

    @property
    def has_memory(self) -> bool:
        """Whether keys and values can be made of something else than the queries."""
        return any(one.role in ("memory", "key") for one in self.arguments)

    def run(self, probe: Probe, way: Way) -> tuple[Probe, Tensor] | None:
        """Return a probe, with a mask where the part needs one, and its output; None: the part does not take it."""
        found = self.output(probe, way)
        if found is None and probe.allowed is None and way.argument is not None:
            keys = (probe.query if probe.memory is None else probe.memory).shape[1]
            rows, batch = (
                1 if way.shape in KEY_SHAPES else probe.query.shape[1],
                1 if way.shape == SHAPES[2] else BATCH,
            )
            probe = replace(probe, allowed=torch.ones(batch, 1, rows, keys, dtype=torch.bool))
            found = self.output(probe, way)
        return None if found is None else (probe, found)

    def output(self, probe: Probe, way: Way) -> Tensor | None:
        """Return the output [B, T, D] of a probe; None: the part does not take it."""
        turned = [None if x is None else self.shaped(x, way) for x in (probe.query, probe.memory)]
        assert turned[0] is not None
        mask = None if probe.allowed is None else written_mask(probe.allowed, way, turned[0].dtype)
        given = Given(turned[0], turned[1], mask, None if mask is None else self._mask_name(probe, way))
        result = self._called(given)
        wanted = self.shaped(probe.query, way).shape
        for one in tensors_of(result)[:1]:
            if one.shape == wanted or (one.dim() == 3 and one.shape[::2] == wanted[::2]):
                return self._back(one, way).double()
        if result is not None:
            self.runner.error = TypeError(f"it returns {described(result)}, not a tensor {list(wanted)}")
        return None

    def _mask_name(self, probe: Probe, way: Way) -> str | None:
        """Return the argument for a mask: padding of a memory may have one of its own."""
        if probe.memory is None or way.shape not in KEY_SHAPES:
            return way.argument
        return next((name for name in self.mask_arguments if _OF_MEMORY.fullmatch(name)), way.argument)

    def _called(self, given: Given) -> Any:
        args, named = call_arguments(self.runner.part, self.arguments, given, self.numbers)
        return self.runner.attempt(*args, named=named)

    def shaped(self, x: Tensor, way: Way) -> Tensor:
        """Return [B, T, D] as the part reads it."""
        if self.is_split:
            return SPLITS["heads"](x, self.heads)
        return x if way.is_batch_first else x.transpose(0, 1)

    def _back(self, x: Tensor, way: Way) -> Tensor:
        if self.is_split:
            return x.transpose(1, 2).flatten(2)
        return x if way.is_batch_first else x.transpose(0, 1)


def written_mask(allowed: Tensor, way: Way, dtype: torch.dtype) -> Tensor:
    """Return a mask [B or 1, 1, T or 1, S] as a part wants it."""
    match way.shape:
        case "[batch, queries, keys]":
            allowed = allowed[:, 0]
        case "[queries, keys]":
            allowed = allowed[0, 0]
        case "[batch, keys]":
            allowed = allowed[:, 0, 0]
    match way.meaning:
        case "block":
            return ~allowed
        case "additive":
            return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))
        case "ones":
            return allowed.long()
        case "float ones":
            return allowed.to(dtype)
    return allowed


def _sizes(width: int, heads: int) -> tuple[int, int]:
    """Return numbers of queries and of keys that no other size equals."""
    taken = {BATCH, heads, width // heads, width, 3 * width}
    free = [size for size in (5, 7, 11, 13, 17, 19, 23) if size not in taken]
    return free[0], free[1]


def probes(session: Session, way: Way) -> Iterator[Probe]:
    """Give the inputs on which a part is compared, all sizes different."""
    generator = torch.Generator().manual_seed(23)
    width, (queries, keys) = session.width, _sizes(session.width, session.heads)

    def draw(tokens: int, scale: float = 1.0) -> Tensor:
        return torch.randn(BATCH, tokens, width, generator=generator, dtype=session.runner.dtype) * scale

    def allow(rows: int, columns: int) -> Tensor:
        mask = torch.rand(BATCH, 1, rows, columns, generator=generator) > 0.45
        index = torch.arange(rows)
        mask[..., index, index % columns] = True
        mask[..., index, (index + 2) % columns] = False
        mask[:, :, 0, 0] = mask[:, :, -1, 0] = True
        if way.shape in KEY_SHAPES:
            mask = mask[:, :, :1]
        return mask[:1] if way.shape == "[queries, keys]" else mask

    masked = way.argument is not None
    yield Probe("self-attention", draw(queries))
    if masked:
        yield Probe("with a mask", draw(queries), None, allow(queries, queries))
        yield Probe("with a mask and large inputs", draw(queries, 25.0), None, allow(queries, queries))
    if session.has_memory:
        yield Probe("cross-attention", draw(queries), draw(keys))
        yield Probe("cross-attention to as many tokens", draw(queries), draw(queries))
        if masked:
            yield Probe("cross-attention with a mask", draw(queries), draw(keys), allow(queries, keys))
    if width <= 96:
        yield Probe("more tokens than features", draw(width + 3))


Outputs = dict[str, tuple[Probe, Tensor]]
