"""What training costs, read off a spec: the floating-point operations of all matrix products, forward and backward.

One multiplication and one addition are 2 FLOPs. For d the width, H query heads and K key/value heads of size E, and F
the inner size of a feed-forward network, the forward pass takes

    self-attention     2 d E (2 H + 2 K)  for a token, and 4 H E for a pair of a query and a key
    disentangled       4 H E S            for a token and a term, S the span; the table is projected once and left out
    memory attention   4 d H E            for a decoder token, 4 d_encoder K E for an encoder token, 4 H E for a pair
    feed-forward       4 d F              for a token, or 6 d F with a gate
    mixture            2 d N + k times a feed-forward network, for a token; N experts, of which it passes through k
    embedding          2 e d              for a token, where rows of size e are projected to the width
    head               2 d V              for an output, V its size

and the backward pass twice as much, for the gradients of both factors. Pairs that a causal mask or a window hides are
counted, for they are computed and then hidden; padding is not counted, and neither are norms, activations and softmax,
which are a few percent. Source: arXiv 2001.08361, section 2.1; arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.spec import (
    Attention,
    Disentangled,
    DistanceTable,
    FeedForward,
    Function,
    Linear,
    MixtureOfExperts,
    Model,
    Pool,
    Stack,
)
from clearhead.spec.token_counts import TokenCounts

FORWARD_AND_BACKWARD = 3


def training_flops(model: Model, work: TokenCounts) -> int | float:
    """Return the FLOPs of training a model on some text, forward and backward."""
    return FORWARD_AND_BACKWARD * forward_flops(model, work)


def forward_flops(model: Model, work: TokenCounts) -> int | float:
    """Return the FLOPs of one forward pass over some text.

    Args:
        model: a spec with one stack or two.
        work: how many tokens, pairs and outputs there are.
    """
    encoder, decoder = model.encoder, model.decoder
    total: int | float = 0
    if encoder is not None:
        total += _stack_flops(encoder, work.first_tokens, work.first_pairs)
    if decoder is not None and encoder is None:
        total += _stack_flops(decoder, work.first_tokens, work.first_pairs)
    if decoder is not None and encoder is not None:
        total += _stack_flops(decoder, work.second_tokens, work.second_pairs)
        for function in _functions(decoder):
            if isinstance(function, Attention) and function.source == "memory":
                total += _memory_flops(function, decoder.width, encoder.output_width, work)
    return total + _head_flops(model, work)


def _functions(stack: Stack) -> Iterator[Function]:
    for layer in stack.depths:
        for step in layer.steps:
            yield from (branch.function for branch in step.branches)


def _stack_flops(stack: Stack, tokens: int | float, pairs: int | float) -> int | float:
    """Return what a stack takes for its own text, without its attention to the memory."""
    total: int | float = 0
    if stack.embedding.projection is not None:
        total += tokens * 2 * stack.table_width * stack.width
    if stack.projection_out is not None:
        total += tokens * 2 * stack.width * stack.output_width
    for function in _functions(stack):
        match function:
            case FeedForward():
                total += tokens * _feed_forward_flops(function, stack.width)
            case MixtureOfExperts():
                router = 2 * stack.width * function.count
                total += tokens * (router + function.top_k * _feed_forward_flops(function.expert, stack.width))
            case Attention() if function.source == "self":
                heads = 2 * function.num_heads + 2 * function.num_kv_heads
                total += tokens * 2 * stack.width * function.head_size * heads
                total += pairs * 4 * function.num_heads * function.head_size
                if isinstance(function.score_bias, Disentangled) and isinstance(stack.score_table, DistanceTable):
                    terms = len(function.score_bias.terms) * stack.score_table.span
                    total += tokens * 4 * function.num_heads * function.head_size * terms
            case Attention():
                pass
    return total


def _feed_forward_flops(function: FeedForward, width: int) -> int:
    return 2 * width * function.size * (3 if function.gated else 2)


def _memory_flops(attention: Attention, width: int, memory_width: int, work: TokenCounts) -> int | float:
    inner, key_value = attention.num_heads * attention.head_size, attention.num_kv_heads * attention.head_size
    return (
        work.second_tokens * 4 * width * inner
        + work.first_tokens * 4 * memory_width * key_value
        + work.memory_pairs * 4 * inner
    )


def _head_flops(model: Model, work: TokenCounts) -> int | float:
    """Return what the head takes: at the positions that have a label, or before a pool at all of them."""
    top = model.decoder or model.encoder
    if model.head is None or top is None:
        return 0
    has_pool = any(isinstance(layer, Pool) for layer in model.head.layers)
    all_tokens = work.second_tokens if model.encoder is not None and model.decoder is not None else work.first_tokens
    rows, width = (all_tokens if has_pool else work.outputs), top.output_width
    total: int | float = 0
    for layer in model.head.layers:
        if isinstance(layer, Pool):
            rows = work.sequences
        elif isinstance(layer, Linear):
            total += rows * 2 * width * layer.size
            width = layer.size
    return total
