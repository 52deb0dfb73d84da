"""The whole Transformer: an encoder, a decoder, or both, and a head.

Legend: B batch, M sentences, T tokens of the first stack, U tokens of the decoder, S memory keys, D width, V outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.attention import Attention
from clearhead.core.cache import Cache
from clearhead.core.embedding import Embedding, Table
from clearhead.core.head import Head, Linear
from clearhead.core.initialize import initialize
from clearhead.core.position import RelativeBuckets
from clearhead.core.rare.disentangled import Disentangled, DistanceTable
from clearhead.core.stack import Sequence, Stack
from clearhead.errors import InputError


@dataclass(frozen=True)
class Output:
    """What a call returns.

    Args:
        hidden: [batch, tokens, width], the last states of the stack that ran last; None where logits alone were asked.
        logits: [batch, tokens, outputs], or [batch, outputs] where the head pools; None where the model has no head or
            the call stops before it.
        memory: [batch, keys, width], what the encoder made; None where there is no encoder or it did not run.
    """

    hidden: Float[Tensor, "batch tokens width"]
    logits: Float[Tensor, "batch *tokens outputs"] | None = None
    memory: Float[Tensor, "sentences keys memory_width"] | None = None


class Transformer(nn.Module):
    """A Transformer of any of the three families, as its spec says.

    Raises:
        InputError: the spec is inconsistent; every fault is named.
    """

    def __init__(self, model: spec.Model) -> None:
        super().__init__()
        self.spec = spec.validate(model)
        self.encoder = Stack(model.encoder) if model.encoder else None
        memory_width = model.encoder.output_width if model.encoder else None
        self.decoder = Stack(model.decoder, memory_width) if model.decoder else None
        top = model.decoder or model.encoder
        assert top is not None
        self.head = Head(top.output_width, model.head) if model.head else None
        self._borrow()
        if next(self.parameters()).device.type != "meta":
            initialize(self, model.initialization)

    def forward(
        self,
        ids: Int[Tensor, "batch tokens"],
        target_ids: Int[Tensor, "targets target_tokens"] | None = None,
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        target_mask: Bool[Tensor, "targets target_tokens"] | None = None,
        segments: Int[Tensor, "batch tokens"] | None = None,
        positions: Int[Tensor, "batch tokens"] | None = None,
        documents: Int[Tensor, "batch tokens"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch tokens width"] | None = None,
        prefix: Bool[Tensor, "batch tokens"] | None = None,
        declared_length: int | Int[Tensor, " batch"] | None = None,
    ) -> Output:
        """Run the whole model.

        Args:
            ids: what the first stack reads.
            target_ids: what the decoder of a two-stack model reads, already shifted.
            mask: True = a real token of ids.
            target_mask: True = a real token of target_ids.
            segments, positions, documents, embeddings, prefix, declared_length: of the first stack; see `Sequence`.
            cache: of the decoder; it grows by the tokens of this call.

        Raises:
            InputError: target_ids are missing or not wanted, or a sequence is longer than the model's positions.
        """
        first = Sequence(ids, mask, segments, positions, documents, embeddings, prefix, declared_length)
        return self._with_logits(self._states(first, target_ids, target_mask, cache), self._top(first, target_mask))

    def states(
        self,
        ids: Int[Tensor, "batch tokens"],
        target_ids: Int[Tensor, "targets target_tokens"] | None = None,
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        target_mask: Bool[Tensor, "targets target_tokens"] | None = None,
        segments: Int[Tensor, "batch tokens"] | None = None,
        documents: Int[Tensor, "batch tokens"] | None = None,
        prefix: Bool[Tensor, "batch tokens"] | None = None,
    ) -> Output:
        """Run the stacks and stop before the head, for losses that never build all the logits."""
        first = Sequence(ids, mask, segments, documents=documents, prefix=prefix)
        return self._states(first, target_ids, target_mask, None)

    def encode(
        self,
        ids: Int[Tensor, "batch tokens"],
        *,
        mask: Bool[Tensor, "batch tokens"] | None = None,
        segments: Int[Tensor, "batch tokens"] | None = None,
        positions: Int[Tensor, "batch tokens"] | None = None,
        documents: Int[Tensor, "batch tokens"] | None = None,
        embeddings: Float[Tensor, "batch tokens width"] | None = None,
    ) -> Output:
        """Run the encoder; `memory` and `hidden` are its last states.

        Raises:
            InputError: the model has no encoder.
        """
        if self.encoder is None:
            raise InputError("encode() needs a model with an encoder; this one has only a decoder")
        memory = self.encoder(Sequence(ids, mask, segments, positions, documents, embeddings))
        return Output(memory, memory=memory)

    def decode(
        self,
        target_ids: Int[Tensor, "targets target_tokens"],
        memory: Float[Tensor, "sentences keys memory_width"] | None = None,
        *,
        memory_mask: Bool[Tensor, "sentences keys"] | None = None,
        target_mask: Bool[Tensor, "targets target_tokens"] | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Run the decoder and the head.

        Args:
            target_ids: already shifted; with a cache, only the tokens that it has not read.
            memory: what `encode` returned; with a cache it is needed in the first call only.
            memory_mask: True = a real token of the memory; kept by the cache as well.
            target_mask: True = a real token of target_ids.
            cache: grows by the tokens of this call; rows must be a multiple of the sentences.

        Raises:
            InputError: the model has no decoder, or the memory is missing or not wanted.
        """
        if self.decoder is None:
            raise InputError("decode() needs a model with a decoder; this one has only an encoder")
        if memory is not None and self.encoder is None:
            raise InputError("this model has no encoder, so no part of it could attend to a memory")
        sequence = Sequence(target_ids, target_mask)
        return self._with_logits(self._decode(sequence, memory, memory_mask, cache), target_mask)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that every stack has positions for; None: no limit."""
        limits = []
        for stack in (self.spec.encoder, self.spec.decoder):
            position = stack.embedding.position if stack else None
            if isinstance(position, spec.Learned):
                limits.append(position.rows - position.offset)
        return min(limits, default=None)

    @property
    def num_source_ids(self) -> int:
        """Rows of the table that the first stack reads."""
        first = self.encoder or self.decoder
        assert first is not None
        return first.embedding.rows.weight.shape[0]

    @property
    def num_target_ids(self) -> int:
        """Rows of the table that the last stack reads."""
        last = self.decoder or self.encoder
        assert last is not None
        return last.embedding.rows.weight.shape[0]

    def _states(
        self, first: Sequence, target_ids: Tensor | None, target_mask: Tensor | None, cache: Cache | None
    ) -> Output:
        if self.encoder is None or self.decoder is None:
            if target_ids is not None or target_mask is not None:
                raise InputError("target_ids are for a model with both stacks; this one reads ids alone")
            if self.encoder is None:
                return self._decode(first, None, None, cache)
            if cache is not None:
                raise InputError("a cache is for a decoder; this model has only an encoder")
            return Output(self.encoder(first))
        if target_ids is None:
            raise InputError("a model with encoder and decoder needs target_ids: what the decoder reads, shifted")
        memory = self.encoder(first)
        return self._decode(Sequence(target_ids, target_mask), memory, first.mask, cache)

    def _decode(
        self, sequence: Sequence, memory: Tensor | None, memory_mask: Tensor | None, cache: Cache | None
    ) -> Output:
        assert self.decoder is not None
        if memory_mask is not None and memory_mask.dtype != torch.bool:
            raise InputError(f"memory_mask must be boolean, True = a real token; got {memory_mask.dtype}")
        if memory is not None and sequence.ids.shape[0] % max(1, len(memory)):
            raise InputError(f"{len(sequence.ids)} target rows are no multiple of the {len(memory)} rows of memory")
        if cache is not None and memory is not None:
            cache.memory_mask = memory_mask
        elif cache is not None and cache.memory_attention:
            memory_mask = cache.memory_mask
        elif memory is None and self.encoder is not None:
            raise InputError("decode() needs the memory that encode() returned, unless its cache already holds it")
        return Output(self.decoder(sequence, memory, memory_mask, cache), memory=memory)

    def _top(self, first: Sequence, target_mask: Tensor | None) -> Tensor | None:
        """Return the mask of what the stack that runs last reads."""
        return target_mask if self.encoder is not None and self.decoder is not None else first.mask

    def _with_logits(self, output: Output, mask: Tensor | None) -> Output:
        if self.head is None:
            return output
        return Output(output.hidden, self.head(output.hidden, mask), output.memory)

    def _borrow(self) -> None:
        """Hand every borrower the table that its reference names."""
        for path, node in spec.walk(self.spec):
            if not isinstance(node, spec.Reference | spec.TableHeads):
                continue
            borrower = self.get_submodule(path.rpartition(".")[0])
            owner = self.get_submodule(node.path)
            if isinstance(borrower, Embedding | Linear):
                assert isinstance(owner, Table)
                borrower.borrowed = (owner,)
            elif isinstance(borrower, Disentangled):
                assert isinstance(owner, DistanceTable)
                borrower.borrowed = (owner,)
            else:
                assert isinstance(borrower, Attention) and isinstance(owner, RelativeBuckets)
                borrower.borrowed = (owner,)


def build(model: spec.Model, *, device: torch.device | str = "cpu") -> Transformer:
    """Build a model with fresh weights from torch's global generator.

    Args:
        model: what to build.
        device: where; on "meta" nothing is allocated and nothing drawn.

    Raises:
        InputError: the spec is inconsistent; every fault is named.
    """
    with torch.device(device):
        return Transformer(model)
