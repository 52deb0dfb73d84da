"""Parts of a module that are computed by faster functions while it is trained on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.norm import RMSNorm
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
    in_bf16 = precision == "bf16" and has_fast_bf16(device)
    for part in module.modules():
        if isinstance(part, Attention) and in_bf16:
            yield part, "mix", partial(mix, part, part.mix)
        elif isinstance(part, RMSNorm):
            yield part, "normalize", partial(normalize, part, part.normalize)
