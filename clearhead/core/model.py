"""The whole Transformer: an encoder, a decoder, or both, and a head. Read `forward` first, then `stack`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import spec
from clearhead.base.arguments import check_tensor, check_types, explain_types
from clearhead.base.errors import InputError
from clearhead.base.hooks import HookPoints
from clearhead.base.printing import Printed
from clearhead.base.tied import Tied
from clearhead.core.context import Cache, Sequence
from clearhead.core.head import Head
from clearhead.core.initialize import initialize
from clearhead.core.shapes import Ids, Memory, Real, RealMemory, States
from clearhead.core.stack import Stack

TargetIds = Int[Tensor, "targets target_tokens"]
RealTarget = Bool[Tensor, "targets target_tokens"]


@dataclass(frozen=True, repr=False)
class Output(Printed):
    """Output of a model: hidden states, logits and encoder output."""

    hidden: States  # output of the last stack
    logits: Float[Tensor, "batch *tokens outputs"] | None = None  # no token axis if the head pools; None: no head ran
    memory: Memory | None = None  # the output of the encoder, for the decoder


@explain_types
class Transformer(HookPoints):
    """Encoder, decoder or encoder-decoder with an optional head; `build` makes it from a spec."""

    def __init__(self, model: spec.Model) -> None:
        super().__init__()
        self.spec: spec.Model = spec.validate(model)
        self.encoder: Stack | None = Stack(model.encoder) if model.encoder else None
        memory_width = model.encoder.width if model.encoder else None
        self.decoder: Stack | None = Stack(model.decoder, memory_width) if model.decoder else None
        top = model.decoder or model.encoder
        assert top is not None
        self.head: Head | None = Head(top.width, model.head) if model.head else None
        self.points: tuple[str, ...] = ("hidden", "logits") if model.head else ("hidden",)
        for path, node in spec.walk(model):
            if isinstance(node, spec.Reference):
                vars(self.get_submodule(path.rpartition(".")[0]))["tied"] = Tied(self.get_submodule(node.path))
        if next(self.parameters()).device.type != "meta":
            initialize(self, model.initialization)

    def forward(
        self, ids: Ids | Sequence, target_ids: TargetIds | Sequence | None = None, *, mask: Real | None = None,
        target_mask: RealTarget | None = None, segments: Ids | None = None, positions: Ids | None = None,
        documents: Ids | None = None, cache: Cache | None = None, embeddings: States | None = None, head: bool = True,
    ) -> Output:  # fmt: skip
        """Run encoder, decoder and head, and return hidden states and logits.

        Args:
            ids, segments, positions, documents, embeddings: input of the first stack; ids may be a `Sequence` of all.
            target_ids: decoder input of an encoder-decoder, already shifted right: ids or a `Sequence`.
            mask, target_mask: masks of ids and of target_ids, True = a real token.
            cache: KV cache of the decoder; it grows by the tokens of this call.
            head: False skips the head, for losses that never build all logits.

        Raises:
            InputError: target_ids are missing or not allowed, or a sequence is longer than the model's positions.
        """
        if target_ids is None and target_mask is not None:
            raise InputError("target_mask needs target_ids; pass the mask of ids as mask")
        if target_ids is not None and len(self._stacks) == 1:
            raise InputError("target_ids need a model with encoder and decoder; this one has one stack: pass ids alone")
        if target_ids is None and len(self._stacks) == 2:
            raise InputError("a model with encoder and decoder needs target_ids: the decoder's input, shifted right")
        source = ids if isinstance(ids, Sequence) else Sequence(ids, mask, segments, positions, documents, embeddings)
        if self.encoder is None:
            return self._decode(source, None, None, cache, head)
        if target_ids is not None:
            target = target_ids if isinstance(target_ids, Sequence) else Sequence(target_ids, target_mask)
            return self._decode(target, self.encoder(source), source.mask, cache, head)
        if cache is not None:
            raise InputError("a cache needs a decoder; this model has only an encoder: leave cache out")
        return self._finish(Output(self.point("hidden", self.encoder(source))), source.mask, head)

    def encode(
        self, ids: Ids, *, mask: Real | None = None, segments: Ids | None = None, positions: Ids | None = None,
        documents: Ids | None = None, embeddings: States | None = None,
    ) -> Output:  # fmt: skip
        """Run the encoder; its last states are both `memory` and `hidden` of the returned `Output`.

        Raises:
            InputError: the model has no encoder.
        """
        if self.encoder is None:
            raise InputError("encode() needs a model with an encoder; this one has only a decoder: use decode()")
        memory = self.encoder(Sequence(ids, mask, segments, positions, documents, embeddings))
        return Output(memory, memory=memory)

    def decode(
        self, target_ids: TargetIds, memory: Memory | None = None, *, memory_mask: RealMemory | None = None,
        target_mask: RealTarget | None = None, cache: Cache | None = None,
    ) -> Output:  # fmt: skip
        """Run the decoder and the head on target ids, with the memory from `encode`.

        Args:
            target_ids: ids, shifted right, equally many rows per source sentence; with a cache, only new tokens.
            memory: encoder output from `encode`; with a cache, memory and its mask are needed in the first call only.
            memory_mask, target_mask: masks of the memory and of target_ids, True = a real token.
            cache: KV cache; it grows by the tokens of this call.

        Raises:
            InputError: the model has no decoder, or the memory is missing or not allowed.
        """
        if self.decoder is None:
            raise InputError("decode() needs a model with a decoder; this one has only an encoder: use encode()")
        if memory is not None and self.encoder is None:
            raise InputError("memory needs a model with an encoder; this one has only a decoder: leave memory out")
        return self._decode(Sequence(target_ids, target_mask), memory, memory_mask, cache, head=True)

    @property
    def max_positions(self) -> int | None:
        """Maximum sequence length in tokens, limited by trained position tables; None means no limit."""
        positions = [stack.embedding.position for stack in (self.spec.encoder, self.spec.decoder) if stack]
        return min((table.rows - table.offset for table in positions if isinstance(table, spec.Learned)), default=None)

    @property
    def num_source_ids(self) -> int:
        """Number of token ids that the first stack can read (rows of its embedding table)."""
        return self._stacks[0].embedding.rows.num_rows

    @property
    def num_target_ids(self) -> int:
        """Number of token ids that the last stack can read (rows of its embedding table)."""
        return self._stacks[-1].embedding.rows.num_rows

    @property
    def _stacks(self) -> list[Stack]:
        return [stack for stack in (self.encoder, self.decoder) if stack is not None]

    def _decode(
        self, sequence: Sequence, memory: Tensor | None, memory_mask: Tensor | None, cache: Cache | None, head: bool
    ) -> Output:
        assert self.decoder is not None
        check_tensor("memory_mask", memory_mask, "mask", ["sentences tokens"], {})
        if memory is not None and len(sequence.ids) % max(1, len(memory)):
            raise InputError(f"{len(sequence.ids)} target rows must be a multiple of the {len(memory)} rows of memory")
        if cache is not None and memory is not None:
            cache.memory_mask = memory_mask
        elif cache is not None and cache.memory_attention:
            memory_mask = cache.memory_mask
        elif memory is None and self.encoder is not None:
            raise InputError("decode() needs the memory that encode() returned, unless its cache already holds it")
        hidden = self.decoder(sequence, memory, memory_mask, cache)
        return self._finish(Output(self.point("hidden", hidden), memory=memory), sequence.mask, head)

    def _finish(self, output: Output, mask: Tensor | None, head: bool) -> Output:
        if self.head is None or not head:
            return output
        return Output(output.hidden, self.point("logits", self.head(output.hidden, mask)), output.memory)


@check_types
def build(model: spec.Model, *, device: torch.device | str = "cpu") -> Transformer:
    """Build a model and draw its weights from torch's global generator; on "meta", no weights are allocated or drawn.

    Raises:
        InputError: the spec is inconsistent; the message names every fault.
    """
    with torch.device(device):
        return Transformer(model)
