"""Checks of hand-written positions, norms, losses and rotations: compare them with the mathematics."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.calling import parameters_of
from clearhead.apps.check.handwritten.experiments import Changes, Settings, compare_outputs, largest_difference
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.mistakes import MISTAKES
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report
from clearhead.apps.check.handwritten.running import (
    ROUNDED,
    CandidateRunner,
    describe_call_error,
    describe_result,
    tensors_of,
)
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError

_LENGTH, _BATCH, _HEADS = 7, 2, 3
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 0.0)


def _name(candidate: Any) -> str:
    return str(getattr(candidate, "__name__", type(candidate).__name__))


def _runner(candidate: Callable[..., Any]) -> CandidateRunner:
    owner = candidate if isinstance(candidate, nn.Module) else getattr(candidate, "__self__", None)
    return CandidateRunner(candidate, [owner] if isinstance(owner, nn.Module) else [])


def _first_output(
    runner: CandidateRunner, calls: Sequence[tuple[Any, ...]], shapes: Sequence[tuple[int, ...]]
) -> Tensor:
    """Try calls in order, and return the first output that has one of these shapes.

    Raises:
        CannotCompare: no call returns such an output.
    """
    result: Any = None
    for call in calls:
        result = runner.attempt(*call)
        for tensor in tensors_of(result)[:1]:
            if tuple(tensor.shape) in shapes:
                return tensor.detach().double()
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if result is None and runner.error is not None:
        raise CannotCompare(describe_call_error(runner.candidate, runner.error))
    raise CannotCompare(f"it returns {describe_result(result)}, not a tensor {wanted}")


def _table(settings: Settings, length: int, width: int) -> Tensor:
    """Return the table of sinusoidal positions [length, width]. Source: arXiv 1706.03762, section 3.5."""
    step = torch.arange(0, width, 2, dtype=torch.float64) / width * settings.get("step", 1.0)
    position = torch.arange(length, dtype=torch.float64)[:, None] + settings.get("offset", 0)
    base, sign = float(settings.get("base", 10000.0)), settings.get("sign", -1.0)
    angles = position * base ** (sign * step)
    odd = position * base ** (sign * (step + 1 / width)) if settings.get("is_odd") else angles
    pair = (angles.cos(), angles.sin()) if settings.get("is_swapped") else (angles.sin(), odd.cos())
    if settings.get("is_halved"):
        return torch.cat(pair, -1)[:, :width]
    return torch.stack(pair, -1).flatten(1)[:, :width]


_POSITION_CHANGES: Changes = (
    ("double_step", {"step": 2.0}), ("half_step", {"step": 0.5}), ("sin_cos_halves", {"is_halved": True}),
    ("position_off_by_one", {"offset": 1}), ("position_off_by_one", {"offset": -1}),
    ("log_of_wrong_sign", {"sign": 1.0}),
    ("sin_cos_swapped", {"is_swapped": True}), ("cosine_exponent_of_odd_column", {"is_odd": True}),
    *(("wrong_base", {"base": base}) for base in (1e2, 1e3, 1e5, 1e6, 10.0, 2.0, math.e, 5e5, 2e4, 5e3, 4096.0)),
)  # fmt: skip


@check_types
def positions(candidate: Callable[..., Any], *, width: int = 10, length: int = _LENGTH) -> Report:
    """Compare hand-written sinusoidal positions with the mathematics.

    Args:
        candidate: function of length and width that returns the table [length, width]; or module that adds the table
            to an input [batch, length, width].
        width: number of features.
        length: number of positions.

    Returns:
        The report.

    Raises:
        InputError: a width or a length below 2.
        NotImplementedError: raised by the candidate if it is not written yet.

    Source: arXiv 1706.03762, section 3.5.
    """
    if width < 2 or length < 2:
        raise InputError(f"width and length must be at least 2; got {width} and {length}")
    subject, runner = f"{_name(candidate)}, width {width}", _runner(candidate)
    findings: list[Finding] = []
    try:
        with runner.borrow(draw=False):
            if isinstance(candidate, nn.Module):
                zeros = torch.zeros(_BATCH, length, width)
                table = _first_output(
                    runner,
                    [(zeros,), (zeros.transpose(0, 1),), (length,)],
                    [zeros.shape, (length, width), (1, length, width), (length, _BATCH, width)],
                )
                table = table[:, 0] if table.dim() == 3 and table.shape[0] == length != _BATCH else table
                table = table if table.dim() == 2 else table[0]
                short = tensors_of(runner.attempt(zeros[:, :1]))
                if short and tuple(short[0].shape) not in ((_BATCH, 1, width), (1, width), (1, 1, width)):
                    findings.append(Finding.of("length_ignored"))
            else:
                names = [parameter.name.lower() for parameter in parameters_of(candidate)]
                is_turned = bool(names) and re.search(r"dim|width|model|emb|^d$|feat", names[0]) is not None
                calls = [(width, length), (length, width)] if is_turned else [(length, width), (width, length)]
                table = _first_output(runner, calls, [(length, width), (1, length, width)]).reshape(length, width)
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    runner.bound = ROUNDED
    return compare_outputs(
        subject, [table], lambda settings: [_table(settings, length, width)], _POSITION_CHANGES, runner,
        [f"{length} positions"], where="the table of positions", mathematics=MISTAKES["wrong_base"].math,
        findings=findings, loose=1e-2,
    )  # fmt: skip


def _normalize(settings: Settings, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a layer norm or an RMS norm. Sources: arXiv 1607.06450, eq. 3; arXiv 1910.07467, eq. 4."""
    axis, eps = settings.get("axis", -1), settings["eps"]
    count = x.numel() // x.mean(axis).numel()
    centred = x - x.mean(axis, keepdim=True) if settings.get("is_centred", True) else x
    around = x - x.mean(axis, keepdim=True) if settings.get("is_variance", True) else x
    square = around.pow(2).sum(axis, keepdim=True) / (count - settings.get("less", 0))
    square = square * count if settings.get("is_sum") else square
    match settings.get("root", "around"):
        case "around":
            scale = (square + eps).sqrt()
        case "outside":
            scale = square.sqrt() + eps
        case "missing":
            scale = square + eps
        case _:
            scale = square.sqrt()
    normed: Tensor = centred / scale
    if weight is not None and settings.get("has_weight", True):
        normed = normed * weight
    return normed if bias is None or not settings.get("has_bias", True) else normed + bias


_NORM_CHANGES: Changes = (
    ("unbiased_variance", {"less": 1}), ("eps_outside_root", {"root": "outside"}),
    ("root_missing", {"root": "missing"}),
    ("eps_missing", {"root": "bare"}), ("sum_for_mean", {"is_sum": True}), ("bias_missing", {"has_bias": False}),
    ("weight_missing", {"has_weight": False}),
    *(("wrong_axis", {"axis": axis}) for axis in (1, 0, (1, 2), (0, 1), (0, 1, 2), (0, 2))),
)  # fmt: skip
_NORMS = {True: ("unbiased_variance", "the norm"), False: ("mean_subtracted", "the RMS norm")}
_LAYER_CHANGES: Changes = (
    ("mean_not_subtracted", {"is_centred": False}),
    ("mean_not_subtracted", {"is_centred": False, "is_variance": False}),
)  # fmt: skip
_RMS_CHANGES: Changes = (
    ("mean_subtracted", {"is_centred": True, "is_variance": True}), ("mean_subtracted", {"is_centred": True}),
    ("mean_subtracted", {"is_variance": True}),
)  # fmt: skip


@check_types
@spares_libraries
def norm(
    candidate: Callable[..., Any],
    *,
    width: int = 8,
    kind: Literal["layer", "rms"] | None = None,
    eps: float | None = None,
) -> Report:
    """Compare a hand-written layer norm or RMS norm with the mathematics.

    Args:
        candidate: module of [batch, tokens, width] with a weight and perhaps a bias; or function of x, then perhaps
            weight, bias and eps.
        width: number of features.
        kind: "layer" or "rms". None means "rms" if its name contains "rms", "layer" if there is a bias, else the kind
            that fits better.
        eps: number added to the variance, if the candidate has no attribute for it; None accepts any usual value.

    Returns:
        The report.

    Raises:
        NotImplementedError: raised by the candidate if it is not written yet.

    Sources: arXiv 1607.06450, eq. 3; arXiv 1910.07467, eq. 4.
    """
    subject, runner = f"{_name(candidate)}, width {width}", _runner(candidate)
    try:
        with runner.borrow():
            x = torch.randn(_BATCH, 5, width, generator=torch.Generator().manual_seed(3)) + 0.5
            x[0] *= 0.01
            weight, bias = _gains(candidate, width)
            handed = {"weight": weight, "bias": bias, "eps": eps or 1e-5}
            call = [x, *(handed[role] for role in _norm_arguments(candidate))]
            outputs = [_first_output(runner, [tuple(call)], [tuple(x.shape)])]
            weight, bias = (None if gain is None else gain.double().flatten().clone() for gain in (weight, bias))
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    candidates = _epsilons(candidate, eps)
    bases = _norm_bases(_kinds(candidate, kind, bias is not None), candidates)

    def compute(base: Settings, settings: Settings) -> list[Tensor]:
        return [_normalize({**base, **settings}, x.double(), weight, bias)]

    base = min(bases, key=lambda candidate_base: largest_difference(outputs, compute(candidate_base, {})))
    cause, where = _NORMS[base["is_centred"]]
    return compare_outputs(
        subject, outputs, partial(compute, base), _norm_changes(base, candidates), runner,
        ["rows of usual and of small values"], where=where, mathematics=MISTAKES[cause].math,
        notes=[f"{where}, eps {base['eps']:g}"],
    )  # fmt: skip


def _norm_bases(kinds: Sequence[str], candidates: Sequence[float]) -> list[dict[str, Any]]:
    """Return the settings of each correct norm to compare with; an RMS norm may ignore its bias."""
    bases = []
    for kind, eps, has_bias in itertools.product(kinds, candidates, (True, False)):
        if kind == "rms" or has_bias:
            bases.append(
                {"is_centred": kind == "layer", "is_variance": kind == "layer", "eps": eps, "has_bias": has_bias}
            )
    return bases


def _norm_changes(base: Settings, candidates: Sequence[float]) -> list[tuple[str, Settings]]:
    known = [*_NORM_CHANGES, *(_LAYER_CHANGES if base["is_centred"] else _RMS_CHANGES)]
    others = [eps for eps in candidates if eps != base["eps"]]
    return [*known, *((cause, {"eps": eps, **change}) for eps in others for cause, change in known)]


def _epsilons(candidate: Any, eps: float | None) -> tuple[float, ...]:
    """Return the epsilon in the attribute of a norm, else `eps`, else all usual values."""
    for name in ("eps", "epsilon", "variance_epsilon"):
        if isinstance(getattr(candidate, name, None), float):
            return (float(getattr(candidate, name)),)
    return _EPSILONS if eps is None else (eps,)


def _kinds(candidate: Any, kind: str | None, has_bias: bool) -> tuple[str, ...]:
    """Return the kinds of norm to compare with: `kind`, or those that fit the candidate's name and bias."""
    if kind is not None:
        return (kind,)
    if "rms" in f"{_name(candidate)} {' '.join(_norm_arguments(candidate))}".lower():
        return ("rms",)
    return ("layer",) if has_bias else ("layer", "rms")


def _gains(candidate: Any, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and bias of a norm module, or random ones for the arguments of a function."""
    if isinstance(candidate, nn.Module):
        gains: dict[str, Tensor] = {}
        for name, parameter in candidate.named_parameters():
            role = "bias" if re.search(r"beta|bias|shift|^b|offset", name) else "weight"
            if parameter.numel() != width or role in gains:
                raise CannotCompare(
                    f"a norm has a weight and perhaps a bias [{width}]; {name} is {list(parameter.shape)}"
                )
            gains[role] = parameter.detach()
    else:
        generator = torch.Generator().manual_seed(4)
        gains = {role: torch.randn(width, generator=generator) + 1.0 for role in _norm_arguments(candidate)}
    return gains.get("weight"), gains.get("bias")


def _norm_arguments(candidate: Any) -> list[str]:
    """Return the roles of a function's arguments after x: weight, bias, and eps if it is required."""
    if isinstance(candidate, nn.Module):
        return []
    roles = []
    for parameter in parameters_of(candidate)[1:]:
        low = parameter.name.lower()
        role = "bias" if re.search(r"bias|beta|^b$|shift", low) else "weight"
        role = "eps" if "eps" in low else role
        if role not in roles and (role != "eps" or parameter.default is parameter.empty):
            roles.append(role)
    return roles


def _loss(settings: Settings, logits: Tensor, ids: Tensor, pad: int) -> Tensor:
    """Return the next-token loss, computed with the mistakes in `settings`."""
    vocab, shift = logits.shape[-1], settings.get("shift", 1)
    match settings.get("shape", "usual"):
        case "transposed":
            logits = logits.transpose(1, 2).reshape(logits.shape)
        case "tokens first":
            logits = logits.transpose(0, 1).reshape(logits.shape)
    if shift >= 0:
        predicted, wanted = logits[:, : logits.shape[1] - shift], ids[:, shift:]
    else:
        predicted, wanted = logits[:, -shift:], ids[:, :shift]
    match settings.get("shape", "usual"):
        case "cut, transposed":
            predicted = predicted.transpose(1, 2).reshape(predicted.shape)
        case "cut, view":
            predicted = predicted.reshape(len(predicted), vocab, -1).transpose(1, 2)
        case "cut, tokens first":
            predicted = predicted.transpose(0, 1).reshape(predicted.shape)
        case "targets turned":
            wanted = wanted.T.reshape(wanted.shape)
    for _ in range(settings.get("softmaxes", 0)):
        predicted = predicted.softmax(-1)
    if settings.get("is_log_twice"):
        predicted = predicted.log_softmax(-1).exp()
    each = -predicted.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    real = wanted != pad
    if settings.get("padding", "left out") == "counted":
        real = torch.ones_like(real)
    each = each * real
    match settings.get("mean", "tokens"):
        case "all":
            return each.mean()
        case "sum":
            return each.sum()
        case "rows":
            return (each.sum(1) / real.sum(1)).mean()
        case "batch":
            return each.sum() / len(each)
    return each.sum() / real.sum()


_LOSS_CHANGES: Changes = (
    ("targets_not_shifted", {"shift": 0}), ("shifted_twice", {"shift": 2}), ("shifted_backwards", {"shift": -1}),
    ("padding_counted", {"padding": "counted"}), ("double_softmax", {"softmaxes": 1}),
    ("padding_counted", {"mean": "all"}),
    ("sum_for_mean", {"mean": "sum"}), ("sum_for_mean", {"mean": "batch"}), ("mean_of_rows", {"mean": "rows"}),
    *(("axes_reshaped", {"shape": shape}) for shape in
      ("transposed", "tokens first", "cut, transposed", "cut, view", "cut, tokens first", "targets turned")),
)  # fmt: skip


def _loss_changes(shifts: bool) -> Changes:
    """Return the known mistakes of a loss that shifts the ids itself, or that takes shifted targets."""
    if shifts:
        return _LOSS_CHANGES
    handed = []
    for cause, settings in _LOSS_CHANGES:
        shift = settings.get("shift", 1) - 1
        handed.append(("targets_shifted" if shift else cause, {**settings, "shift": shift}))
    return handed


@check_types
def loss(candidate: Callable[..., Any], *, vocab_size: int = 9, pad: int = 0, shifts: bool = True) -> Report:
    """Compare a hand-written next-token loss with the mathematics.

    Args:
        candidate: function of logits [batch, tokens, vocabulary] and ids [batch, tokens], then perhaps the padding id.
        vocab_size: number of entries of the vocabulary, at least 3.
        pad: padding id; its positions must not count in the loss.
        shifts: True if the candidate shifts the ids itself; False if it takes shifted targets.

    Returns:
        The report.

    Raises:
        InputError: vocab_size is below 3, or pad is outside the vocabulary.
        NotImplementedError: raised by the candidate if it is not written yet.
    """
    if vocab_size < 3 or not 0 <= pad < vocab_size:
        raise InputError(f"vocab_size must be at least 3 and larger than pad; got {vocab_size} and pad {pad}")
    subject, runner = f"{_name(candidate)}, vocabulary {vocab_size}", _runner(candidate)
    generator = torch.Generator().manual_seed(3)
    try:
        with runner.borrow():
            logits = torch.randn(_BATCH, 6, vocab_size, generator=generator)
            ids = torch.randint(1, vocab_size, (_BATCH, 6), generator=generator)
            ids = torch.where(ids == pad, (pad + 1) % vocab_size, ids)
            ids[0, 4:] = pad
            third = parameters_of(candidate)[2:3]
            takes_pad = [
                parameter
                for parameter in third
                if parameter.default is parameter.empty or re.search("pad|ignore", parameter.name)
            ]
            call = (logits, ids, pad) if takes_pad else (logits, ids)
            outputs = [_first_output(runner, [call], [(), (1,)]).reshape(())]
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    right_shift = 1 if shifts else 0
    changes = _loss_changes(shifts)

    def compute(settings: Settings) -> list[Tensor]:
        return [_loss({"shift": right_shift, **settings}, logits.double(), ids, pad)]

    return compare_outputs(
        subject, outputs, compute, changes, runner,
        ["two texts, one with padding"], where="the loss",
        mathematics=MISTAKES["padding_counted" if shifts else "targets_shifted"].math,
    )  # fmt: skip


def _rotate(settings: Settings, x: Tensor, theta: float, pairs: str) -> Tensor:
    """Return x [batch, heads, tokens, size] rotated by position. Source: arXiv 2104.09864, eq. 34."""
    if settings.get("axis") == 1:
        rest = {name: value for name, value in settings.items() if name != "axis"}
        return _rotate(rest, x.transpose(1, 2), theta, pairs).transpose(1, 2)
    size = x.shape[-1]
    step = torch.arange(0, size, 2, dtype=torch.float64) / size * settings.get("step", 1.0)
    position = torch.arange(x.shape[2], dtype=torch.float64)[:, None] + settings.get("offset", 0)
    angles = (
        position
        * float(settings.get("theta", theta)) ** (settings.get("power", -1.0) * step)
        * settings.get("sign", 1.0)
    )
    is_doubled = settings.get("angles", settings.get("pairs", pairs)) == "neighbours"
    full: Tensor = angles.repeat_interleave(2, -1) if is_doubled else torch.cat([angles, angles], -1)
    if settings.get("pairs", pairs) == "neighbours":
        other = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    else:
        other = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    if settings.get("is_swapped"):
        return x * full.sin() + other * full.cos()
    return x if settings.get("is_idle") else x * full.cos() + other * full.sin()


@check_types
def rope(
    candidate: Callable[..., Any], *, head_size: int = 8, theta: float = 10000.0,
    pairs: Literal["neighbours", "halves"] = "neighbours", token_axis: Literal[1, 2] = 2,
) -> Report:  # fmt: skip
    """Compare a hand-written rotation of queries and keys (RoPE) with the mathematics.

    Args:
        candidate: function of x [batch, heads, tokens, head size], then perhaps positions; or of queries and keys.
        head_size: number of features of one head, even.
        theta: base of the angles.
        pairs: features that rotate together: "neighbours" (2i, 2i + 1) or "halves" (i, i + size / 2).
        token_axis: axis of the tokens; 1 if the candidate reads [batch, tokens, heads, head size].

    Returns:
        The report.

    Raises:
        InputError: an odd head_size.
        NotImplementedError: raised by the candidate if it is not written yet.

    Source: arXiv 2104.09864, eq. 34.
    """
    if head_size < 2 or head_size % 2:
        raise InputError(f"head_size must be even; got {head_size}")
    subject, runner = f"{_name(candidate)}, head size {head_size}", _runner(candidate)
    generator = torch.Generator().manual_seed(3)
    try:
        with runner.borrow(draw=False):
            x = torch.randn(_BATCH, _HEADS, 5, head_size, generator=generator).transpose(2, token_axis)
            second = [
                parameter.name.lower()
                for parameter in parameters_of(candidate)[1:]
                if parameter.default is parameter.empty
            ]
            calls: list[tuple[Any, ...]] = [(x,)]
            if second:
                position = torch.arange(5)
                of_pair = second[0].startswith(("k", "xk", "x_k"))
                calls = [(x, x)] if of_pair else [(x, position), (x, position.expand(_BATCH, -1))]
            output = _first_output(runner, calls, [tuple(x.shape)]).transpose(2, token_axis)
            x = x.transpose(2, token_axis)
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    runner.bound = max(runner.bound, ROUNDED)
    other: Any = {"neighbours": "halves", "halves": "neighbours"}[pairs]
    changes = (
        ("interleaved_or_halves", {"pairs": other, "angles": other}),
        ("angles_and_pairs_mismatched", {"angles": other}),
        ("angles_and_pairs_mismatched", {"pairs": other, "angles": pairs}), ("wrong_sign", {"sign": -1.0}),
        ("position_off_by_one", {"offset": 1}), ("position_off_by_one", {"offset": -1}), ("double_step", {"step": 2.0}),
        ("half_step", {"step": 0.5}), ("sin_cos_swapped", {"is_swapped": True}), ("not_rotated", {"is_idle": True}),
        ("log_of_wrong_sign", {"power": 1.0}), ("position_of_wrong_axis", {"axis": 1}),
        *(("wrong_theta", {"theta": base}) for base in (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 10.0, 2e4) if base != theta),
    )  # fmt: skip
    return compare_outputs(
        subject, [output], lambda settings: [_rotate(settings, x.double(), theta, pairs)], changes, runner,
        ["five positions"], where=MISTAKES["wrong_sign"].where, mathematics=MISTAKES["wrong_sign"].math,
    )  # fmt: skip
