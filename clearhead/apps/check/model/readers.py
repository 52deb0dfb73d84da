"""Run one stack of a model, and capture its activations in the same form for all families.

Legend: B rows, T tokens, S source tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Attention, Cache, Sequence, Transformer
from clearhead.core.stack import Stack
from clearhead.interpret.maps.hook_points import addresses, capture

Side = Literal["encoder", "decoder"]
_WATCHED = re.compile(r"embedded|.*\.(queries|keys|mixed|steps\.\d+\.after)")
_STEP = re.compile(r"steps\.(\d+)")
_RANKS = {"queries": 0, "keys": 1, "mixed": 2, "after": 3}


class TracePoint(NamedTuple):
    """Point of a computation at which a value is captured; points sort in the order of the computation.

    Args:
        depth: number of layers that ran before this point; -1 for embeddings, the number of layers for outputs.
        step: number of the residual step in the layer.
        rank: order of the activations within the step.
        address: address of the activation.
    """

    depth: int
    step: int
    rank: int
    address: str


Trace = dict[TracePoint, Tensor]
"""Captured values by point, in order: [rows, tokens, features], or [real tokens of all rows, features]."""


@dataclass(frozen=True)
class Reader:
    """One stack of a model, and the memory that a decoder attends to.

    Args:
        module: the model.
        side: the stack, "encoder" or "decoder".
        memory: output of the encoder [B, S, width] for the decoder of an encoder-decoder; None otherwise.
        memory_mask: mask of the memory [B, S], True = a real token; None means that all are real.
    """

    module: Transformer
    side: Side
    memory: Tensor | None = None
    memory_mask: Tensor | None = None

    @classmethod
    def of(cls, module: Transformer, side: Side, source: Sequence | None = None) -> Reader:
        """Make a reader; for the decoder of an encoder-decoder, the encoder computes the memory from `source`."""
        if side == "encoder" or module.encoder is None:
            return cls(module, side)
        assert source is not None
        with torch.no_grad():
            return cls(module, side, module.encoder(source), source.mask)

    @property
    def stack(self) -> Stack:
        """The module of the stack."""
        stack = self.module.encoder if self.side == "encoder" else self.module.decoder
        assert stack is not None
        return stack

    @property
    def spec(self) -> spec.Stack:
        """The spec of the stack."""
        stack = self.module.spec.encoder if self.side == "encoder" else self.module.spec.decoder
        assert stack is not None
        return stack

    @property
    def vocabulary(self) -> int:
        """Number of ids that the stack can read."""
        return self.stack.embedding.rows.num_rows

    @property
    def has_head(self) -> bool:
        """True if the head of the model reads the states of this stack."""
        return self.module.head is not None and (self.side == "decoder" or self.module.decoder is None)

    def row(self, index: int) -> Reader:
        """Return a reader for one row of the batch, with the padding of its memory removed."""
        if self.memory is None:
            return self
        memory = self.memory[index : index + 1]
        if self.memory_mask is not None:
            memory = memory[:, self.memory_mask[index]]
        return replace(self, memory=memory, memory_mask=None)

    def hidden_states(self, sequence: Sequence, cache: Cache | None = None) -> Tensor:
        """Run the stack and return its states [B, T, width]."""
        is_first = cache is None or cache.length == 0
        if cache is not None and is_first:
            cache.memory_mask = self.memory_mask
        mask = self.memory_mask if cache is None else cache.memory_mask
        states: Tensor = self.stack(sequence, self.memory if is_first else None, mask, cache)
        return states

    def outputs(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of the head for these states, or the states if no head reads them."""
        head = self.module.head
        return hidden if head is None or not self.has_head else head(hidden, mask)


@torch.no_grad()
def run(
    reader: Reader, sequence: Sequence, *, pieces: Many[int] | None = None, is_eager: bool = False, head: bool = True
) -> Trace:
    """Run a stack and return the captured values of all real tokens, in the order of the rows.

    Args:
        reader: the stack.
        sequence: its input.
        pieces: numbers of tokens per call, with a cache; None reads all tokens in one call, without a cache.
        is_eager: True computes attention by the eager kernel.
        head: True also runs the head.
    """
    watched = list(_list_addresses(reader))
    weights = [name for name in addresses(reader.stack) if name.endswith(".weights")] if is_eager else []
    with capture(reader.stack, [*watched, *weights]) as seen:
        hidden = reader.hidden_states(sequence) if pieces is None else _run_in_pieces(reader, sequence, pieces)
    trace: Trace = {}
    for address in watched:
        values: dict[int, list[Tensor]] = {}
        for record in seen[address]:
            values.setdefault(record.depth, []).append(_tokens_first(record.tensor))
        for depth, parts in values.items():
            trace[_make_point(reader, address, depth)] = torch.cat(parts, 1)
    last = len(reader.stack.order)
    trace[TracePoint(last, 0, 0, f"{reader.side} states")] = hidden
    if head and reader.has_head:
        outputs = reader.outputs(hidden, sequence.mask)
        if outputs.shape[:2] == hidden.shape[:2]:
            trace[TracePoint(last, 1, 0, "head")] = outputs
    return {point: select_real(trace[point], sequence.mask) for point in sorted(trace)}


def _list_addresses(reader: Reader) -> Iterator[str]:
    """Yield the addresses to compare in a stack, without cross-attention keys, which are computed once per source."""
    for address in addresses(reader.stack):
        owner, _, name = address.rpartition(".")
        submodule = reader.stack.get_submodule(owner)
        is_of_memory = isinstance(submodule, Attention) and submodule.spec.source == "memory"
        if _WATCHED.fullmatch(address) and not (is_of_memory and name == "keys"):
            yield address


def _make_point(reader: Reader, address: str, depth: int) -> TracePoint:
    step, whole = _STEP.search(address), f"{reader.side}.{address}"
    if step is None:
        return TracePoint(-1, 0, 0, whole)
    return TracePoint(depth, int(step[1]), _RANKS[address.rpartition(".")[2]], whole)


def _run_in_pieces(reader: Reader, sequence: Sequence, pieces: Many[int]) -> Tensor:
    cache, start, parts = Cache(total_length=sequence.total_length), 0, []
    for size in pieces:
        of_piece = slice(start, start + size)
        mask = None if sequence.mask is None else sequence.mask[:, of_piece]
        parts.append(reader.hidden_states(Sequence(sequence.ids[:, of_piece], mask), cache))
        start += size
    return torch.cat(parts, 1)


def _tokens_first(value: Tensor) -> Tensor:
    """Return a value as [B, T, features]; a value [B, heads, T, size] is transposed and flattened."""
    return value.transpose(1, 2).flatten(2) if value.dim() == 4 else value


def select_real(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values of the real tokens [N, features], row after row."""
    return value.flatten(0, 1) if mask is None else value[mask]


def concat_traces(traces: Many[Trace]) -> Trace:
    """Concatenate the traces of several rows."""
    return {point: torch.cat([trace[point] for trace in traces]) for point in traces[0]}
