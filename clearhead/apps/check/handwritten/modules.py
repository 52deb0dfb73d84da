"""Check of any module: the inputs on which its outputs depend, measured by changing the inputs.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.calling import parameters_of
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.mistakes import MISTAKES
from clearhead.apps.check.handwritten.polarity import TOUCHED, find_reversed_masks
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report, make_report
from clearhead.apps.check.handwritten.running import (
    ROUNDED,
    CandidateRunner,
    NoDropout,
    describe_call_error,
    describe_result,
    output_error,
    tensors_of,
)
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError

Shape = Literal["row", "query", "head", "square"]
Meaning = Literal["attend", "block", "additive"]
_IS_MASK = re.compile("mask|pad|block(?!_size)|keep")
_OF_SOURCE = re.compile("src|source|enc|mem|cross|input")
_OF_TARGET = re.compile("tgt|trg|target|dec|output|^y$")
_OF_VECTORS = re.compile("^enc(oder|oded)?(_|$)(?!.*(id|tok|inp))|mem|hidden|states")


@dataclass(frozen=True)
class ModelArguments:
    """Names of a model's arguments.

    Args:
        ids: argument with the ids of the text, or of the target.
        source: argument with the ids of the source; None for a model with one stack.
        masks: names of the mask arguments, each with True if it is required.
    """

    ids: str
    source: str | None
    masks: dict[str, bool]

    def is_of_source(self, mask: str) -> bool:
        """Return whether a mask hides tokens of the source."""
        if self.source is None or _OF_TARGET.search(mask.lower()):
            return False
        return _OF_SOURCE.search(mask.lower()) is not None or mask == next(iter(self.masks))


def read_arguments(candidate: Callable[..., Any]) -> ModelArguments:
    """Return the names of a model's arguments.

    Raises:
        CannotCompare: the meaning of an argument is not clear.
    """
    parameters = parameters_of(candidate)
    masks = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters[1:]
        if _IS_MASK.search(parameter.name.lower())
    }
    others = {
        parameter.name: parameter.default is parameter.empty for parameter in parameters if parameter.name not in masks
    }
    if not others:
        raise CannotCompare("it takes no argument that could be the ids: name the ids argument ids or x")
    passed = [name for name, is_required in others.items() if is_required] or list(others)[:1]
    if "decoder_input_ids" in others and "decoder_input_ids" not in passed:
        passed.append("decoder_input_ids")
    if len(passed) == 1:
        return ModelArguments(passed[0], None, _usual_masks(masks))
    ids, source = _target_and_source(passed)
    return ModelArguments(ids, source, masks)


def _target_and_source(names: list[str]) -> tuple[str, str]:
    """Return the names of the target ids and of the source ids.

    Raises:
        CannotCompare: the meaning of an argument is not clear.
    """
    first, second, *more = names
    first_is_target, second_is_target = (_OF_TARGET.search(name.lower()) is not None for name in (first, second))
    if _OF_VECTORS.search(second.lower()) or (_OF_VECTORS.search(first.lower()) and not first_is_target):
        raise CannotCompare(f"its argument '{second}' is a memory of vectors: compare the whole model, or its layers")
    if more or not (first_is_target or second_is_target):
        unknown = more[0] if more else second
        raise CannotCompare(f"no known value fits its argument '{unknown}'; give it a default")
    return (first, second) if first_is_target and not second_is_target else (second, first)


def _usual_masks(masks: dict[str, bool]) -> dict[str, bool]:
    """Return the masks to pass to one stack: the required ones, or the one that hides padding."""
    required = {name: True for name, is_required in masks.items() if is_required}
    usual = next((name for name in masks if "attn" not in name), next(iter(masks), None))
    return required or ({} if usual is None else {usual: False})


@dataclass(frozen=True)
class MaskForm:
    """Shape and meaning of masks.

    Args:
        shape: "row" [B, T], "query" [B, T or 1, T], "head" [B, 1, T or 1, T], or "square" [T, T] without padding.
        meaning: "attend" (True = may attend), "block" (True = hidden), or "additive" (0 and -inf).
        is_causal: True if masks of the text or target also hide the future; masks of shape "row" cannot.
    """

    shape: Shape = "row"
    meaning: Meaning = "attend"
    is_causal: bool = False

    def hides_padding(self, name: str) -> bool:
        """Return whether a mask of this name can hide padding."""
        return self.shape != "square" or "pad" in name

    def mask(self, name: str, real: Tensor, is_causal: bool) -> Tensor:
        """Build the mask of an argument from `real` [B, T], True = a real token."""
        length = real.shape[1]
        allowed = real
        future = torch.ones(length, length, dtype=torch.bool)
        future = future.tril() if is_causal else future
        if self.shape == "square" and "pad" not in name:
            allowed = future
        elif self.shape in ("query", "head"):
            allowed = real[:, None] & future if is_causal else real[:, None]
            allowed = allowed[:, None] if self.shape == "head" else allowed
        if self.meaning == "additive":
            return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
        return ~allowed if self.meaning == "block" else allowed

    def __str__(self) -> str:
        sizes = {"row": "[B, T]", "query": "[B, 1 or T, T]", "head": "[B, 1, 1 or T, T]", "square": "[T, T]"}
        says = {"attend": "True = may attend", "block": "True = hidden", "additive": "0 and -inf"}
        return f"{sizes[self.shape]}, {says[self.meaning]}"


def mask_forms(is_causal: bool) -> Iterator[MaskForm]:
    """Yield the forms of masks to try, the most usual first."""
    shapes: tuple[Shape, ...] = ("row", "query", "head", "square")
    meanings: tuple[Meaning, ...] = ("attend", "block", "additive")
    for meaning, shape in itertools.product(meanings, shapes):
        yield MaskForm(shape, meaning, is_causal)


Flow = Literal["causal", "full"]
_BATCH, _LENGTH, _SOURCE_LENGTH, _PADDED = 2, 6, 7, 2


@dataclass
class HandwrittenModel:
    """Hand-written module that maps ids to logits, with the source ids and the form of masks to call it with.

    Args:
        runner: runner of the module.
        vocabulary: number of ids.
        inputs: names of the module's arguments.
        masks: form of its masks; None means that no mask is passed.
        source: source ids [B, S]; None for a model with one stack.
    """

    runner: CandidateRunner
    vocabulary: int
    inputs: ModelArguments
    masks: MaskForm | None = None
    source: Tensor | None = None

    def __call__(
        self, ids: Tensor, real: Tensor | None = None, source: Tensor | None = None, real_source: Tensor | None = None
    ) -> Tensor:
        """Return the logits [B, T, V] or another tensor [B, T, ...]; None as `real` means that all tokens are real."""
        source = self.source if source is None else source
        named: dict[str, Any] = {} if self.inputs.source is None else {self.inputs.source: source, self.inputs.ids: ids}
        for name, is_required in self.inputs.masks.items():
            is_of_source = self.inputs.is_of_source(name)
            tokens, is_real = (source, real_source) if is_of_source else (ids, real)
            assert tokens is not None
            if self.masks is None or (is_real is None and not is_required and self.inputs.source is None):
                named[name] = None
                continue
            is_real = torch.ones(tokens.shape, dtype=torch.bool) if is_real is None else is_real
            named[name] = self.masks.mask(name, is_real, self.masks.is_causal and not is_of_source)
        args = () if self.inputs.ids in named else (ids,)
        result = self.runner(*args, **named)
        for tensor in tensors_of(result):
            if tensor.dim() == 3 and tensor.shape[:2] == ids.shape:
                return tensor.detach().double()
            if source is not None and tensor.dim() == 3 and tensor.shape[:2] == source.shape:
                labels = self.inputs.ids
                raise CannotCompare(f"its output belongs to the tokens of the source: give '{labels}' a default")
        raise CannotCompare(f"it returns {describe_result(result)}, not logits {[*ids.shape, 'vocabulary']}")

    def can_hide_padding(self, *, of_source: bool) -> bool:
        """Return whether a mask argument can mark padding: of the source, or of the text of a one-stack model."""
        if self.masks is None or (self.source is not None and not of_source):
            return False
        return any(
            self.masks.hides_padding(name) and self.inputs.is_of_source(name) == of_source for name in self.inputs.masks
        )


def draw_ids(model: HandwrittenModel, length: int, seed: int) -> Tensor:
    """Draw ids [B, length], without the lowest ids, which many models hide as padding."""
    return torch.randint(
        _lowest(model), model.vocabulary, (_BATCH, length), generator=torch.Generator().manual_seed(seed)
    )


def _lowest(model: HandwrittenModel) -> int:
    return 4 if model.vocabulary >= 12 else 1


def _vocabulary(candidate: nn.Module, vocab_size: int | None) -> int:
    sizes = [submodule.num_embeddings for submodule in candidate.modules() if isinstance(submodule, nn.Embedding)]
    if vocab_size is None and not sizes:
        raise InputError("the module has no nn.Embedding: pass the number of its ids as vocab_size=N")
    # A table of positions may have more rows than that of ids, and a table of segments has few.
    return vocab_size or min((size for size in sizes if size >= 8), default=max(sizes))


def read_model(candidate: nn.Module, vocab_size: int | None) -> HandwrittenModel:
    """Return a module with the names of its arguments and the size of its vocabulary.

    Raises:
        CannotCompare: the meaning of an argument is not clear.
        InputError: the size of the vocabulary is not known.
    """
    model = HandwrittenModel(
        CandidateRunner(candidate, [candidate]), _vocabulary(candidate, vocab_size), read_arguments(candidate)
    )
    if model.inputs.source is not None:
        model.source = draw_ids(model, _SOURCE_LENGTH, 13)
    return model


@check_types
@spares_libraries
def module(
    candidate: Callable[..., Any], *, vocab_size: int | None = None, flow: Flow | None = None, length: int = _LENGTH
) -> Report:
    """Find the inputs on which each output of a module depends, and whether batches and padding change its results.

    Each input token is changed in turn; outputs that change depend on this token.

    Args:
        candidate: module that maps ids [batch, tokens], perhaps with a mask, to logits [batch, tokens, vocabulary]. It
            may also map the ids of a source and of a target, perhaps with masks, to the logits of the target. A mask
            [batch, tokens] is True or 1 at real tokens. For masks of another shape, or a mask for each of two stacks,
            the check tries the usual forms. It takes the form that hides the most: the future, and padding.
        vocab_size: number of ids; None means the rows of the smallest embedding table with at least 8 rows.
        flow: "causal" if no output may read a later input, "full" if each may read all. None means "causal" for a
            model with a source and a target, or with "causal" in its class name. For other models, None means "full"
            if the first output reads the last input, else "causal".
        length: length of the test texts, at least 4.

    Returns:
        The report; its notes draw the dependencies.

    Raises:
        InputError: not a module, or the size of the vocabulary is not known.
        NotImplementedError: raised by the candidate if it is not written yet.
    """
    if not isinstance(candidate, nn.Module):
        raise InputError(f"expected an nn.Module; got {type(candidate).__name__}")
    if vocab_size is not None and vocab_size < 3:
        raise InputError(f"vocab_size must be at least 3; got {vocab_size}")
    if length < 4:
        raise InputError(f"length must be at least 4; got {length}")
    subject = f"{type(candidate).__name__}, {length} tokens"
    try:
        return _judge(read_model(candidate, vocab_size), subject, flow, length)
    except CannotCompare as reason:
        return Report.refuse(subject, reason)


def _reversed_mask_findings(model: HandwrittenModel, ids: Tensor, flow: Flow | None) -> list[Finding]:
    """Return a list with a finding about submodules whose mask has the wrong polarity, or an empty list."""
    network = model.runner.candidate
    assert isinstance(network, nn.Module)
    is_causal = flow == "causal" or (flow is None and _is_decoder(model))
    lengths = [sequences.shape[1] for sequences in (ids, model.source) if sequences is not None]
    paths = find_reversed_masks(network, lambda: model(ids), lengths, is_causal=is_causal)
    says = "the mask has the wrong polarity: it hides what should be seen, and shows what should be hidden"
    fix = "pass ~mask, or invert it in the attention; nn.MultiheadAttention hides where its mask is True"
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    where = f"{', '.join(paths[:4])}{more}: the mask"
    return [Finding.of("mask_polarity", where=where, says=says, fix=fix)] if paths else []


def _is_decoder(model: HandwrittenModel) -> bool:
    """Return True if the class name of the model contains "decoder" or ends in "lm"."""
    return re.search("decoder|lm$", type(model.runner.candidate).__name__.lower()) is not None


def expected_flow(model: HandwrittenModel, flow: Flow | None) -> Flow | None:
    """Return the flow set by the caller, or implied by two stacks or by the module's name; None if unknown."""
    name = type(model.runner.candidate).__name__.lower()
    return flow or ("causal" if model.inputs.source is not None or "causal" in name else None)


def _judge(model: HandwrittenModel, subject: str, flow: Flow | None, length: int) -> Report:
    runner, ids, flow = model.runner, draw_ids(model, length, 7), expected_flow(model, flow)
    findings: list[Finding] = []
    for draw in (False, True):
        with runner.borrow(draw=draw):
            model, error = with_masks(model, ids, flow)
            if error is not None:
                return make_report(subject, (_error_finding(model, error, length),))
            outputs = model(ids)
            if mask_findings := _reversed_mask_findings(model, ids, flow):
                return make_report(subject, mask_findings, compared=("masks",))
            reads, mates = _dependencies(model, model, ids, outputs)
            if not reads.any() and not draw:
                continue  # weights of zero, such as those of a fresh head, hide what depends on what
            flow_findings, expected = _flow_findings(reads, mates, flow)
            findings += [*flow_findings, *_source_findings(model, ids, outputs, reads)]
            findings += _invariances(model, ids, outputs, expected, bool(reads.triu(1).any()), bool(mates.any()))
        break
    if runner.is_random:
        findings.append(Finding.of("dropout_in_evaluation"))
    if runner.changes_weights:
        findings.append(Finding.of("weights_changed"))
    notes = [f"flow: {expected}", *_drawing_lines(reads)]
    if model.masks is not None and model.masks != MaskForm():
        notes.insert(0, f"masks: {model.masks}")
    stacks = ["flow"] if model.source is None else ["flow", "source"]
    return make_report(subject, findings, compared=(*stacks, "batch mates", "lengths", "padding"), notes=tuple(notes))


def with_masks(model: HandwrittenModel, ids: Tensor, flow: Flow | None) -> tuple[HandwrittenModel, Exception | None]:
    """Find the working mask form that hides most; return the model with this form and None, or with the error.

    Raises:
        CannotCompare: the module raises an error that the passed masks may have caused.
    """
    inputs = model.inputs
    is_simple = inputs.source is None and not any(inputs.masks.values())
    is_causal = flow == "causal" or (flow is None and _is_decoder(model))
    latest: tuple[int, Exception] | None = None
    best: tuple[int, HandwrittenModel] | None = None
    for form in mask_forms(is_causal) if inputs.masks else (None,):
        trial = replace(model, masks=form)
        try:
            output = trial(ids)
            score = _hiding_score(trial, ids, output, is_causal) if output.isfinite().all() else -1
            if is_simple or score == 1 + is_causal:
                return trial, None
        except (CannotCompare, NotImplementedError):
            raise
        except Exception as error:  # noqa: BLE001 user code may raise anything
            # Keep the error of the mask form with which the model computed the most operations: that form is right.
            num_operations = model.runner.watch.num_operations
            if latest is None or num_operations > latest[0]:
                latest = num_operations, error
            continue
        if best is None or score > best[0]:
            best = (score, trial)
    if best is not None:
        return best[1], None
    assert latest is not None
    if not is_simple and _error_finding(model, latest[1], ids.shape[1]).cause != "mask_one_short":
        raise CannotCompare(describe_call_error(model.runner.candidate, latest[1]))
    return model, latest[1]


def _hiding_score(model: HandwrittenModel, ids: Tensor, output: Tensor, is_causal: bool) -> int:
    """Return the number of token kinds that the masks hide, 0 to 2: the future, and padding (of the source, if any)."""
    score, other = 0, _other_ids(model, ids)
    if is_causal:
        later = torch.cat([ids[:, :-1], other[:, -1:]], 1)
        score += output_error(model(later)[:, :-1], output[:, :-1]) <= model.runner.bound
    for of_source in (False, True):
        tokens = model.source if of_source else ids
        if tokens is not None and model.can_hide_padding(of_source=of_source):
            score += not list(_padding(model, ids, model.runner.bound, of_source, sides=False))
    return score


def _error_finding(model: HandwrittenModel, error: Exception, length: int) -> Finding:
    """Return the finding for an error; a mask one token shorter than the input is recognized by the sizes."""
    sizes = {int(number) for number in re.findall(r"\d+", str(error))}
    short = {length - 1, (length - 1) ** 2} & sizes and {length, length**2} & sizes
    says = describe_call_error(model.runner.candidate, error)
    if short:
        return Finding.of("mask_one_short", says=f"mask and input differ by a token: {length - 1} and {length}: {says}")
    return Finding.of("raises", says=says)


def _other_ids(model: HandwrittenModel, ids: Tensor) -> Tensor:
    """Return ids that differ from `ids` at every position, without the lowest ids, which are often special."""
    low = _lowest(model)
    count = model.vocabulary - low
    step = 1 + torch.arange(ids.numel()).view(ids.shape) % max(count - 1, 1)
    return low + (ids - low + step) % count


def _dependencies(
    model: HandwrittenModel, run: Callable[[Tensor], Tensor], ids: Tensor, outputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two bool tables [outputs, inputs]: dependencies within the first row, and of other rows on it."""
    size, other = (outputs.shape[1], ids.shape[1]), _other_ids(model, ids)
    reads, mates = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    if not outputs.isfinite().all():
        raise CannotCompare("its output contains NaN or infinity")
    scale = float(outputs.abs().max()) or 1.0
    for position in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, position] = other[0, position]
        difference = (run(changed) - outputs).nan_to_num(nan=float("inf")).abs().amax(-1) / scale
        reads[:, position], mates[:, position] = difference[0] > TOUCHED, (difference[1:] > TOUCHED).any(0)
    return reads, mates


def _flow_findings(reads: Tensor, mates: Tensor, flow: Flow | None) -> tuple[list[Finding], Flow]:
    """Return the findings about forbidden dependencies, and the expected flow."""
    expected: Flow = flow or ("full" if bool(reads[0, -1]) else "causal")
    findings = []
    if bool(mates.any()):
        findings.append(
            Finding.of("batch_mates_read", says=f"one row of the batch reads another: {_describe_first(mates)}")
        )
    if not reads.any():
        findings.append(Finding.of("nothing_read"))
    future = reads.triu(1)
    if expected == "causal" and bool(future.any()):
        if bool(reads.all()):
            return [*findings, Finding.of("no_causal_mask")], expected
        is_next = not bool(reads.triu(2).any()) or (bool(reads.diagonal(1).all()) and not bool(reads[0, 2:].any()))
        findings.append(Finding.of("future_by_one" if is_next else "future_read", says=_describe_first(future)))
    return findings, expected


def _source_findings(model: HandwrittenModel, ids: Tensor, outputs: Tensor, target_reads: Tensor) -> Iterator[Finding]:
    """Yield findings if outputs ignore a source token, or the order of the tokens that they read.

    Raises:
        CannotCompare: no output reads the target, so the second argument is no target.
    """
    source = model.source
    if source is None:
        if bool(target_reads.all()) and output_error(model(ids.flip(1)).flip(1), outputs) <= model.runner.bound:
            yield Finding.of("positions_missing")
        return

    def run(changed: Tensor) -> Tensor:
        return model(ids, source=changed)

    reads, mates = _dependencies(model, run, source, outputs)
    if reads.any() and not target_reads.any():
        raise CannotCompare(f"no output reads '{model.inputs.ids}', so it may hold labels: give it a default")
    if bool(mates.any()):
        says = "one row of the batch reads the source of another"
        yield Finding.of("batch_mates_read", says=says)
    if not bool(reads.all()):
        position, token = (~reads).nonzero()[0].tolist()
        says = f"the output at token {position} does not change with token {token} of the source"
        yield Finding.of("source_not_read", says=says if reads.any() else "no output reads the source")
    elif output_error(run(source.flip(1)), outputs) <= model.runner.bound:
        yield Finding.of("positions_missing")


def _describe_first(reads: Tensor) -> str:
    position, source = next(iter(reads.nonzero().tolist()))
    return f"the output at token {position} changes with the input at token {source}"


def _invariances(
    model: HandwrittenModel, ids: Tensor, outputs: Tensor, flow: Flow, future: bool, mates: bool
) -> Iterator[Finding]:
    """Yield findings if a row alone, the beginning of a text, or padding changes the outputs."""
    bound = max(model.runner.bound, ROUNDED if model.runner.dtype == torch.float32 else 0.0)
    try:
        first = None if model.source is None else model.source[:1]
        single = output_error(model(ids[:1], source=first), outputs[:1])
        if single > bound and not mates:
            yield Finding.of("batch_mates_read", single, says="a text alone gives another output than in a batch")
        if flow == "causal" and not future:
            short = output_error(model(ids[:, :-2]), outputs[:, :-2])
            if short > bound:
                yield Finding.of(
                    "future_read",
                    short,
                    says="the beginning of a text gives another output alone than in the text",
                )
        for of_source in (False, True):
            if model.can_hide_padding(of_source=of_source):
                yield from _padding(model, ids, bound, of_source, sides=not of_source and model.source is None)
    except (CannotCompare, NotImplementedError):
        raise
    except Exception as error:  # noqa: BLE001 user code may raise anything
        yield _error_finding(model, error, ids.shape[1])


def _padding(model: HandwrittenModel, ids: Tensor, bound: float, of_source: bool, *, sides: bool) -> Iterator[Finding]:
    """Compare outputs of a padded batch with those for other padding ids, no padding and, if `sides`, left padding."""
    tokens = model.source if of_source else ids
    assert tokens is not None
    real_tokens = slice(None) if of_source else slice(None, -_PADDED)

    def run(changed: Tensor, real: Tensor) -> Tensor:
        return model(ids, source=changed, real_source=real) if of_source else model(changed, real)

    real = torch.ones(tokens.shape, dtype=torch.bool)
    real[:, -_PADDED:] = False
    alone = run(tokens[:, :-_PADDED], real[:, :-_PADDED])
    changed = torch.where(real, tokens, _other_ids(model, tokens))
    with NoDropout():
        right, other = run(tokens, real)[:, real_tokens], run(changed, real)[:, real_tokens]
    if output_error(other, right) > bound or output_error(right, alone) > bound:
        says = "outputs read padding of the source" if of_source else MISTAKES["padding_read"].says
        yield Finding.of("padding_read", max(output_error(other, right), output_error(right, alone)), says=says)
    if sides:
        left = run(tokens.roll(_PADDED, 1), real.roll(_PADDED, 1))[:, _PADDED:]
        if output_error(left, right) > bound:
            yield Finding.of("padding_side", output_error(left, right), severity="warning")


def _drawing_lines(reads: Tensor) -> Iterator[str]:
    yield "dependencies (rows: outputs, columns: inputs):"
    for row in reads:
        yield "  " + " ".join("x" if is_read else "." for is_read in row.tolist())
