"""Parts of a module that are computed by faster functions while it is trained on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.norm import Norm, RMSNorm
from clearhead.core.stack import Branch, Stack, Step
from clearhead.machine import has_fast_bf16
from clearhead.training.fast_attention import mix
from clearhead.training.fast_norm import normalize


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
    if precision != "bf16" or not has_fast_bf16(device):
        return
    for part in module.modules():
        if isinstance(part, Attention):
            yield part, "mix", partial(mix, part, part.mix)
        # Without a norm the stream itself is rounded, in front of a branch alone.
        if isinstance(part, Branch) or (isinstance(part, Step) and isinstance(part.pre, Norm)):
            yield part.pre, "forward", partial(_rounded, part.pre.forward)
    encoder, decoder = getattr(module, "encoder", None), getattr(module, "decoder", None)
    if isinstance(encoder, Stack) and decoder is not None:
        yield encoder.final_norm, "forward", partial(_rounded, encoder.final_norm.forward)


def _rounded(own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Round once what several linear layers read, each of which would round it, and keep its copy for the gradient."""
    normed = own(x)
    return normed.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() else normed
