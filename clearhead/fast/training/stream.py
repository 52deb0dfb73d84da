"""The residual stream of a stack in bf16: sum, dropout, norm and rounding between two branches in one pass.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.norm import LayerNorm, Norm, RMSNorm
from clearhead.core.shapes import States
from clearhead.core.stack import Branch, Layer, Stack, Step
from clearhead.fast.native.abi import StreamCall
from clearhead.fast.training.linear import run

Continue = Callable[[int, States, Context], States]

_PARTS: Final = 1 << 32
"""Each element gets 32 random bits, so a drop probability is a whole number of these parts."""


def fast_stream(stack: Stack, *, is_memory: bool) -> Continue | None:
    """Return what runs the layers of a stack as its `continue_from` does, up to the order of sums and rounding.

    Args:
        stack: its layers.
        is_memory: whether its output is read as the memory of a decoder alone, and so may be rounded.

    Returns:
        None where the kernels do not serve the steps: each has one branch and one norm, all of them before the branch
        (with one at the end of the stack) or all of them after the sum.
    """
    layers = [[_Plan.of(step) for step in layer.steps] for layer in stack.layers if isinstance(layer, Layer)]
    plans = [[plan for plan in layer if plan is not None] for layer in layers]
    is_before = {plan.is_before for layer in plans for plan in layer}
    ends_well = is_before == {False} or _is_plain(stack.final_norm)
    if plans != layers or len(is_before) != 1 or not ends_well or stack.final_norm is None:
        return None
    return _FastStream(stack, plans, is_memory).continue_from


@dataclass(frozen=True)
class _Plan:
    """The branch of a step, and its norm: before the branch, or after the sum."""

    branch: Branch
    norm: Norm
    is_before: bool

    @classmethod
    def of(cls, step: nn.Module) -> _Plan | None:
        if not isinstance(step, Step) or len(step.branches) != 1:
            return None
        branch = step.branches[0]
        assert isinstance(branch, Branch)
        norms = [norm for norm in (step.pre, branch.pre, step.out) if not isinstance(norm, nn.Identity)]
        if len(norms) != 1 or not _is_plain(norms[0]) or not isinstance(branch.post, nn.Identity):
            return None
        (norm,) = norms
        assert isinstance(norm, Norm)
        return cls(branch, norm, norm is not step.out)


def _is_plain(norm: nn.Module) -> bool:
    is_known = isinstance(norm, LayerNorm | RMSNorm) and not norm.is_by_head and not norm.has_unit_offset
    return is_known and all(parameter.dtype == torch.float32 for parameter in norm.parameters())


@dataclass(frozen=True)
class _Added:
    """What a branch adds to the stream."""

    y_BTD: Tensor
    dropout: float
    scale: float


@dataclass(frozen=True)
class _FastStream:
    stack: Stack
    plans: list[list[_Plan]]
    is_memory: bool

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        is_plain = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        is_fit = x_BTD.dtype == torch.float32 and x_BTD.numel() > 0 and context.cache is None
        if not (is_plain and is_fit) or any(map(_is_watched, (*self.stack.layers.modules(), self.stack.final_norm))):
            return Stack.continue_from(self.stack, depth, x_BTD, context)
        read, added = x_BTD, None
        for context.depth in range(depth, len(self.stack.order)):
            for plan in self.plans[self.stack.order[context.depth]]:
                if plan.is_before:
                    found = _normed(x_BTD, added, plan.norm, ("sum", "rounded"))
                    x_BTD, read = found if added is not None else (x_BTD, *found)
                added = _added(plan.branch, read, context)
                if not plan.is_before:
                    x_BTD, read = _normed(x_BTD, added, plan.norm, ("normed", "rounded"))
                    added = None
        if added is not None:
            assert isinstance(self.stack.final_norm, Norm)
            (ended,) = _normed(x_BTD, added, self.stack.final_norm, ("rounded" if self.is_memory else "normed",))
        else:
            is_read = self.is_memory and isinstance(self.stack.final_norm, nn.Identity)
            ended = read if is_read else self.stack.final_norm(x_BTD)
        output: Tensor = self.stack.projection_out(ended)
        return output


def _is_watched(part: nn.Module) -> bool:
    """Return whether something sees or changes what passes through a part, or a layer computes another way."""
    is_seen = getattr(part, "watchers", None) or part._forward_hooks or part._forward_pre_hooks
    return bool(is_seen) or (isinstance(part, Layer) and "forward" in vars(part))


def _added(branch: Branch, read_BTD: Tensor, context: Context) -> _Added:
    function = branch.function
    y_BTD = function(read_BTD, context) if isinstance(function, Attention) else function(read_BTD)
    return _Added(y_BTD, branch.dropout.p if branch.dropout.training else 0.0, branch.scale)


def _normed(x_BTD: Tensor, added: _Added | None, norm: Norm, wanted: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Return what is wanted of the sum of the stream and what a branch adds, in order: "sum", "normed", "rounded"."""
    made = _Setting(norm.eps, isinstance(norm, LayerNorm), wanted if added is not None else wanted[-1:])
    y_BTD = None
    if added is not None:
        y_BTD = added.y_BTD.to(torch.bfloat16).contiguous()
        made.dropped = min(round(added.dropout * _PARTS), _PARTS - 1)
        made.scale = added.scale * _PARTS / (_PARTS - made.dropped)
        if made.dropped:
            made.seed = tuple(torch.randint(_PARTS, (2,)).tolist())
    found: tuple[Tensor, ...] = _Stream.apply(  # type: ignore[no-untyped-call]
        x_BTD.contiguous(), y_BTD, norm.weight, norm.bias, made
    )
    return found


@dataclass
class _Setting:
    eps: float
    is_centered: bool
    wanted: tuple[str, ...]
    dropped: int = 0
    scale: float = 1.0
    seed: tuple[int, ...] = (0, 0)


def _run(name: str, made: _Setting, **tensors: Tensor | None) -> None:
    x = tensors["x"]
    assert x is not None
    width = x.shape[-1]
    call = StreamCall(N=x.numel() // width, D=width, is_centered=made.is_centered, dropped=made.dropped, eps=made.eps)
    call.kept_scale, call.seed[0], call.seed[1] = made.scale, *made.seed
    for key, tensor in tensors.items():
        if tensor is not None:
            setattr(call, key, tensor.data_ptr())
    run(name, call)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, made: _Setting
    ) -> tuple[Tensor, ...]:
        sums = x if y is None else torch.empty_like(x)
        statistics = x.new_empty(x.numel() // x.shape[-1], 2)
        dtypes = {"normed": x.dtype, "rounded": torch.bfloat16}
        found = {name: torch.empty_like(x, dtype=dtypes[name]) for name in made.wanted if name in dtypes}
        own = None if y is None else sums
        _run("stream_forward", made, x=x, y=y, weight=weight, bias=bias, sum=own, statistics=statistics, **found)
        ctx.save_for_backward(sums, statistics, weight)
        ctx.made, ctx.has_sum, ctx.has_bias = made, y is not None, bias is not None
        ctx.set_materialize_grads(False)
        return tuple(sums if name == "sum" else found[name] for name in made.wanted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums, statistics, weight = ctx.saved_tensors
        came = {
            f"{name}_gradient": None if gradient is None else gradient.contiguous()
            for name, gradient in zip(ctx.made.wanted, gradients, strict=True)
        }
        found = {
            "x": torch.empty_like(sums),
            "y": torch.empty_like(sums, dtype=torch.bfloat16) if ctx.has_sum else None,
            "weight": torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[2] else None,
            "bias": sums.new_empty(sums.shape[-1]) if ctx.has_bias else None,
        }
        made = {f"{name}_gradient": tensor for name, tensor in found.items()}
        _run("stream_backward", ctx.made, x=sums, weight=weight, statistics=statistics, **came, **made)
        return *found.values(), None
