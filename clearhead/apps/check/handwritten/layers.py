"""Check of a hand-written layer: compares the whole layer, then its attentions and norms until one differs.

Legend: B batch, T tokens of the layer's input, S tokens of the memory, D width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.apps.check.handwritten.attention_mistakes import Probe, Steps, attend
from clearhead.apps.check.handwritten.attentions import MaskMeaning, attention
from clearhead.apps.check.handwritten.calling import Argument, CallInputs, attention_arguments, call_arguments
from clearhead.apps.check.handwritten.experiments import Settings, compare_outputs, largest_difference, single_mistakes
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.mistakes import MISTAKES
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report
from clearhead.apps.check.handwritten.running import (
    CandidateRunner,
    describe_call_error,
    describe_result,
    output_error,
    tensors_of,
)
from clearhead.apps.check.handwritten.small_parts import norm
from clearhead.apps.check.handwritten.weights import LinearMap, LinearMaps, read_weights
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError

NormPlace = Literal["post", "pre"]
ActivationName = Literal["relu", "gelu", "silu"]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu,
    "gelu of tanh": partial(functional.gelu, approximate="tanh"), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}  # fmt: skip
_BATCH, _TOKENS, _MEMORY = 2, 5, 7
_OF_MEMORY = re.compile("mem|src|source|enc|cross")


@dataclass(frozen=True)
class _LayerParts:
    """Submodules of a layer: attention weights by path, norms, feed-forward weights, path of cross-attention."""

    attentions: Mapping[str, LinearMaps]
    norms: Sequence[nn.Module]
    feed_forward: tuple[LinearMap, ...]
    cross: str | None


def attentions_of(candidate: nn.Module, width: int, heads: int) -> dict[str, LinearMaps]:
    """Return the outermost submodules that are attentions, as a dict of path and weights."""
    attentions: dict[str, LinearMaps] = {}
    for path, module in candidate.named_modules():
        is_named = re.search(r"att|mha|cross", f"{path.rpartition('.')[2]} {type(module).__name__}".lower())
        if not path or not is_named or any(path.startswith(f"{other}.") for other in attentions):
            continue
        try:
            assignments = read_weights(module, width, heads)
        except CannotCompare:
            continue
        if assignments and not assignments[0].extra:
            attentions[path] = assignments[0].projections
    return attentions


def _find_parts(candidate: nn.Module, width: int, heads: int) -> _LayerParts:
    attentions = attentions_of(candidate, width, heads)
    if not attentions:
        raise CannotCompare("it has no submodule with the name and the weights of an attention (such as self_attn)")
    outside = [module for path, module in candidate.named_modules() if path and not path.startswith(tuple(attentions))]
    linears = [module for module in outside if isinstance(module, nn.Linear)]
    feed_forward = tuple(LinearMap(linear.weight, linear.bias) for linear in linears)
    if len(linears) not in (0, 2, 3) or (linears and width not in {linear.out_features for linear in linears}):
        raise CannotCompare(f"its feed-forward has linear layers {linears}; expected two, or three with a gate")
    norms = [module for module in outside if _is_norm(module, width)]
    return _LayerParts(attentions, norms, feed_forward, _find_cross_attention(candidate, list(attentions)))


def is_layer(candidate: nn.Module, width: int, heads: int) -> bool:
    """Return whether a module has attentions, a feed-forward and norms, and no embedding table."""
    if any(isinstance(module, nn.Embedding) for module in candidate.modules()):
        return False
    try:
        parts = _find_parts(candidate, width, heads)
    except CannotCompare:
        return False
    return bool(parts.feed_forward and parts.norms)


def _find_cross_attention(candidate: nn.Module, attentions: list[str]) -> str | None:
    """Return the path of the cross-attention: by its name, or the second of two in a layer with memory; else None."""
    for path in attentions:
        if re.search(r"cross|memory|enc|src|inter", path.lower()):
            return path
    takes_memory = any(argument.role in ("memory", "key") for argument in attention_arguments(candidate))
    return attentions[1] if takes_memory and len(attentions) == 2 else None


def _is_norm(module: nn.Module, width: int) -> bool:
    weights = list(module.parameters(recurse=False))
    return bool(weights) and all(weight.shape == (width,) for weight in weights) and not list(module.children())


@dataclass(frozen=True)
class _Layer:
    """Reference layer with the weights of the candidate; settings reproduce variants and known mistakes."""

    parts: _LayerParts
    heads: int
    settings: Settings

    def __call__(self, probe: Probe, mask_of: str, changes: Settings) -> Tensor:
        """Return the output [B, T, D] of the reference layer for a test input, with changed settings."""
        settings = {**self.settings, **changes}
        x = probe.query
        steps: list[Callable[[Tensor], Tensor]] = [
            partial(self._attend, name, probe, mask_of, settings) for name in self.parts.attentions
        ]
        if self.parts.feed_forward:
            steps.append(partial(self._feed_forward, settings))
        for index, step in enumerate(steps):
            x = self._apply_sublayer(settings, index, step, x)
        return x

    def _apply_sublayer(self, settings: Settings, index: int, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return x after one sub-layer (attention or feed-forward) with its norm and residual connection."""
        norms = self.parts.norms
        apply: nn.Module = nn.Identity()
        if index < len(norms) and index not in settings.get("no_norm", ()):
            apply = norms[0 if settings.get("one_norm") else index]
        mode = settings.get("places", {}).get(index, settings["place"])
        source = apply(x) if mode in ("pre", "norm of both") else x
        residual = {"norm of both": source, "norm of the residual": apply(x)}.get(mode, x)
        if index in settings.get("no_residual", ()):
            residual = torch.zeros_like(x)
        branch: Tensor = step(source)
        if mode == "norm of the branch":
            branch = apply(branch)
        joined: Tensor = residual + branch
        return apply(joined) if mode == "post" else joined

    def _attend(self, name: str, probe: Probe, mask_of: str, settings: Settings, x: Tensor) -> Tensor:
        is_cross = name == self.parts.cross
        whose = "memory" if is_cross else "self"
        mine = None if mask_of != whose or settings.get("no_mask") else probe.allowed
        inner = Probe("", x, probe.memory if is_cross else None, mine)
        steps = Steps(is_causal=bool(settings.get("causal")) and not is_cross)
        if is_cross and settings.get("from_memory"):
            steps = replace(steps, inputs=(1, 0, 0))
        return attend(steps, self.parts.attentions[name], inner, self.heads)

    def _feed_forward(self, settings: Settings, x: Tensor) -> Tensor:
        activation, linears = _ACTIVATIONS[settings["activation"]], self.parts.feed_forward
        outs = [
            linear
            for linear in linears
            if linear.weight.shape[0] == x.shape[-1] and linear.weight.shape[1] != x.shape[-1]
        ]
        last = outs[0] if outs else linears[-1]
        first = [linear for linear in linears if linear is not last]
        first = first[::-1] if settings.get("gate") == "second" else first
        hidden = activation(functional.linear(x, first[0].weight, first[0].bias))
        for linear in first[1:]:
            hidden = hidden * functional.linear(x, linear.weight, linear.bias)
        return functional.linear(hidden, last.weight, last.bias)


@check_types
@spares_libraries
def layer(
    candidate: Callable[..., Any], *, width: int, heads: int, norm_place: NormPlace | None = None,
    activation: ActivationName | None = None, causal: bool | None = None, mask: MaskMeaning | None = None,
) -> Report:  # fmt: skip
    """Compare a hand-written layer with the mathematics; if it is wrong, check its attentions and norms one by one.

    Args:
        candidate: module called as candidate(x, mask=None) or candidate(x, memory, mask=None), with inputs
            [batch, tokens, width]; its attentions, norms and linear layers are submodules.
        width: number of features of the input.
        heads: number of heads of its attentions.
        norm_place: place of the norms: "post" (after the residual sum) or "pre" (before each sub-layer); None accepts
            both.
        activation: activation of the feed-forward; None accepts any usual one.
        causal: True if its self-attention hides the future itself. None means True for a layer with a memory but no
            mask of its tokens, and accepts both otherwise.
        mask: meaning of its mask, as in `attention`; None accepts any meaning.

    Returns:
        The report.

    Raises:
        InputError: not a module, or sizes that do not fit together.
        NotImplementedError: raised by the candidate if it is not written yet.

    Source: arXiv 1706.03762, section 3.1.
    """
    if not isinstance(candidate, nn.Module):
        raise InputError(f"expected an nn.Module; got {type(candidate).__name__}")
    if heads < 1 or width % heads:
        raise InputError(f"width must be a multiple of heads; got width {width} and {heads} heads")
    subject = f"{type(candidate).__name__}, width {width}, {heads} heads"
    runner = CandidateRunner(candidate, [candidate])
    try:
        with runner.borrow():
            parts = _find_parts(candidate, width, heads)
            outputs, mask_of, meaning = _run(runner, parts, width, heads, mask)
            bases = _bases(parts, norm_place, activation, causal, _takes_causal(candidate))
            probes = [probe for probe, _ in outputs]
            measured = [output for _, output in outputs]

            def compute(base: Settings, changes: Settings) -> list[Tensor]:
                return [_Layer(parts, heads, base)(probe, mask_of, changes) for probe in probes]

            base = _nearest_base(bases, compute, measured, parts, runner.bound)
            report = compare_outputs(
                subject, measured, partial(compute, base), _changes(parts, base), runner,
                [case.name for case in probes],
                where="the wiring of the layer", mathematics=_mathematics(base), notes=_notes(base, meaning),
            )  # fmt: skip
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    if report.ok:
        return report
    broken = _first_wrong_part(candidate, parts, width, heads)
    return report if broken is None else replace(report, findings=broken)


def _nearest_base(
    bases: Sequence[Settings],
    compute: Callable[[Settings, Settings], list[Tensor]],
    outputs: Sequence[Tensor],
    parts: _LayerParts,
    bound: float,
) -> Settings:
    """Return the settings of a correct layer that match exactly, or with one known mistake, or else most closely."""
    nearest = min(bases, key=lambda settings: largest_difference(outputs, compute(settings, {})))
    if largest_difference(outputs, compute(nearest, {})) <= bound:
        return nearest
    for base in bases:
        if single_mistakes(outputs, partial(compute, base), _changes(parts, base), bound):
            return base
    return nearest


def _mathematics(base: Settings) -> str:
    return "x = x + sublayer(norm(x))" if base["place"] == "pre" else MISTAKES["residual_missing"].math


def _notes(base: Settings, meaning: str | None) -> list[str]:
    causal = ", it hides the future" if base["causal"] else ""
    notes = [f"{base['place']}-norm, {base['activation']}{causal}"]
    return notes if meaning is None else [*notes, f"mask: {meaning}"]


def _takes_causal(candidate: nn.Module) -> bool:
    """Return whether a layer with a memory also takes a mask of the layer input, such as a causal mask."""
    masks = [argument.name for argument in attention_arguments(candidate) if argument.role == "mask"]
    return len(masks) > 1 and not all(_OF_MEMORY.search(name) for name in masks)


def _bases(
    parts: _LayerParts, norm_place: str | None, activation: str | None, causal: bool | None, takes_causal: bool
) -> list[dict[str, Any]]:
    names: tuple[str, ...] = ("relu", "gelu", "silu", "gelu of tanh")
    if activation is not None:
        names = (activation, "gelu of tanh") if activation == "gelu" else (activation,)
    causals: tuple[bool, ...] = (True,) if parts.cross and not takes_causal else (False, True)
    if causal is not None:
        causals = (causal,)
    choices = itertools.product((norm_place,) if norm_place else ("post", "pre"), names, causals, ("first", "second"))
    return [dict(zip(("place", "activation", "causal", "gate"), choice, strict=True)) for choice in choices]


def _changes(parts: _LayerParts, base: Settings) -> list[tuple[str, Settings]]:
    count = len(parts.attentions) + bool(parts.feed_forward)
    changes: list[tuple[str, Settings]] = []
    each: list[tuple[int, ...]] = [(index,) for index in range(count)]
    for indices in (*each, tuple(range(count))):
        for mode in ("pre", "post", "norm of both", "norm of the residual", "norm of the branch"):
            cause = "norm_after" if mode in ("post", "norm of the branch") else "norm_before"
            changes.append((cause, {"places": dict.fromkeys(indices, mode)}))
        changes.append(("residual_missing", {"no_residual": indices}))
        changes.append(("norm_missing", {"no_norm": indices}))
    changes.append(("norm_used_twice", {"one_norm": True}))
    for name in _ACTIVATIONS if parts.feed_forward else ():
        cause = "activation_missing" if name == "none" else "wrong_activation"
        changes.append((cause, {"activation": name}))
    changes.append(("source_padding_attended" if parts.cross else "padding_attended", {"no_mask": True}))
    if base["causal"]:
        changes.append(("no_causal_mask_in_decoder", {"causal": False}))
    if parts.cross:
        changes.append(("query_from_encoder", {"from_memory": True}))
    return changes


def _run(
    runner: CandidateRunner, parts: _LayerParts, width: int, heads: int, mask: str | None
) -> tuple[list[tuple[Probe, Tensor]], str, str | None]:
    """Run a layer without and with a mask; return outputs, the masked input ("self", "memory") and the mask meaning."""
    arguments = attention_arguments(runner.candidate)
    numbers = {"width": width, "heads": heads}
    generator = torch.Generator().manual_seed(29)
    x = torch.randn(_BATCH, _TOKENS, width, generator=generator)
    outputs: list[tuple[Probe, Tensor]] = []
    for size in (_MEMORY, _TOKENS):
        memory = torch.randn(_BATCH, size, width, generator=generator)
        plain = Probe("without a mask", x, memory if parts.cross else None)
        inputs = CallInputs(x, plain.memory)
        plain_output = _output(runner, arguments, inputs, numbers)
        if plain_output is not None:
            outputs = [(plain, plain_output)]
        masked = _run_with_masks(runner, arguments, inputs, numbers, mask)
        if masked:
            real, output, whose, meaning, _ = max(masked, key=lambda result: result[-1])
            return [*outputs, (replace(plain, name="with padding", allowed=real), output)], whose, meaning
        if outputs:
            return outputs, "self", None
    if runner.error is not None:
        raise CannotCompare(describe_call_error(runner.candidate, runner.error))
    raise CannotCompare(f"it does not return a tensor [batch, tokens, {width}]")


def _run_with_masks(
    runner: CandidateRunner,
    arguments: Sequence[Argument],
    inputs: CallInputs,
    numbers: Mapping[str, Any],
    mask: str | None,
) -> list[tuple[Tensor, Tensor, str, str, bool]]:
    """Return, for each mask that works: real tokens, output, masked input, mask meaning, True if it hides padding."""
    results = []
    names = [argument.name for argument in arguments if argument.role == "mask"]
    for name in sorted(names, key=lambda argument_name: "padding" not in argument_name):
        is_memory = inputs.memory is not None and (len(names) == 1 or _OF_MEMORY.search(name) is not None)
        source = inputs.memory if is_memory else inputs.query
        assert source is not None
        real = torch.ones(_BATCH, 1, 1, source.shape[1], dtype=torch.bool)
        real[0, ..., -2:] = False
        whose = "memory" if is_memory else "self"
        for output, meaning, hides in _run_mask_forms(
            runner, arguments, inputs, numbers, name, real, (mask, is_memory)
        ):
            results.append((real, output, whose, meaning, hides))
    return results


def _run_mask_forms(
    runner: CandidateRunner, arguments: Sequence[Any], inputs: CallInputs, numbers: Mapping[str, Any], name: str,
    real: Tensor,
    kind: tuple[str | None, bool],
) -> Iterator[tuple[Tensor, str, bool]]:  # fmt: skip
    """Yield for each working mask form: the layer's output, the mask meaning, and whether padding is hidden."""
    mask, is_memory = kind
    meanings = ("attend", "block", "additive", "ones") if mask in (None, "any") else (mask,)
    for meaning, shape in itertools.product(meanings, ("row", "broadcast", "square")):
        allowed = real[:, 0, 0] if shape == "row" else real
        if shape == "square":
            allowed = real[:, 0].expand(-1, inputs.query.shape[1], -1)
        values = {"block": ~allowed, "ones": allowed.long()}.get(meaning, allowed)
        if meaning == "additive":
            values = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
        masked = replace(inputs, mask=values, mask_name=name)
        output = _output(runner, arguments, masked, numbers)
        if output is not None and output.isfinite().all():
            yield output, meaning, _hides(runner, arguments, masked, numbers, real, output, is_memory)


def _hides(
    runner: CandidateRunner,
    arguments: Sequence[Any],
    inputs: CallInputs,
    numbers: Mapping[str, Any],
    real: Tensor,
    output: Tensor,
    is_memory: bool,
) -> bool:
    """Return whether a mask hides padding: outputs at real tokens stay the same when padding changes."""
    hidden = ~real[:, 0, 0]
    if is_memory and inputs.memory is not None:
        inputs = replace(inputs, memory=torch.where(hidden[..., None], inputs.memory.flip(-1), inputs.memory))
    else:
        inputs = replace(inputs, query=torch.where(hidden[..., None], inputs.query.flip(-1), inputs.query))
    again = _output(runner, arguments, inputs, numbers)
    visible = torch.ones(output.shape[:2], dtype=torch.bool) if is_memory else ~hidden
    return again is not None and output_error(again[visible], output[visible]) <= runner.bound


def _output(
    runner: CandidateRunner, arguments: Sequence[Any], inputs: CallInputs, numbers: Mapping[str, Any]
) -> Tensor | None:
    args, named = call_arguments(runner.candidate, arguments, inputs, numbers)
    result = runner.attempt(*args, named=named)
    for tensor in tensors_of(result)[:1]:
        if tensor.shape == inputs.query.shape:
            return tensor.double()
    if result is not None:
        runner.error = TypeError(f"it returns {describe_result(result)}, not a tensor {list(inputs.query.shape)}")
    return None


def _first_wrong_part(candidate: nn.Module, parts: _LayerParts, width: int, heads: int) -> tuple[Finding, ...] | None:
    """Return the findings of the first wrong attention or norm of a layer; None if none is wrong."""
    for path, report in part_reports(candidate, list(parts.attentions), width, heads):
        if report.verdict == "wrong":
            return tuple(replace(finding, where=f"{path}: {finding.where}") for finding in report.findings)
    return None


def part_reports(
    candidate: nn.Module, attentions: Sequence[str], width: int, heads: int
) -> Iterator[tuple[str, Report]]:
    """Check each attention and hand-written norm of a module; yield the path of the submodule and its report."""
    for path, module in candidate.named_modules():
        if path in attentions:
            yield path, attention(module, width=width, heads=heads, mask="any")
        elif path and _is_norm(module, width) and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            yield path, norm(module, width=width)
