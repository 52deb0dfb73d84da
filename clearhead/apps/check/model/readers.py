"""A stack of a model, run and watched in one way for all families.

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
    """Where a value is: places in their order are those of the computation.

    Args:
        depth: how many layers ran before; -1 for the embeddings, and one more than there are for the outputs.
        step: of the layer.
        rank: within the step.
        address: of the activation.
    """

    depth: int
    step: int
    rank: int
    address: str


Trace = dict[TracePoint, Tensor]
"""Values by their places, in order; the axes are rows, tokens and features, or tokens of all rows and features."""


@dataclass(frozen=True)
class Reader:
    """One stack of a model, and what its decoder attends to.

    Args:
        module: the model.
        side: which stack.
        memory: of the decoder of two stacks [B, S, width].
        memory_mask: True = a real token.
    """

    module: Transformer
    side: Side
    memory: Tensor | None = None
    memory_mask: Tensor | None = None

    @classmethod
    def of(cls, module: Transformer, side: Side, source: Sequence | None = None) -> Reader:
        """Return a reader whose memory the encoder makes of a source, where there are two stacks."""
        if side == "encoder" or module.encoder is None:
            return cls(module, side)
        assert source is not None
        with torch.no_grad():
            return cls(module, side, module.encoder(source), source.mask)

    @property
    def stack(self) -> Stack:
        """The stack."""
        stack = self.module.encoder if self.side == "encoder" else self.module.decoder
        assert stack is not None
        return stack

    @property
    def spec(self) -> spec.Stack:
        """What the stack is."""
        stack = self.module.spec.encoder if self.side == "encoder" else self.module.spec.decoder
        assert stack is not None
        return stack

    @property
    def vocabulary(self) -> int:
        """How many ids it reads."""
        return self.stack.embedding.rows.num_rows

    @property
    def has_head(self) -> bool:
        """Whether the head of the model reads its states."""
        return self.module.head is not None and (self.side == "decoder" or self.module.decoder is None)

    def row(self, index: int) -> Reader:
        """Return a reader for one row alone, whose memory has no padding."""
        if self.memory is None:
            return self
        memory = self.memory[index : index + 1]
        if self.memory_mask is not None:
            memory = memory[:, self.memory_mask[index]]
        return replace(self, memory=memory, memory_mask=None)

    def hidden_states(self, sequence: Sequence, cache: Cache | None = None) -> Tensor:
        """Return the states [B, T, width]."""
        is_first = cache is None or cache.length == 0
        if cache is not None and is_first:
            cache.memory_mask = self.memory_mask
        mask = self.memory_mask if cache is None else cache.memory_mask
        states: Tensor = self.stack(sequence, self.memory if is_first else None, mask, cache)
        return states

    def outputs(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the model returns for these states: those of its head, or the states themselves."""
        head = self.module.head
        return hidden if head is None or not self.has_head else head(hidden, mask)


@torch.no_grad()
def run(
    reader: Reader, sequence: Sequence, *, pieces: Many[int] | None = None, is_eager: bool = False, head: bool = True
) -> Trace:
    """Run a stack and return the values on the way, of real tokens in the order of rows.

    Args:
        reader: the stack.
        sequence: what it reads.
        pieces: numbers of tokens, which it reads one after the other with a cache; None: all at once, without one.
        is_eager: attention is computed by the eager kernel.
        head: whether the head runs too.
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
    """Yield the addresses within a stack that are compared; keys of a memory are made once for all tokens."""
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
    """Return [B, T, features] of a value, which may have its heads in front of the tokens."""
    return value.transpose(1, 2).flatten(2) if value.dim() == 4 else value


def select_real(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values of real tokens [N, features], those of one row after the other."""
    return value.flatten(0, 1) if mask is None else value[mask]


def concat_traces(traces: Many[Trace]) -> Trace:
    """Return the traces of several rows as one."""
    return {point: torch.cat([trace[point] for trace in traces]) for point in traces[0]}
