"""Record queries, keys and values of every attention at every depth, while a model runs once.

Attention weights are not stored but recomputed for the requested heads and queries. So memory grows with the number of
tokens, not with its square, and the model runs with the fused kernel.

Legend: B batch, T queries, S keys, H heads, K key/value heads, E head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.core import Sequence as Read
from clearhead.core import Transformer
from clearhead.core.attention import Attention, attention_weights, weigh_by_step
from clearhead.core.context import Context
from clearhead.fast.replica import replica
from clearhead.interpret.maps.hook_points import capture, edit
from clearhead.interpret.view.explorer.data import StackName

ALL = slice(None)
_STEPS = ("scores", "weights")
STACKS: tuple[StackName, ...] = ("encoder.self", "decoder.self", "decoder.memory")


@dataclass(frozen=True)
class AttentionRecord:
    """Queries, keys, values and context of one attention module, recorded while a model ran at one depth.

    Args:
        address: address of the attention module.
        attention: attention module.
        context: context that it shared with the other attentions of its stack: positions, masks and depth.
        query_BHTE, key_BKSE, value_BKSE: queries, keys and values after norms and rotation, not copied.
    """

    address: str
    attention: Attention
    context: Context
    query_BHTE: Float[Tensor, "batch heads queries head_size"]
    key_BKSE: Float[Tensor, "batch kv_heads keys head_size"]
    value_BKSE: Float[Tensor, "batch kv_heads keys head_size"]

    @property
    def stack(self) -> str:
        """Name of the attention's stack and source ("self" or "memory"), such as "decoder.memory"."""
        return f"{self.address.partition('.')[0]}.{self.attention.spec.source}"

    @property
    def layer(self) -> int:
        """Depth of the attention: number of layers of its stack that ran before."""
        return self.context.depth

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.query_BHTE.shape[1]

    @property
    def is_only_causal(self) -> bool:
        """Return whether each query sees exactly the keys up to its position, so later tokens never change it."""
        return self.context.masking.is_only_causal(self.attention.spec.mask) and not self.needs_all_heads

    def beginning(self, count: int) -> AttentionRecord:
        """Return the record of the first tokens of a causal attention; its weights equal those in the longer text.

        Args:
            count: number of tokens.
        """
        masking = replace(self.context.masking, num_queries=count, num_keys=count)
        positions = {name: getattr(self.context, name)[:, :count] for name in ("query_position", "key_position")}
        return replace(
            self,
            context=replace(self.context, masking=masking, **positions, masks={}, shared={}),
            query_BHTE=self.query_BHTE[:, :, :count],
            key_BKSE=self.key_BKSE[:, :, :count],
            value_BKSE=self.value_BKSE[:, :, :count],
        )

    def kv_head(self, head: int) -> int:
        """Return the key/value head of a query head."""
        return head * self.key_BKSE.shape[1] // self.num_heads

    @torch.no_grad()
    def mask(self, queries: slice = ALL) -> Bool[Tensor, "#batch #heads #queries keys"] | None:
        """Return the mask of some queries, True = may attend; None if they may attend to every key."""
        return self.attention.mask(self._context(queries))

    @torch.no_grad()
    def bias(self, queries: slice = ALL) -> Float[Tensor, "#batch heads queries keys"] | None:
        """Return the score bias of some queries; None if there is no bias."""
        return self.attention.bias(self.query_BHTE[:, :, queries], self.key_BKSE, self._context(queries))

    @torch.no_grad()
    def scores(
        self, heads: Sequence[int] | None = None, queries: slice = ALL
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return the scores before the softmax, -inf where the mask is False.

        Args:
            heads: heads to compute. None means all.
            queries: slice of the queries; all by default.
        """
        return self._scores(heads, queries, self._context(queries))

    @torch.no_grad()
    def weights(
        self, heads: Sequence[int] | None = None, queries: slice = ALL
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return the attention weights in float32, as the eager kernel computes them.

        Args:
            heads: heads to compute. None means all.
            queries: slice of the queries; all by default.
        """
        return self.weights_and_mask(heads, queries)[0]

    @torch.no_grad()
    def weights_and_mask(
        self, heads: Sequence[int] | None = None, queries: slice = ALL
    ) -> tuple[Float[Tensor, "batch heads queries keys"], Bool[Tensor, "#batch #heads #queries keys"] | None]:
        """Return the weights and the mask of some queries; builds the mask only once. See `weights` and `mask`."""
        attention, context = self.attention, self._context(queries)
        mask, computed = attention.mask(context), None if self.needs_all_heads else heads
        if type(attention).weights is not Attention.weights:
            query, key = self.query_BHTE[:, :, queries], self.key_BKSE
            weights = attention.weights(query, key, attention.bias(query, key, context), context)
        elif attention.weight_step is not None:
            weights = weigh_by_step(attention.weight_step, self._scores(None, queries, context), mask, context)
        else:
            sink = attention.sink if attention.sink is None or computed is None else attention.sink[list(computed)]
            weights = attention_weights(self._scores(computed, queries, context), mask, sink)
        return (weights if heads is None or computed is not None else weights[:, list(heads)]).float(), mask

    def _scores(self, heads: Sequence[int] | None, queries: slice, context: Context) -> Tensor:
        query, key = self.query_BHTE[:, :, queries], self.key_BKSE
        bias = self.attention.bias(query, key, context)
        if self.needs_all_heads:
            scores = self.attention.scores(query, key, bias, context)
            return scores if heads is None else scores[:, list(heads)]
        if heads is not None:
            query, key = query[:, list(heads)], key[:, [self.kv_head(head) for head in heads]]
            bias = None if bias is None else bias[:, list(heads)]
        return self.attention.scores(query, key, bias, context)

    @property
    def needs_all_heads(self) -> bool:
        """Return whether custom code computes scores or weights, so that one head may depend on other heads."""
        has_step = self.attention.score_step is not None or self.attention.weight_step is not None
        return has_step or any(getattr(type(self.attention), name) is not getattr(Attention, name) for name in _STEPS)

    def _context(self, queries: slice) -> Context:
        """Return the context of some queries, without cached masks, so that no mask stays in memory."""
        context = self.context
        masking = replace(context.masking, rows=queries)
        return replace(context, masking=masking, query_position=context.query_position[:, queries], masks={}, shared={})


class _StopRun(Exception):
    """Exception that ends a run of the model early, after the needed attention has been recorded."""


def record_first_layer(module: Transformer, source: Read) -> list[AttentionRecord]:
    """Return the self-attention of the first layer of the first stack, without running the layers above it.

    Args:
        module: model, of which a replica runs in evaluation mode.
        source: input of the first stack.
    """
    module = replica(module)
    first = next(path for path, child in module.named_modules() if isinstance(child, Attention))

    def stop(_: Tensor) -> Tensor:
        raise _StopRun

    with torch.no_grad(), recording(module) as records, suppress(_StopRun), edit(module, {f"{first}.values": stop}):
        module(source, head=False)
    return records


def record_run(module: Transformer, source: Read, target: Read | None) -> list[AttentionRecord]:
    """Run a model once and return its recorded attentions, stack by stack, lowest layer first.

    Args:
        module: model, of which a replica runs in evaluation mode.
        source: input of the first stack.
        target: input of the decoder of a two-stack model. None means one stack.
    """
    return record_states(module, source, target)[0]


def record_states(
    module: Transformer, source: Read, target: Read | None
) -> tuple[list[AttentionRecord], Float[Tensor, "batch tokens width"]]:
    """Run a model once and return its recorded attentions and its last hidden states; arguments: see `record_run`."""
    # Without the head: the logits of a long text would need more memory than everything else.
    module = replica(module)
    with torch.no_grad(), recording(module) as records:
        hidden: Tensor = module(source, target, head=False).hidden
    return records, hidden


@contextmanager
def recording(module: nn.Module) -> Iterator[list[AttentionRecord]]:
    """Return a context manager that records every attention of a model, which runs once within it.

    Args:
        module: model.

    Returns:
        A list that is filled when the context manager ends: the records of each stack, lowest layer first.
    """
    attentions = {path: child for path, child in module.named_modules() if isinstance(child, Attention)}
    if not attentions:
        raise InputError("this model has no attention, so it has no attention maps: use capture to see its activations")
    contexts: dict[str, list[Context]] = defaultdict(list)
    records: list[AttentionRecord] = []

    def keep(path: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        # A copy, since the stack changes the depth while it runs.
        contexts[path].append(replace(arguments[1], masks={}, shared={}))

    points = [f"{path}.{point}" for path in attentions for point in ("queries", "keys", "values")]
    with ExitStack() as blocks:
        seen = blocks.enter_context(capture(module, points))
        for path, attention in attentions.items():
            hook = attention.register_forward_pre_hook(partial(keep, path))
            blocks.callback(hook.remove)
        yield records
    for path, attention in attentions.items():
        tensors = [[record.tensor for record in seen[f"{path}.{point}"]] for point in ("queries", "keys", "values")]
        for context, query, key, value in zip(contexts[path], *tensors, strict=True):
            records.append(AttentionRecord(path, attention, context, query, key, value))
    records.sort(key=lambda record: (STACKS.index(record.stack), record.layer))
