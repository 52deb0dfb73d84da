"""What a model costs, read off its spec: arithmetic and cache memory for each token.

One multiplication and one addition are 2 FLOPs. Norms, activations and softmax are left out: they are a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.spec import (
    Attention,
    Causal,
    Disentangled,
    DistanceTable,
    FeedForward,
    Function,
    Linear,
    Mask,
    MixtureOfExperts,
    Model,
    Stack,
    Window,
)


@dataclass(frozen=True)
class Cost:
    """The forward pass for one token.

    Attributes:
        source_flops: for each token of the encoder, the memory's keys and values in the decoder included.
        target_flops: for each token of the decoder or of the only stack, the head included.
        cache_numbers: numbers kept for each target token while decoding.
        memory_numbers: numbers kept for each source token while decoding.
    """

    source_flops: int
    target_flops: int
    cache_numbers: int
    memory_numbers: int


def cost_per_token(spec: Model, source_length: int, target_length: int) -> Cost:
    """Return the cost of one token in sequences of these lengths.

    Args:
        spec: the model.
        source_length: tokens on the encoder's side, which attention runs over.
        target_length: tokens on the decoder's side.
    """
    decoder = _functions(spec.decoder)
    source = _stack_flops(spec.encoder, source_length, 0) if spec.encoder else 0
    target = _stack_flops(spec.decoder, target_length, source_length) if spec.decoder else 0
    memory = [function for function in decoder if isinstance(function, Attention) and function.source == "memory"]
    if spec.encoder is not None:
        source += sum(2 * spec.encoder.output_width * _key_value_size(function) for function in memory)
    head = _head_flops(spec)
    only_encoder = spec.decoder is None
    own = [function for function in decoder if isinstance(function, Attention) and function.source == "self"]
    return Cost(
        source_flops=0 if only_encoder else source,
        target_flops=(source if only_encoder else target) + head,
        cache_numbers=sum(_key_value_size(function) for function in own),
        memory_numbers=sum(_key_value_size(function) for function in memory),
    )


def _functions(stack: Stack | None) -> list[Function]:
    layers = stack.depths if stack is not None else ()
    return [branch.function for layer in layers for step in layer.steps for branch in step.branches]


def _key_value_size(attention: Attention) -> int:
    return 2 * attention.num_kv_heads * attention.head_size


def _stack_flops(stack: Stack, own_length: int, memory_length: int) -> int:
    """Return what a token takes in a stack: its layers, and the maps to and from another width."""
    total = sum(_flops(function, stack, own_length, memory_length) for function in _functions(stack))
    if stack.embedding.projection is not None:
        total += 2 * stack.table_width * stack.width
    return total + (2 * stack.width * stack.output_width if stack.projection_out is not None else 0)


def _flops(function: Function, stack: Stack, own_length: int, memory_length: int) -> int:
    width = stack.width
    if isinstance(function, FeedForward):
        return 2 * width * function.size * (3 if function.gated else 2)
    if isinstance(function, MixtureOfExperts):
        return 2 * width * function.count + function.top_k * _flops(function.expert, stack, 0, 0)
    inner = function.num_heads * function.head_size
    if function.source == "memory":
        return 4 * width * inner + 4 * inner * memory_length
    own = 4 * width * inner + 2 * width * _key_value_size(function) + 4 * inner * _attended(function.mask, own_length)
    if isinstance(function.score_bias, Disentangled) and isinstance(stack.score_table, DistanceTable):
        own += 4 * inner * stack.score_table.span * len(function.score_bias.terms)
    return own


def _attended(mask: Mask, length: int) -> int:
    """Return how many positions a query attends to, on average."""
    if isinstance(mask, Causal):
        return (length + 1) // 2
    if isinstance(mask, Window):
        return min(length, mask.before + mask.after + 1)
    return length


def _head_flops(spec: Model) -> int:
    top = spec.decoder or spec.encoder
    if spec.head is None or top is None:
        return 0
    size, flops = top.output_width, 0
    for layer in spec.head.layers:
        if isinstance(layer, Linear):
            flops += 2 * size * layer.size
            size = layer.size
    return flops
