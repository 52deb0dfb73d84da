"""Compare a hand-written attention with the mathematics. Legend: B batch, T queries, S keys, D width."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.attention_mistakes import CONVENTIONS, Probe, Steps, attend, list_mistakes
from clearhead.apps.check.handwritten.attention_probes import (
    SHAPES,
    CallConvention,
    Outputs,
    Session,
    convert_mask,
    probes,
)
from clearhead.apps.check.handwritten.calling import MASK_NAMES, CallInputs, attention_arguments, call_arguments
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report, make_report
from clearhead.apps.check.handwritten.running import (
    ROUNDED,
    CandidateRunner,
    describe_call_error,
    describe_error,
    output_error,
    tensors_of,
)
from clearhead.apps.check.handwritten.weights import LinearMap, WeightAssignment, assign_weights, read_weights
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError

MaskMeaning = Literal["attend", "block", "additive", "ones", "any"]


@check_types
@spares_libraries
def attention(
    candidate: Callable[..., Any], *, width: int, heads: int, parameters: Mapping[str, Any] | None = None,
    mask: MaskMeaning | None = None, causal: bool | None = None, batch_first: bool | None = None,
) -> Report:  # fmt: skip
    """Compare a hand-written attention with the mathematics, and find the known mistake that explains a difference.

    Both compute in float64 on the same random weights; the candidate's weights are restored afterwards. If the outputs
    differ, each known mistake is put into the correct computation, until the numbers agree.

    Args:
        candidate: the attention, in one of three forms. A module called as candidate(query, memory=None, mask=None)
            or candidate(query, key, value, mask), with inputs [batch, tokens, width]. A function that also takes its
            weights. A function of queries, keys and values [batch, heads, tokens, head size] alone. Results after the
            first one are ignored.
        width: number of features of input and output.
        heads: number of heads.
        parameters: projections by role: query, key, value, out, or qkv for one weight [q|k|v]. Each is a linear layer
            or a tensor [out, in] or [in, out]. None means that names and shapes decide.
        mask: meaning of the mask: "attend" (True = may attend), "block" (True = hidden), "additive" (0 and -inf),
            "ones" (1 = may attend), or "any" of these. None means "attend" or "ones". If the argument has a name of
            PyTorch or transformers, such as key_padding_mask, None means their meaning.
        causal: True if the candidate hides the future itself; None accepts both.
        batch_first: False if inputs are [tokens, batch, width]; None means the candidate's `batch_first`, or True.

    Returns:
        The report. `ok` is True if the candidate is right; `print(report)` shows the mistakes.

    Raises:
        InputError: sizes that do not fit together, or parameters that are not weights.
        NotImplementedError: raised by the candidate if it is not written yet.

    Source: arXiv 1706.03762, section 3.2.
    """
    if width < 1 or heads < 1 or width % heads:
        raise InputError(f"width must be a multiple of heads; got width {width} and {heads} heads")
    subject = f"{getattr(candidate, '__name__', type(candidate).__name__)}, width {width}, {heads} heads"
    try:
        session = _open_session(candidate, width, heads, parameters, causal)
        conventions = _list_conventions(session, mask, batch_first)
        return _AttentionComparison(session, conventions, subject).report()
    except CannotCompare as reason:
        return Report.refuse(subject, reason)


def _open_session(
    candidate: Callable[..., Any], width: int, heads: int, parameters: Mapping[str, Any] | None, causal: bool | None
) -> Session:
    arguments = attention_arguments(candidate)
    numbers: dict[str, Any] = {"heads": heads, "width": width}
    modules = [module for module in (candidate, *(parameters or {}).values()) if isinstance(module, nn.Module)]
    owner = getattr(candidate, "__self__", None)
    modules += [owner] if isinstance(owner, nn.Module) else []
    modules += [item for value in (parameters or {}).values() if isinstance(value, list | tuple) for item in value
                if isinstance(item, nn.Module)]  # fmt: skip
    tensors = [tensor for tensor in (parameters or {}).values() if isinstance(tensor, Tensor)]
    runner = CandidateRunner(candidate, modules, tensors)
    handed = [argument.role for argument in arguments if argument.role.startswith(("weight ", "bias "))]
    is_split = not handed and not modules and parameters is None
    if causal is None and "causal" in getattr(candidate, "__name__", type(candidate).__name__).lower():
        causal = True
    session = Session(runner, arguments, width, heads, [], numbers, causal, is_split)
    with runner.borrow():
        if handed:
            session.assignments = _draw_weights(handed, numbers, width)
        elif is_split:
            eye = LinearMap(torch.eye(width))
            session.assignments = [
                WeightAssignment(dict.fromkeys(("query", "key", "value"), eye), "a function of q, k and v")
            ]
        elif parameters is None:
            session.assignments = read_weights(modules[0], width, heads)
        else:
            session.assignments = assign_weights(parameters, width, heads)
    return session


def _draw_weights(roles: Sequence[str], numbers: dict[str, Any], width: int) -> list[WeightAssignment]:
    """Draw weights for the arguments of an attention function; return the assignments for [out, in] and [in, out]."""
    generator = torch.Generator().manual_seed(17)
    for role in roles:
        rows = width * {"qkv": 3, "kv": 2}.get(role.split()[1], 1)
        shape = (rows, width) if role.startswith("weight") else (rows,)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * (
            1.3 * width**-0.5 if len(shape) > 1 else 0.5
        )
        numbers[role] = drawn
    names = {role.split()[1] for role in roles if role.startswith("weight")}
    values = {name: numbers[f"weight {name}"] for name in names}
    values |= {f"{name}_bias": numbers[f"bias {name}"] for name in names if f"bias {name}" in numbers}
    return assign_weights(values, width, numbers["heads"])


def _mask_meanings(session: Session, name: str, mask: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the correct meanings of a mask argument, such as "attend", and the meanings to try as mistakes."""
    if mask not in (None, "any"):
        return (("ones", "float ones") if mask == "ones" else (mask,)), ()
    if session.is_library or mask == "any":
        return ("attend", "block", "additive", "ones"), ()
    return MASK_NAMES.get(name, ("attend", "ones")), ("block", "additive")


def _list_conventions(session: Session, mask: str | None, batch_first: bool | None) -> list[CallConvention]:
    """Return the call conventions to try on the attention, the expected ones first."""
    candidate = session.runner.candidate
    first = getattr(candidate, "batch_first", True) if batch_first is None else batch_first
    conventions = []
    for is_batch_first in (first, not first):
        expected = is_batch_first == first
        if not session.mask_arguments:
            conventions.append(CallConvention(is_batch_first=is_batch_first, is_expected=expected))
        for name in session.mask_arguments:
            usual, others = _mask_meanings(session, name, mask)
            if not expected:
                usual, others = usual[:1], ()
            shapes = ("[batch, keys]",) if "padding" in name else SHAPES
            for meaning in dict.fromkeys((*usual, *others)):
                conventions += [
                    CallConvention(str(meaning), shape, name, is_batch_first, expected and meaning in usual)
                    for shape in shapes
                ]
    return [convention for convention in conventions if convention.is_expected] + [
        convention for convention in conventions if not convention.is_expected
    ]


_FROM_LIBRARIES = ("no_scaling", "output_projection_missing")
_Match = tuple[CallConvention, WeightAssignment, Steps, float]


class _AttentionComparison:
    """Comparison of one attention with the reference, whose settings are changed until the outputs are equal."""

    def __init__(self, session: Session, conventions: Sequence[CallConvention], subject: str) -> None:
        self.session, self.conventions, self.subject = session, conventions, subject
        self.runs: list[tuple[CallConvention, Outputs]] = []

    def report(self) -> Report:
        """Compare the attention with the correct one in float64, or in float32 if no float64 call succeeds."""
        session, runner = self.session, self.session.runner
        match = self._find_match()
        if not self.runs:
            runner.dtype, runner.bound = torch.float32, ROUNDED
            for name, value in session.numbers.items():
                if isinstance(value, Tensor):
                    session.numbers[name] = value.float()
            match = self._find_match()
            error = runner.error
            if not self.runs and isinstance(error, TypeError) and "it returns" in str(error):
                raise CannotCompare(f"{error}")
            if not self.runs:
                says = "it raised an error" if error is None else describe_call_error(runner.candidate, error)
                return make_report(self.subject, (Finding.of("raises", says=says),))
            session.notes.append("it does not run in float64 and was compared in float32")
        with runner.borrow():
            return self._judge(match)

    def _find_match(self) -> _Match | None:
        """Call the attention by each convention until its outputs are correct; return the match, or None."""
        with self.session.runner.borrow():
            for convention in self.conventions:
                outputs = self._outputs(convention)
                if outputs and (convention.argument is None or "with a mask" in outputs):
                    self.runs.append((convention, outputs))
                    if (match := self._match_output(convention, outputs)) is not None:
                        return match
            if not self.runs and (outputs := self._outputs(plain := replace(self.conventions[0], argument=None))):
                self.runs.append((plain, outputs))  # no mask of any form can be passed
                match, error = self._match_output(plain, outputs), self.session.runner.error
                if match is not None and error is not None:
                    raise CannotCompare(
                        f"with a mask of any form, {describe_call_error(self.session.runner.candidate, error)}"
                    )
                return match
        return None

    def _outputs(self, convention: CallConvention) -> Outputs:
        results = (self.session.run(probe, convention) for probe in probes(self.session, convention))
        return {result[0].name: result for result in results if result is not None}

    def _judge(self, match: _Match | None) -> Report:
        session, runner = self.session, self.session.runner
        if runner.is_random:
            session.findings.append(Finding.of("dropout_in_evaluation"))
        if runner.changes_weights:
            session.findings.append(Finding.of("weights_changed"))
        largest: float | None = None
        if match is not None:
            convention, assignment, steps, largest = match
            self._add_notes(convention, assignment, steps)
            if not convention.is_expected:
                # The numbers are right for another convention: report their error under the expected one.
                expected = [outputs for other, outputs in self.runs if other.is_expected]
                largest = self._largest(assignment, expected[0]) if expected else None
                session.findings.append(replace(self._convention_finding(convention), difference=largest))
            self._check_special_cases(convention, assignment, steps)
            compared = tuple(dict(self.runs)[convention])
        else:
            largest, compared = self._explain_difference()
        return make_report(self.subject, session.findings, compared=compared, largest=largest, bound=runner.bound,
            notes=tuple(session.notes),
        )  # fmt: skip

    def _base_steps(self, assignment: WeightAssignment) -> Iterator[Steps]:
        wanted = (False, True) if self.session.causal is None else (self.session.causal,)
        return (Steps(is_causal=causal) for causal in wanted)

    def _match_output(self, convention: CallConvention, outputs: Outputs) -> _Match | None:
        """Return the match of weight assignment and head layout for which the outputs are correct, or None."""
        for assignment in self.session.assignments:
            for base in self._base_steps(assignment):
                for layout in CONVENTIONS:
                    steps = replace(base, **layout)
                    error = self._error(steps, assignment, outputs)
                    if error <= self.session.runner.bound:
                        return convention, assignment, steps, error
        return None

    def _error(
        self, steps: Steps, assignment: WeightAssignment, outputs: Outputs, *, limit: float | None = None
    ) -> float:
        """Return the largest relative error of outputs against the reference with `steps`; infinite if that fails."""
        largest, compared = 0.0, 0
        projections = {
            role: LinearMap(projection.weight.double(), None if projection.bias is None else projection.bias.double())
            for role, projection in assignment.projections.items()
        }
        for probe, output in outputs.values():
            if steps.is_causal and probe.memory is not None and probe.memory.shape != probe.query.shape:
                continue
            as_double = replace(
                probe, query=probe.query.double(), memory=None if probe.memory is None else probe.memory.double()
            )
            try:
                wanted = attend(steps, projections, as_double, self.session.heads)
            except (RuntimeError, IndexError):
                return float("inf")
            if not wanted.isfinite().any() and output.isfinite().any():
                continue  # no query has a visible key, for which several results are usual
            compared += 1
            largest = max(largest, output_error(output, wanted))
            if largest > (self.session.runner.bound if limit is None else limit):
                return largest
        return largest if compared else float("inf")

    def _largest(self, assignment: WeightAssignment, outputs: Outputs) -> float:
        """Return the largest relative error of the outputs against the correct attention."""
        return max(
            min(
                self._error(base, assignment, {name: output}, limit=float("inf"))
                for base in self._base_steps(assignment)
            )
            for name, output in outputs.items()
        )

    def _explain_difference(self) -> tuple[float, tuple[str, ...]]:
        """Add findings of mistakes that explain the outputs, or one without a cause; return error and input names."""
        session = self.session
        outputs = self.runs[0][1]
        assignment = session.assignments[0]
        error = self._largest(assignment, outputs)
        if assignment.extra:
            raise CannotCompare(f"it has weights that an attention does not have: {', '.join(assignment.extra[:4])}")
        causes = self._explain()
        if not causes:
            session.findings.append(self._describe_unexplained(assignment, outputs, error))
        for cause, others in causes:
            is_variant = session.is_library and cause in _FROM_LIBRARIES
            finding = Finding.of(
                cause, error, alternatives=tuple(others), severity="warning" if is_variant else "wrong"
            )
            session.findings.append(finding)
        return error, tuple(outputs)

    def _explain(self) -> list[tuple[str, list[str]]]:
        """Return one or two known mistakes that reproduce the outputs, each with its equivalents; empty if none do.

        Equivalents are other known mistakes that give the same outputs.
        """
        session = self.session
        expected = [(convention, outputs) for convention, outputs in self.runs if convention.is_expected]
        for convention, outputs in expected or self.runs:
            for assignment in _likely_assignments(session.assignments):
                for base in self._base_steps(assignment):
                    for layout in CONVENTIONS[:1] if session.causal is None else CONVENTIONS:
                        single_causes = self._find_single_mistakes(
                            replace(base, **layout), assignment, outputs, convention
                        )
                        if single_causes:
                            return [(single_causes[0], single_causes[1:])]
        if session.is_library:
            return []
        convention, outputs = (expected or self.runs)[0]
        pairs = (
            self._find_mistake_pair(base, session.assignments[0], outputs, convention)
            for base in self._base_steps(session.assignments[0])
        )
        return [(cause, []) for cause in next(filter(None, pairs), ())]

    def _find_single_mistakes(
        self, base: Steps, assignment: WeightAssignment, outputs: Outputs, convention: CallConvention
    ) -> list[str]:
        causes = []
        for cause, steps in list_mistakes(
            base, assignment.projections, convention.argument is not None, self.session.has_memory
        ):
            if self.session.is_library and cause not in _FROM_LIBRARIES:
                continue
            if cause not in causes and self._error(steps, assignment, outputs) <= self.session.runner.bound:
                causes.append(cause)
        if "out" not in assignment.projections and not causes and self._error(base, assignment, outputs) == 0.0:
            causes.append("output_projection_missing")
        return causes

    def _find_mistake_pair(
        self, base: Steps, assignment: WeightAssignment, outputs: Outputs, convention: CallConvention
    ) -> tuple[str, ...]:
        """Return the names of two mistakes whose first settings together reproduce the outputs, or ()."""
        known = convention.argument is not None, self.session.has_memory
        for first, steps in _first_form_of_each(list_mistakes(base, assignment.projections, *known)):
            for second, both in _first_form_of_each(list_mistakes(steps, assignment.projections, *known)):
                if first < second and self._error(both, assignment, outputs) <= self.session.runner.bound:
                    return first, second
        return ()

    def _describe_unexplained(self, assignment: WeightAssignment, outputs: Outputs, error: float) -> Finding:
        """Return the finding for an unexplained difference; it names the test inputs with wrong and right outputs."""
        differ: list[str] = []
        agree: list[str] = []
        for name, output in outputs.items():
            error_here = self._error(Steps(is_causal=self.session.causal is True), assignment, {name: output})
            (agree if error_here <= self.session.runner.bound else differ).append(name)
        where = ", ".join(differ or outputs) + (f"; it agrees on {', '.join(agree)}" if agree else "")
        return Finding(
            where, "no known mistake gives these numbers", None,
            "softmax(q kᵀ / √d_head + mask) v, for each head; concat(heads) W_o",
            "compare step by step with clearhead.MultiHeadAttention on the same weights", error,
        )  # fmt: skip

    def _convention_finding(self, convention: CallConvention) -> Finding:
        if convention.meaning == "block":
            return Finding.of("mask_polarity")
        if convention.meaning == "additive":
            return Finding.of("mask_added_where_boolean")
        return Finding(
            "the axes of the input", "it attends over the batch: it reads [tokens, batch, width]",
            "batch_mixed_into_heads", "q, k, v: [batch, heads, tokens, head_size]",
            "set batch_first=True; if the layout is intended, check it with batch_first=False",
        )  # fmt: skip

    def _add_notes(self, convention: CallConvention, assignment: WeightAssignment, steps: Steps) -> None:
        session = self.session
        session.notes.append(assignment.note)
        if convention.argument is not None:
            meanings = {"attend": "True = may attend", "block": "True = hidden", "additive": "0 and -inf, added"}
            session.notes.append(f"mask {convention.shape}, {meanings.get(convention.meaning, '1 = may attend')}")
        if steps.is_causal:
            session.notes.append("it hides the future by itself")
        if not convention.is_batch_first:
            session.notes.append("it reads [tokens, batch, width]")
        if "out" not in assignment.projections and not session.is_split and session.heads > 1:
            if session.is_library:
                session.notes.append("it has no output projection")
            else:
                session.findings.append(Finding.of("output_projection_missing"))

    def _check_special_cases(self, convention: CallConvention, assignment: WeightAssignment, steps: Steps) -> None:
        """Add findings for a changed mask of the caller, fully masked rows, and failures in half precision."""
        session = self.session
        probe = next(iter(probes(session, convention)))
        masked = dict(self.runs)[convention].get("with a mask")
        if masked is not None:
            session.findings += self._empty_rows(convention, masked[0])
            if self._changes_mask(convention, masked[0]):
                session.findings.append(Finding.of("mask_changed_in_place"))
        session.findings += self._check_half_precision(convention, probe)

    def _empty_rows(self, convention: CallConvention, probe: Probe) -> Iterator[Finding]:
        assert probe.allowed is not None
        allowed = probe.allowed.clone()
        allowed[0, :, min(1, allowed.shape[2] - 1)] = False
        output = self.session.output(replace(probe, allowed=allowed), convention)
        if output is None:
            return
        row = output[0, 1]
        if not row.isfinite().all():
            yield Finding.of("masked_rows_nan", severity="warning")
            return
        changed = probe.query.clone()
        others = torch.ones(changed.shape[1], dtype=torch.bool)
        others[1] = False
        changed[0, others] += 1.0
        again = self.session.output(replace(probe, query=changed, allowed=allowed), convention)
        if again is not None and output_error(again[0, 1], row) > self.session.runner.bound:
            yield Finding.of("masked_rows_uniform", severity="warning")

    def _changes_mask(self, convention: CallConvention, probe: Probe) -> bool:
        session = self.session
        assert probe.allowed is not None
        mask = convert_mask(probe.allowed, convention, probe.query.dtype)
        inputs = CallInputs(session.to_layout(probe.query, convention), None, mask.clone(), convention.argument)
        args, named = call_arguments(session.runner.candidate, session.arguments, inputs, session.numbers)
        session.runner.candidate(*args, **named)
        return not torch.equal(inputs.mask if inputs.mask is not None else mask, mask)

    def _check_half_precision(self, convention: CallConvention, probe: Probe) -> Iterator[Finding]:
        """Yield a finding if float16 inputs cause an error of mixed dtypes, or an output of another dtype."""
        session, runner = self.session, self.session.runner
        half = torch.float16
        inputs = CallInputs(session.to_layout(probe.query, convention).to(half), None, None, None)
        numbers = {
            name: value.to(half) if isinstance(value, Tensor) else value for name, value in session.numbers.items()
        }
        args, named = call_arguments(runner.candidate, session.arguments, inputs, numbers)
        with runner.borrow(torch.float16):
            torch.set_default_dtype(torch.float32)
            try:
                tensors = tensors_of(runner.candidate(*args, **named))
            except Exception as error:  # noqa: BLE001 user code may raise anything
                if ("dtype" in str(error) and "Half" in str(error)) or "same dtype" in str(error):
                    yield Finding.of(
                        "fp16_promoted", says=f"half precision fails: {describe_error(error)}", severity="warning"
                    )
                return
        if tensors and tensors[0].dtype != half:
            yield Finding.of("fp16_promoted")


def _likely_assignments(assignments: Sequence[WeightAssignment]) -> list[WeightAssignment]:
    """Return at most four assignments of weights to query, key, value and output, for the search of mistakes.

    A fused weight is split only in the usual orders: [q|k|v], for all heads together or within each head.
    """
    usual = [
        assignment
        for assignment in assignments
        if not assignment.note.startswith("one weight [") or assignment.note.endswith(("[q|k|v]", "head"))
    ]
    return list(itertools.islice(usual, 4)) or list(assignments[:4])


def _first_form_of_each(steps_by_cause: Iterator[tuple[str, Steps]]) -> Iterator[tuple[str, Steps]]:
    """Yield each known mistake once, with the first of the settings that reproduce it."""
    seen: set[str] = set()
    for cause, steps in steps_by_cause:
        if cause not in seen:
            seen.add(cause)
            yield cause, steps
