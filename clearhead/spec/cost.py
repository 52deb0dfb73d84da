"""The cost of a model, from its spec: floating-point operations of all matrix products, and cache memory.

One multiplication and one addition are 2 FLOPs. For d the width, H query heads and K key/value heads of size E, and F
the inner size of a feed-forward network, the forward pass takes

    self-attention     4 d E (H + K)      for a token, and 4 H E for a pair of a query and a key
    disentangled       4 H E S            for a token and a term, S the span; the table is projected once and left out
    memory attention   4 d H E            for a decoder token, 4 d_encoder K E for an encoder token, 4 H E for a pair
    feed-forward       4 d F              for a token, or 6 d F with a gate
    mixture            2 d N + k times a feed-forward network, for a token; N experts, of which it passes through k
    embedding          2 e d              for a token, where rows of size e are projected to the width
    head               2 d V              for an output, V its size
    own parts          as their spec says, or as measured

and the backward pass twice as much, for the gradients of both factors. Padding is not counted, and neither are norms,
activations and softmax, which are a few percent. Source: arXiv 2001.08361, section 2.1; arXiv 2204.02311, appendix B.
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
# Values that an optimizer of the Adam family keeps for each parameter: two moments of the gradient.
OPTIMIZER_SLOTS = 2
# Of each parameter that is trained: the weight, its gradient and the optimizer's values, in fp32.
TRAINING_BYTES = (2 + OPTIMIZER_SLOTS) * FP32_BYTES


@dataclass(frozen=True)
class Cost:
    """The cost of the forward pass for one token.

    Attributes:
        source_flops: for each token of the encoder, the memory's keys and values in the decoder included.
        target_flops: for each token of the decoder or of the only stack, the head included.
        cache_numbers: numbers kept for each target token while decoding.
        memory_numbers: numbers kept for each source token while decoding.
    """

    source_flops: Number
    target_flops: Number
    cache_numbers: int
    memory_numbers: int


def cost_per_token(model: Model, source_length: int, target_length: int) -> Cost:
    """Return the cost of one token in sequences of these lengths; only pairs that a mask allows are counted.

    Args:
        model: a spec with one stack or two.
        source_length: tokens of the encoder.
        target_length: tokens of the decoder.
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
    """Return the FLOPs of training a model on some text, forward and backward."""
    return FORWARD_AND_BACKWARD * forward_flops(model, counts)


def forward_flops(model: Model, counts: TokenCounts) -> Number:
    """Return the FLOPs of one forward pass over some text; pairs that a mask hides are computed, and so counted.

    Args:
        model: a spec with one stack or two.
        counts: how many tokens, pairs and outputs there are.
    """
    return sum(_flops(model, counts, lambda _: counts.first_pairs, lambda _: counts.second_pairs))


def _flops(model: Model, counts: TokenCounts, first_pairs: PairCount, second_pairs: PairCount) -> tuple[Number, Number]:
    """Return the FLOPs of the first stack, and those of the second stack and the head."""
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
    """Return the FLOPs of a stack, without the keys and values of its memory."""
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
    """Return how many numbers of keys and values the decoder keeps for a token."""
    if model.decoder is None:
        return 0
    functions, width = _functions(model.decoder), model.decoder.width
    attentions = [node for node in functions if isinstance(node, Attention) and node.source == source]
    parts = [node for node in functions if isinstance(node, Part) and source == "self"]
    extension_numbers = sum(kind_of(node).cache_numbers(node, width) for node in parts)
    return extension_numbers + sum(2 * node.num_kv_heads * node.head_size for node in attentions)


def _attended_positions(length: int, mask: Mask) -> int:
    """Return how many positions a query attends to, on average."""
    if isinstance(mask, Causal):
        return (length + 1) // 2
    if isinstance(mask, Window):
        return min(length, mask.before + mask.after + 1)
    return length


def _head_flops(model: Model, stack: Stack, counts: TokenCounts, tokens: Number) -> Number:
    """Return the FLOPs of the head: for the positions that have a label, or before a pool for all."""
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
