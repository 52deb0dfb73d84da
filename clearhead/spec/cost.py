"""Cost of a model, computed from its spec: FLOPs of all matrix products, and memory of the KV cache.

One multiplication and one addition count as 2 FLOPs. d is the width, and F the inner size of a feed-forward network. H
is the number of query heads and K that of key/value heads, each of size E. The forward pass takes these FLOPs.

    self-attention     4 d E (H + K)      per token, and 4 H E per pair of a query and a key.
    disentangled       4 H E S            per token and term, S the span; the projection of the table is left out.
    memory attention   4 d H E            per decoder token, 4 d_encoder K E per encoder token, 4 H E per pair.
    feed-forward       4 d F              per token, or 6 d F with a gate.
    mixture            2 d N + k times a feed-forward network, per token; N experts, k of them per token.
    embedding          2 e d              per token, if rows of size e are projected to the width.
    head               2 d V              per output, V its size.
    custom modules     the cost that their spec declares, or a measured one.

The backward pass takes twice as much, for the gradients of both factors. Padding is not counted. Norms, activations and
softmax are not counted either; they are a few percent.

Source: arXiv 2001.08361, section 2.1; arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from clearhead.spec.model import Model
from clearhead.spec.nodes import (
    Attention,
    Causal,
    FeedForward,
    Full,
    Function,
    Linear,
    Mask,
    MixtureOfExperts,
    Pool,
    Stack,
    Window,
)
from clearhead.spec.positions import Disentangled, DistanceTable
from clearhead.spec.registry import Part, kind_of
from clearhead.spec.token_counts import TokenCounts

Number = int | float
PairCount = Callable[[Mask], Number]
FORWARD_AND_BACKWARD = 3
FP32_BYTES = 4
# Values per parameter in the state of an Adam-like optimizer: two moments of the gradient.
OPTIMIZER_SLOTS = 2
# Bytes per trained parameter: the weight, its gradient and the optimizer's values, in fp32.
TRAINING_BYTES = (2 + OPTIMIZER_SLOTS) * FP32_BYTES


@dataclass(frozen=True)
class Cost:
    """Cost of the forward pass per token: FLOPs, and numbers in the KV cache.

    Attributes:
        source_flops: FLOPs per token of the encoder, including the decoder's keys and values of its output.
        target_flops: FLOPs per token of the decoder, or of the only stack, including the head.
        cache_numbers: numbers in the KV cache per target token.
        memory_numbers: numbers in the KV cache per source token.
    """

    source_flops: Number
    target_flops: Number
    cache_numbers: int
    memory_numbers: int


def cost_per_token(model: Model, source_length: int, target_length: int) -> Cost:
    """Return the cost per token in sequences of the given lengths, counting only pairs that the masks allow.

    Args:
        model: a spec with one or two stacks.
        source_length: the number of tokens that the encoder reads.
        target_length: the number of tokens that the decoder reads.
    """
    first_length = target_length if model.encoder is None else source_length
    counts = TokenCounts(first_tokens=1, second_tokens=1, memory_pairs=source_length, outputs=1, sequences=1)
    first, rest = _flops(
        model, counts, partial(_attended_positions, first_length), partial(_attended_positions, target_length)
    )
    if model.encoder is None or model.decoder is None:
        first, rest = 0, first + rest
    return Cost(first, rest, _cache_numbers(model, "self"), _cache_numbers(model, "memory"))


def training_flops(model: Model, counts: TokenCounts) -> Number:
    """Return the FLOPs of the forward and backward pass over the sequences that `counts` describes."""
    return FORWARD_AND_BACKWARD * forward_flops(model, counts)


def forward_flops(model: Model, counts: TokenCounts) -> Number:
    """Return the FLOPs of a forward pass with the given counts, masked query-key pairs included: they are computed too.

    Args:
        model: a spec with one or two stacks.
        counts: the numbers of tokens, query-key pairs and outputs.
    """
    return sum(_flops(model, counts, lambda _: counts.first_pairs, lambda _: counts.second_pairs))


def _flops(model: Model, counts: TokenCounts, first_pairs: PairCount, second_pairs: PairCount) -> tuple[Number, Number]:
    """Return two numbers: the FLOPs of the first stack, and those of the second stack with the head."""
    first_stack, last_stack = model.encoder or model.decoder, model.decoder or model.encoder
    if first_stack is None or last_stack is None:
        return 0, 0
    first = _stack_flops(first_stack, counts.first_tokens, first_pairs)
    if first_stack is last_stack:
        return first, _head_flops(model, last_stack, counts, counts.first_tokens)
    first += counts.first_tokens * 2 * first_stack.width * _cache_numbers(model, "memory")
    second = _stack_flops(last_stack, counts.second_tokens, second_pairs, counts.memory_pairs)
    return first, second + _head_flops(model, last_stack, counts, counts.second_tokens)


def _stack_flops(stack: Stack, tokens: Number, pairs: PairCount, memory_pairs: Number = 0) -> Number:
    """Return the FLOPs of a stack, without the keys and values that it computes from the encoder's output."""
    total: Number = 0
    if stack.embedding.projection is not None:
        total += tokens * 2 * stack.table_width * stack.width
    for function in _functions(stack):
        match function:
            case FeedForward():
                total += tokens * _feed_forward_flops(function, stack.width)
            case MixtureOfExperts():
                router = 2 * stack.width * function.count
                total += tokens * (router + function.top_k * _feed_forward_flops(function.expert, stack.width))
            case Part():
                for_token, for_pair = kind_of(function).flops(function, stack.width)
                total += tokens * for_token + pairs(Full()) * for_pair
            case Attention(source="memory"):
                total += 4 * function.num_heads * function.head_size * (tokens * stack.width + memory_pairs)
            case Attention():
                heads = function.num_heads + function.num_kv_heads
                total += tokens * 4 * stack.width * function.head_size * heads
                total += pairs(function.mask) * 4 * function.num_heads * function.head_size
                for step in (function.score_step, function.weight_step):
                    if step is not None:
                        total += pairs(function.mask) * kind_of(step).flops(step, function.num_heads)[1]
                if isinstance(function.score_bias, Disentangled) and isinstance(stack.score_table, DistanceTable):
                    terms = len(function.score_bias.terms) * stack.score_table.span
                    total += tokens * 4 * function.num_heads * function.head_size * terms
    return total


def _functions(stack: Stack) -> list[Function]:
    return [branch.function for layer in stack.depths for step in layer.steps for branch in step.branches]


def _feed_forward_flops(function: FeedForward, width: int) -> int:
    return 2 * width * function.size * (3 if function.gated else 2)


def _cache_numbers(model: Model, source: Literal["self", "memory"]) -> int:
    """Return the numbers per token in the decoder's KV cache of self-attention or of cross-attention ("memory")."""
    if model.decoder is None:
        return 0
    functions, width = _functions(model.decoder), model.decoder.width
    attentions = [node for node in functions if isinstance(node, Attention) and node.source == source]
    parts = [node for node in functions if isinstance(node, Part) and source == "self"]
    extension_numbers = sum(kind_of(node).cache_numbers(node, width) for node in parts)
    return extension_numbers + sum(2 * node.num_kv_heads * node.head_size for node in attentions)


def _attended_positions(length: int, mask: Mask) -> int:
    """Return the mean number of positions that a query attends to."""
    if isinstance(mask, Causal):
        return (length + 1) // 2
    if isinstance(mask, Window):
        return min(length, mask.before + mask.after + 1)
    return length


def _head_flops(model: Model, stack: Stack, counts: TokenCounts, tokens: Number) -> Number:
    """Return the FLOPs of the head.

    Layers before a pool run at all positions, layers after it once per sequence. Without a pool, all layers run at the
    labelled positions.
    """
    layers = model.head.layers if model.head is not None else ()
    rows = tokens if any(isinstance(layer, Pool) for layer in layers) else counts.outputs
    total: Number = 0
    width = stack.width
    for layer in layers:
        if isinstance(layer, Pool):
            rows, width = counts.sequences, width * len(layer.modes)
        elif isinstance(layer, Linear):
            total += rows * 2 * width * layer.size
            width = layer.size
    return total
