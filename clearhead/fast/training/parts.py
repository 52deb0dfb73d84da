"""Parts of a module that are computed by faster functions while it is trained on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import Norm, RMSNorm
from clearhead.core.stack import Branch, Stack, Step
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.training.attention import mix, rotation
from clearhead.fast.training.float_linear import has_faster_products, linear
from clearhead.fast.training.linear import feed_forward, has_products, is_served, linears, serves_network
from clearhead.fast.training.norm import normalize
from clearhead.fast.training.stream import fast_stream


@contextmanager
def fast_training(module: nn.Module, precision: str) -> Iterator[None]:
    """Let parts of a module be computed by faster functions inside a with block, forward and backward.

    Losses are those of the module's own functions up to the order of sums, and gradients up to rounding in the
    precision of the products.

    Args:
        module: that is trained.
        precision: of the products.
    """
    changed = list(_functions(module, precision))
    for part, name, function in changed:
        vars(part)[name] = function
    try:
        yield
    finally:
        for part, name, _ in changed:
            del vars(part)[name]


def _functions(module: nn.Module, precision: str) -> Iterator[tuple[nn.Module, str, Callable[..., Tensor]]]:
    device = next(module.parameters()).device
    if device.type != "cpu":
        return
    for part in module.modules():
        if isinstance(part, RMSNorm):
            yield part, "normalize", partial(normalize, part, part.normalize)
    if precision == "fp32" and has_faster_products():
        for part in module.modules():
            if type(part) is nn.Linear and "forward" not in vars(part):
                yield part, "forward", partial(linear, part, part.forward)
    if precision != "bf16" or not has_fast_bf16(device):
        return
    for part in module.modules():
        # Without a norm the stream itself is rounded, in front of a branch alone.
        if isinstance(part, Branch) or (isinstance(part, Step) and isinstance(part.pre, Norm)):
            yield part.pre, "forward", partial(_rounded, part.pre.forward)
    encoder, decoder = getattr(module, "encoder", None), getattr(module, "decoder", None)
    if has_products():
        yield from _products(module)
        for stack in (encoder, decoder):
            is_memory = stack is encoder and decoder is not None
            run = fast_stream(stack, is_memory=is_memory) if isinstance(stack, Stack) else None
            if isinstance(stack, Stack) and run is not None:
                yield stack, "continue_from", run
    if isinstance(encoder, Stack) and decoder is not None:
        yield encoder.final_norm, "forward", partial(_rounded, encoder.final_norm.forward)


def _products(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Tensor]]]:
    for part in module.modules():
        if isinstance(part, Attention):
            yield part, "mix", partial(mix, part, part.mix)
            yield part, "rotate", partial(_rotate, part.rotate)
        if isinstance(part, nn.Linear):
            yield part, "forward", partial(_linear, part, part.forward)
        if isinstance(part, Attention) and type(part).forward is Attention.forward:
            yield part, "forward", partial(_attend, part, part.forward)
        if type(part) is FeedForward:
            yield part, "forward", partial(_feed_forward, part, part.forward)


def _linear(part: nn.Linear, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return linears(x, [part])[0] if _is_for_training(x) and is_served(part) else own(x)


def _rotate(own: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotation(x, cos, sin) if _is_for_training(x) and x.dtype == torch.bfloat16 else own(x, cos, sin)


def _feed_forward(part: FeedForward, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return feed_forward(part, x) if _is_for_training(x) and serves_network(part) else own(x)


def _attend(part: Attention, own: Callable[[Tensor, Context], Tensor], x: Tensor, context: Context) -> Tensor:
    """Attend as an attention to its own rows does, but project queries, keys and values together."""
    layers = part.query, part.key, part.value
    if not _is_for_training(x) or context.cache is not None or not all(map(is_served, layers)):
        return own(x, context)
    query, key, value = map(part.split, linears(x, layers))
    query, key = part.prepare(query, key, context)
    query, key, value = part.point("queries", query), part.point("keys", key), part.point("values", value)
    return part.merge(part.mix(query, key, value, part.bias(query, key, context), context))


def _is_for_training(x: Tensor) -> bool:
    """Return whether rows are read in bf16 for a backward pass."""
    is_plain = torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    return is_plain and torch.is_grad_enabled() and x.numel() > 0


def _rounded(own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Round once what several linear layers read, each of which would round it, and keep its copy for the gradient."""
    normed = own(x)
    return normed.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() else normed
