"""Fast linear layers: inside a with block, those of a model on a CPU run by compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from clearhead.core.head import Linear as HeadLinear
from clearhead.inference.int8 import Int8Linear, Int8Matrix
from clearhead.native.linear import Run, float_linear, int8_linear


@contextmanager
def fast_linears(module: nn.Module) -> Iterator[None]:
    """Let the linear layers of a model run by compiled kernels, where there are some for its weights.

    Results are those of the plain layers up to the order of sums; with weights in 8 bits, up to rounding the inputs to
    8 bits as well. Weights must not be moved inside the block; where gradients are recorded, the plain layers run.
    """
    changed = []
    for part in module.modules():
        run = None if "forward" in vars(part) else _fast_forward(part)
        if run is not None:
            vars(part)["forward"] = run
            changed.append(part)
    try:
        yield
    finally:
        for part in changed:
            del vars(part)["forward"]


def _fast_forward(part: nn.Module) -> Run | None:
    if isinstance(part, Int8Linear):
        return _of_matrix(part, part.bias)
    if type(part) is nn.Linear:
        return float_linear(part.weight, part.bias)
    if not isinstance(part, HeadLinear):
        return None
    holder = part.borrowed[0] if part.borrowed else part
    projection = None if isinstance(holder, Int8Matrix) else part.projection
    run = _of_matrix(holder, part.bias) if projection is None else float_linear(projection.weight_VD, part.bias)
    return run if run is None or part.scale == 1.0 else _scaled(run, part.scale)


def _of_matrix(holder: nn.Module, bias: Tensor | None) -> Run:
    assert isinstance(holder, Int8Matrix)
    return int8_linear(holder.weight_int8, holder.weight_scale, bias)


def _scaled(run: Run, scale: float) -> Run:
    return lambda x: run(x * scale)
