"""The residual stream of a stack in bf16: sum, dropout, norm and rounding between two branches in one pass.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.base.hooks import is_seen
from clearhead.core.context import Context
from clearhead.core.norm import LayerNorm, Norm, RMSNorm
from clearhead.core.shapes import States
from clearhead.core.stack import Branch, Stack
from clearhead.fast.native.abi import StreamCall, address
from clearhead.fast.plan import PlannedBranch, list_branches
from clearhead.fast.training.dropout import SeededDropout
from clearhead.fast.training.linear import run


@dataclass(frozen=True)
class StreamBranch:
    """Only branch of a residual step, with its norm (before the branch or after the sum) and its depth in the stack."""

    branch: Branch
    norm: Norm
    is_before: bool
    depth: int


def stream_branches(stack: Stack) -> list[StreamBranch] | None:
    """Return the branches of a stack for `FusedStream`, or None if the kernels do not support its steps.

    Each step must have one branch and one norm. Either all norms are before the branch, with one more at the end of the
    stack, or all are after the sum.
    """
    planned = list(list_branches(stack))
    branches = [branch for branch in map(_stream_branch, planned) if branch is not None]
    is_before = {branch.is_before for branch in branches}
    ends_well = is_before == {False} or _is_plain(stack.final_norm)
    return branches if len(branches) == len(planned) and len(is_before) == 1 and ends_well else None


def _stream_branch(planned: PlannedBranch) -> StreamBranch | None:
    step, branch = planned.step, planned.branch
    norms = [norm for norm in (step.pre, branch.pre, step.out) if not isinstance(norm, nn.Identity)]
    if not (planned.is_first and planned.is_last) or len(norms) != 1 or not _is_plain(norms[0]):
        return None
    (norm,) = norms
    assert isinstance(norm, Norm)
    return StreamBranch(branch, norm, norm is not step.out, planned.depth) if _is_absent(branch.post) else None


def _is_absent(norm: nn.Module) -> bool:
    return isinstance(norm, nn.Identity)


def _is_plain(norm: nn.Module) -> bool:
    is_known = isinstance(norm, LayerNorm | RMSNorm) and not norm.is_by_head and not norm.has_unit_offset
    return is_known and all(parameter.dtype == torch.float32 for parameter in norm.parameters())


@dataclass(frozen=True)
class _BranchOutput:
    """Output of a branch that is added to the residual stream, with its dropout and scale."""

    y_BTD: Tensor
    dropout: float
    scale: float


class FusedStream(Stack):
    """Stack of a training tree whose residual stream is computed in bf16, in one pass between two branches."""

    branches: list[StreamBranch]
    watched_modules: tuple[nn.Module, ...]
    """The modules in the stack that hooks may watch."""
    is_memory: bool
    """True if only a decoder reads the output, as its encoder memory, so that it may be rounded."""

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        """Run the layers; the results equal those of the plain stack up to the order of sums and rounding."""
        is_plain = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        is_fit = x_BTD.dtype == torch.float32 and x_BTD.numel() > 0 and context.cache is None
        if not (is_plain and is_fit) or any(map(is_seen, self.watched_modules)):
            return super().continue_from(depth, x_BTD, context)
        read, added = x_BTD, None
        for entry in self.branches:
            if entry.depth < depth:
                continue
            context.depth = entry.depth
            if entry.is_before:
                results = _norm_sum(x_BTD, added, entry.norm, ("sum", "rounded"))
                x_BTD, read = results if added is not None else (x_BTD, *results)
            added = _run_branch(entry.branch, read, context)
            if not entry.is_before:
                x_BTD, read = _norm_sum(x_BTD, added, entry.norm, ("normed", "rounded"))
                added = None
        if added is not None:
            assert isinstance(self.final_norm, Norm)
            (ended,) = _norm_sum(x_BTD, added, self.final_norm, ("rounded" if self.is_memory else "normed",))
        else:
            ended = read if self.is_memory and _is_absent(self.final_norm) else self.final_norm(x_BTD)
        return ended


def _run_branch(branch: Branch, read_BTD: Tensor, context: Context) -> _BranchOutput:
    y_BTD = branch.function(read_BTD, context)
    return _BranchOutput(y_BTD, branch.dropout.p if branch.dropout.training else 0.0, branch.scale)


def _norm_sum(x_BTD: Tensor, added: _BranchOutput | None, norm: Norm, wanted: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Add a branch output to the residual stream, apply a norm, and return the tensors named in `wanted`.

    The names are "sum", "normed" and "rounded". Without a branch output, only the last named tensor is returned.
    """
    y_BTD = None if added is None else added.y_BTD.to(torch.bfloat16).contiguous()
    drawn = SeededDropout() if added is None else SeededDropout.draw(added.dropout, added.scale)
    setting = _StreamSetting(norm.eps, isinstance(norm, LayerNorm), wanted if added is not None else wanted[-1:], drawn)
    outputs: tuple[Tensor, ...] = _Stream.apply(  # type: ignore[no-untyped-call]
        x_BTD.contiguous(), y_BTD, norm.weight, norm.bias, setting
    )
    return outputs


@dataclass(frozen=True)
class _StreamSetting:
    eps: float
    is_centered: bool
    wanted: tuple[str, ...]
    dropout: SeededDropout


_ROUNDED: Final = ("y", "rounded", "rounded_gradient", "y_gradient")
_VECTORS: Final = ("weight", "bias", "weight_gradient", "bias_gradient")


def _run(name: str, setting: _StreamSetting, **tensors: Tensor | None) -> None:
    x = tensors["x"]
    assert x is not None
    width = x.shape[-1]
    rows = x.numel() // width
    call = StreamCall(N=rows, D=width, is_centered=setting.is_centered, eps=setting.eps)
    setting.dropout.fill(call)
    shapes = {"statistics": (rows, 2), **dict.fromkeys(_VECTORS, (width,))}
    for key, tensor in tensors.items():
        if tensor is not None:
            dtype = torch.bfloat16 if key in _ROUNDED else torch.float32
            setattr(call, key, address(tensor, dtype, *shapes.get(key, x.shape)))
    run(name, call)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, setting: _StreamSetting
    ) -> tuple[Tensor, ...]:
        sums = x if y is None else torch.empty_like(x)
        statistics = x.new_empty(x.numel() // x.shape[-1], 2)
        dtypes = {"normed": x.dtype, "rounded": torch.bfloat16}
        outputs = {name: torch.empty_like(x, dtype=dtypes[name]) for name in setting.wanted if name in dtypes}
        sum_out = None if y is None else sums
        _run(
            "stream_forward", setting, x=x, y=y, weight=weight, bias=bias, sum=sum_out, statistics=statistics, **outputs
        )
        ctx.save_for_backward(sums, statistics, weight)
        ctx.setting, ctx.has_sum, ctx.has_bias = setting, y is not None, bias is not None
        ctx.set_materialize_grads(False)
        return tuple(sums if name == "sum" else outputs[name] for name in setting.wanted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums, statistics, weight = ctx.saved_tensors
        output_gradients: dict[str, Tensor | None] = {}
        for name, gradient in zip(ctx.setting.wanted, gradients, strict=True):
            output_gradients[f"{name}_gradient"] = None if gradient is None else gradient.contiguous()
        of_inputs = {
            "x": torch.empty_like(sums),
            "y": torch.empty_like(sums, dtype=torch.bfloat16) if ctx.has_sum else None,
            "weight": torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[2] else None,
            "bias": sums.new_empty(sums.shape[-1]) if ctx.has_bias else None,
        }
        input_gradients = {f"{name}_gradient": tensor for name, tensor in of_inputs.items()}
        _run(
            "stream_backward",
            ctx.setting,
            x=sums,
            weight=weight,
            statistics=statistics,
            **output_gradients,
            **input_gradients,
        )
        return *of_inputs.values(), None


def dropout(x: Float[Tensor, "*axes"], p: float) -> Float[Tensor, "*axes"]:
    """Zero each fp32 element with probability p below 1 in one pass, and scale the others to keep the mean."""
    setting = _StreamSetting(0.0, False, (), SeededDropout.draw(p))
    dropped: Tensor = _Dropout.apply(x, setting)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, setting: _StreamSetting) -> Tensor:
        ctx.setting = setting
        return _run_dropout(x, setting)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _run_dropout(gradients[0], ctx.setting), None


def _run_dropout(x: Tensor, setting: _StreamSetting) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _run("dropout", setting, x=x, sum=y)
    return y
