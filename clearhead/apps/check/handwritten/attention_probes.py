"""Test inputs for hand-written attentions, and the call conventions to try: mask meaning, mask shape, batch axis.

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
from clearhead.apps.check.handwritten.calling import Argument, CallInputs, call_arguments
from clearhead.apps.check.handwritten.libraries import LIBRARIES
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.handwritten.running import CandidateRunner, describe_result, tensors_of
from clearhead.apps.check.handwritten.weights import WeightAssignment

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
class CallConvention:
    """Call convention of an attention: meaning, shape and argument name of its mask, and whether the batch is first."""

    meaning: str = "attend"
    shape: str = SHAPES[0]
    argument: str | None = None
    is_batch_first: bool = True
    is_expected: bool = True


@dataclass
class Session:
    """State of the check of one attention: its arguments, possible weight assignments, findings and notes."""

    runner: CandidateRunner
    arguments: list[Argument]
    width: int
    heads: int
    assignments: list[WeightAssignment]
    numbers: dict[str, Any]
    causal: bool | None
    is_split: bool = False
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_library(self) -> bool:
        """True if the attention is a class of a library such as torch, which may leave out a step on purpose."""
        return type(self.runner.candidate).__module__.split(".")[0] in LIBRARIES

    @property
    def mask_arguments(self) -> list[str]:
        """Names of the mask arguments of the attention."""
        return [argument.name for argument in self.arguments if argument.role == "mask"]

    @property
    def has_memory(self) -> bool:
        """True if the attention has a separate argument for the input of keys and values."""
        return any(argument.role in ("memory", "key") for argument in self.arguments)

    def run(self, probe: Probe, convention: CallConvention) -> tuple[Probe, Tensor] | None:
        """Run a test input, with an all-True mask if the call needs a mask; return input and output, or None."""
        output = self.output(probe, convention)
        if output is None and probe.allowed is None and convention.argument is not None:
            keys = (probe.query if probe.memory is None else probe.memory).shape[1]
            rows, batch = (
                1 if convention.shape in KEY_SHAPES else probe.query.shape[1],
                1 if convention.shape == SHAPES[2] else BATCH,
            )
            probe = replace(probe, allowed=torch.ones(batch, 1, rows, keys, dtype=torch.bool))
            output = self.output(probe, convention)
        return None if output is None else (probe, output)

    def output(self, probe: Probe, convention: CallConvention) -> Tensor | None:
        """Return the attention's output [B, T, D] for a test input; None if the call fails."""
        turned = [None if x is None else self.to_layout(x, convention) for x in (probe.query, probe.memory)]
        assert turned[0] is not None
        mask = None if probe.allowed is None else convert_mask(probe.allowed, convention, turned[0].dtype)
        inputs = CallInputs(turned[0], turned[1], mask, None if mask is None else self._mask_name(probe, convention))
        result = self._call(inputs)
        wanted = self.to_layout(probe.query, convention).shape
        for tensor in tensors_of(result)[:1]:
            if tensor.shape == wanted or (tensor.dim() == 3 and tensor.shape[::2] == wanted[::2]):
                return self._from_layout(tensor, convention).double()
        if result is not None:
            self.runner.error = TypeError(f"it returns {describe_result(result)}, not a tensor {list(wanted)}")
        return None

    def _mask_name(self, probe: Probe, convention: CallConvention) -> str | None:
        """Return the name of the mask argument for a test input; a mask of the memory may have its own argument."""
        if probe.memory is None or convention.shape not in KEY_SHAPES:
            return convention.argument
        return next((name for name in self.mask_arguments if _OF_MEMORY.fullmatch(name)), convention.argument)

    def _call(self, inputs: CallInputs) -> Any:
        args, named = call_arguments(self.runner.candidate, self.arguments, inputs, self.numbers)
        return self.runner.attempt(*args, named=named)

    def to_layout(self, x: Tensor, convention: CallConvention) -> Tensor:
        """Convert an input [B, T, D] to the axes that the attention expects, such as [T, B, D]."""
        if self.is_split:
            return SPLITS["heads"](x, self.heads)
        return x if convention.is_batch_first else x.transpose(0, 1)

    def _from_layout(self, x: Tensor, convention: CallConvention) -> Tensor:
        if self.is_split:
            return x.transpose(1, 2).flatten(2)
        return x if convention.is_batch_first else x.transpose(0, 1)


def convert_mask(allowed: Tensor, convention: CallConvention, dtype: torch.dtype) -> Tensor:
    """Convert a mask [B or 1, 1, T or 1, S] to the shape and meaning that the call convention demands."""
    match convention.shape:
        case "[batch, queries, keys]":
            allowed = allowed[:, 0]
        case "[queries, keys]":
            allowed = allowed[0, 0]
        case "[batch, keys]":
            allowed = allowed[:, 0, 0]
    match convention.meaning:
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
    """Return a number of queries and a number of keys that differ from the sizes of all other axes."""
    taken = {BATCH, heads, width // heads, width, 3 * width}
    free = [size for size in (5, 7, 11, 13, 17, 19, 23) if size not in taken]
    return free[0], free[1]


def probes(session: Session, convention: CallConvention) -> Iterator[Probe]:
    """Yield random test inputs for a call convention; some have a mask or a memory, if the attention takes it."""
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
        if convention.shape in KEY_SHAPES:
            mask = mask[:, :, :1]
        return mask[:1] if convention.shape == "[queries, keys]" else mask

    masked = convention.argument is not None
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
