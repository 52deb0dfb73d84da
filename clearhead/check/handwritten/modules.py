"""What the outputs of any module depend on, found by changing its inputs. Legend: B batch, T tokens, V vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.arguments import checked
from clearhead.check.handwritten.calling import parameters_of
from clearhead.check.handwritten.libraries import spares_libraries
from clearhead.check.handwritten.report import CannotCompare, Finding, Report, judged
from clearhead.check.handwritten.running import ROUNDED, NoDropout, Runner, described, relative, shown_error, tensors_of
from clearhead.errors import InputError

Flow = Literal["causal", "full"]
_BATCH, _LENGTH, _PADDED = 2, 6, 2
_TOUCHED = 1e-10


@dataclass
class _Model:
    """A module that maps ids to logits, and how it takes a mask."""

    runner: Runner
    vocabulary: int
    mask_name: str | None
    error: Exception | None = None

    def __call__(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits [B, T, V] or another tensor [B, T, ...]."""
        named = {} if self.mask_name is None else {self.mask_name: mask}
        result = self.runner(ids, **named)
        for one in tensors_of(result):
            if one.dim() == 3 and one.shape[:2] == ids.shape:
                return one.detach().double()
        raise CannotCompare(f"it returns {described(result)}, not logits {[*ids.shape, 'vocabulary']}")


def _vocabulary(part: nn.Module, given: int | None) -> int:
    sizes = [one.num_embeddings for one in part.modules() if isinstance(one, nn.Embedding)]
    if given is None and not sizes:
        raise InputError("the module has no nn.Embedding: say how many ids it reads, as vocab_size=N")
    return given or max(sizes)


@checked
@spares_libraries
def module(
    part: Callable[..., Any], *, vocab_size: int | None = None, flow: Flow | None = None, length: int = _LENGTH
) -> Report:
    """Find what each output of a module depends on, and whether batches and padding change its results.

    One input after another is changed, and the outputs that change with it are those that read it.

    Args:
        part: maps ids [batch, tokens] and perhaps a mask [batch, tokens], True or 1 = a real token, to logits
            [batch, tokens, vocabulary].
        vocab_size: ids are below it; None: the rows of its largest table.
        flow: "causal" where no output may read a later input, "full" where each may read all; None: "full" if the first
            output reads the last input and "causal" otherwise.
        length: of the texts it is run on, at least 4.

    Returns:
        The report; its notes draw what reads what.

    Raises:
        InputError: not a module, or the size of the vocabulary is not known.
        NotImplementedError: the part is not written yet.
    """
    if not isinstance(part, nn.Module):
        raise InputError(f"expected an nn.Module; got {type(part).__name__}")
    if vocab_size is not None and vocab_size < 3:
        raise InputError(f"vocab_size must be at least 3; got {vocab_size}")
    if length < 4:
        raise InputError(f"length must be at least 4; got {length}")
    model = _Model(Runner(part, [part]), _vocabulary(part, vocab_size), _mask_name(part))
    subject = f"{type(part).__name__}, {length} tokens"
    try:
        return _judged(model, subject, flow, length)
    except CannotCompare as reason:
        return Report.refused(subject, reason)


def _mask_name(part: nn.Module) -> str | None:
    names = [one.name for one in parameters_of(part)[1:]]
    usual = [name for name in names if "mask" in name or "pad" in name]
    return next((name for name in usual if "attn" not in name), next(iter(usual), None))


def _judged(model: _Model, subject: str, flow: Flow | None, length: int) -> Report:
    runner = model.runner
    ids = torch.randint(1, model.vocabulary, (_BATCH, length), generator=torch.Generator().manual_seed(7))
    findings: list[Finding] = []
    for draw in (False, True):
        with runner.borrow(draw=draw):
            try:
                outputs = model(ids)
            except (CannotCompare, NotImplementedError):
                raise
            except Exception as error:  # noqa: BLE001 a stranger's code raises anything
                return judged(subject, (_raised(error, length),))
            reads, mates = _dependencies(model, ids, outputs)
            if not reads.any() and not draw:
                continue  # weights of zero, such as those of a fresh head, hide what depends on what
            if flow is None and "causal" in type(runner.part).__name__.lower():
                flow = "causal"
            found, expected = _flow_findings(reads, mates, flow)
            findings += [
                *found,
                *_invariances(model, ids, outputs, expected, bool(reads.triu(1).any()), bool(mates.any())),
            ]
        break
    if runner.is_random:
        findings.append(Finding.of("dropout_in_evaluation"))
    if runner.changes_weights:
        findings.append(Finding.of("weights_changed"))
    notes = [f"flow: {expected}", *_drawn(reads)]
    return judged(subject, findings, compared=("flow", "batch mates", "lengths", "padding"), notes=tuple(notes))


def _raised(error: Exception, length: int) -> Finding:
    """Return the finding of an error, which may be about a mask of one token less than the input."""
    sizes = {int(number) for number in re.findall(r"\d+", str(error))}
    short = {length - 1, (length - 1) ** 2} & sizes and {length, length**2} & sizes
    says = shown_error(error)
    if short:
        return Finding.of("mask_one_short", says=f"a mask of {length - 1} tokens meets an input of {length}: {says}")
    return Finding.of("raises", says=says)


def _other(model: _Model, ids: Tensor) -> Tensor:
    """Return other ids at every place; 0 is left out, because many models hide it as padding."""
    return 1 + (ids + torch.arange(ids.numel()).view(ids.shape) % max(model.vocabulary - 2, 1)) % (model.vocabulary - 1)


def _dependencies(model: _Model, ids: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return which outputs [T] of a row read which of its inputs [T], and of those of another row."""
    length, other = ids.shape[1], _other(model, ids)
    reads, mates = torch.zeros(length, length, dtype=torch.bool), torch.zeros(length, length, dtype=torch.bool)
    if not outputs.isfinite().all():
        raise CannotCompare("its output is not a number")
    scale = float(outputs.abs().max()) or 1.0
    for place in range(length):
        changed = ids.clone()
        changed[0, place] = other[0, place]
        difference = (model(changed) - outputs).nan_to_num(nan=float("inf")).abs().amax(-1) / scale
        reads[:, place], mates[:, place] = difference[0] > _TOUCHED, (difference[1:] > _TOUCHED).any(0)
    return reads, mates


def _flow_findings(reads: Tensor, mates: Tensor, flow: Flow | None) -> tuple[list[Finding], Flow]:
    """Return what reads what it should not, and the expected flow."""
    expected: Flow = flow or ("full" if bool(reads[0, -1]) else "causal")
    findings = []
    if bool(mates.any()):
        findings.append(Finding.of("batch_mates_read", says=f"one row of the batch reads another: {_places(mates)}"))
    if not reads.any():
        findings.append(Finding.of("nothing_read"))
    future = reads.triu(1)
    if expected == "causal" and bool(future.any()):
        if bool(reads.all()):
            return [*findings, Finding.of("no_causal_mask")], expected
        is_next = not bool(reads.triu(2).any()) or (bool(reads.diagonal(1).all()) and not bool(reads[0, 2:].any()))
        findings.append(Finding.of("future_by_one" if is_next else "future_read", says=_places(future)))
    return findings, expected


def _places(reads: Tensor) -> str:
    place, source = next(iter(reads.nonzero().tolist()))
    return f"the output at token {place} changes with the input at token {source}"


def _invariances(
    model: _Model, ids: Tensor, outputs: Tensor, flow: Flow, future: bool, mates: bool
) -> Iterator[Finding]:
    """Compare a batch with its rows, a text with its beginning, and padding on either side."""
    bound = max(model.runner.bound, ROUNDED if model.runner.dtype == torch.float32 else 0.0)
    try:
        single = relative(model(ids[:1]), outputs[:1])
        if single > bound and not mates:
            yield Finding.of("batch_mates_read", single, says="a text alone gives another output than in a batch")
        if flow == "causal" and not future:
            short = relative(model(ids[:, :-2]), outputs[:, :-2])
            if short > bound:
                yield Finding.of("future_read", short, says="the beginning of a text alone gives another output")
        if model.mask_name is not None:
            yield from _padding(model, ids, bound)
    except (CannotCompare, NotImplementedError):
        raise
    except Exception as error:  # noqa: BLE001 a stranger's code raises anything
        yield _raised(error, ids.shape[1])


def _padding(model: _Model, ids: Tensor, bound: float) -> Iterator[Finding]:
    """Compare two kinds of padding: with other ids, and on the other side."""
    real = torch.ones(ids.shape, dtype=torch.bool)
    real[:, -_PADDED:] = False
    alone = model(ids[:, :-_PADDED], real[:, :-_PADDED])
    changed = torch.where(real, ids, _other(model, ids))
    with NoDropout():
        right, other = model(ids, real)[:, :-_PADDED], model(changed, real)[:, :-_PADDED]
    if relative(other, right) > bound or relative(right, alone) > bound:
        yield Finding.of("padding_read", max(relative(other, right), relative(right, alone)))
    left = model(ids.roll(_PADDED, 1), real.roll(_PADDED, 1))[:, _PADDED:]
    if relative(left, right) > bound:
        yield Finding.of("padding_side", relative(left, right), severity="warning")


def _drawn(reads: Tensor) -> Iterator[str]:
    yield "what reads what (rows: outputs, columns: inputs):"
    for row in reads:
        yield "  " + " ".join("x" if one else "." for one in row.tolist())
