"""A hand-written attention compared with the mathematics on the same weights. Legend: B batch, T queries, S keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.attention_mistakes import CONVENTIONS, Probe, Steps, attend, mistakes
from clearhead.apps.check.handwritten.attention_probes import SHAPES, Outputs, Session, Way, probes, written_mask
from clearhead.apps.check.handwritten.calling import MASK_NAMES, Given, attention_arguments, call_arguments
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report, judged
from clearhead.apps.check.handwritten.running import ROUNDED, Runner, output_error, raised, shown_error, tensors_of
from clearhead.apps.check.handwritten.weights import Projection, Reading, read_weights, said_weights
from clearhead.base.arguments import checked
from clearhead.base.errors import InputError

MaskMeaning = Literal["attend", "block", "additive", "ones", "any"]


@checked
@spares_libraries
def attention(
    part: Callable[..., Any], *, width: int, heads: int, parameters: Mapping[str, Any] | None = None,
    mask: MaskMeaning | None = None, causal: bool | None = None, batch_first: bool | None = None,
) -> Report:  # fmt: skip
    """Compare a hand-written attention with the mathematics, and find which known mistake explains a difference.

    Both compute in float64 on the same drawn weights; the part gets its own weights back. Where its output differs, one
    step of the right computation after another is changed until the numbers agree.

    Args:
        part: a module called as part(query, memory=None, mask=None) or part(query, key, value, mask), with
            [batch, tokens, width]; or a function that is handed its weights; or one of queries, keys and values
            [batch, heads, tokens, head size] alone. Extra results behind the output are left aside.
        width: of the input and the output.
        heads: how many.
        parameters: its projections by role: query, key, value, out, or qkv for one weight [q|k|v]; linear layers, or
            tensors [out, in] or [in, out]; None: by names and shapes.
        mask: the meaning of its mask: True = may attend, True = blocked, 0 and -inf that are added, 1 = may attend, or
            any of these; None: True = may attend, or the meaning that PyTorch's names of arguments have.
        causal: whether it hides the future by itself; None: either is right.
        batch_first: False where it reads [tokens, batch, width]; None: as its attribute of that name says, or True.

    Returns:
        The report; `ok` says whether the part is right, and printing it says what is wrong.

    Raises:
        InputError: sizes that do not fit together, or parameters that are not weights.
        NotImplementedError: the part is not written yet.

    Source: arXiv 1706.03762, section 3.2.
    """
    if width < 1 or heads < 1 or width % heads:
        raise InputError(f"width must be a multiple of heads; got width {width} and {heads} heads")
    subject = f"{getattr(part, '__name__', type(part).__name__)}, width {width}, {heads} heads"
    try:
        session = _prepared(part, width, heads, parameters, causal)
        ways = _ways(session, mask, batch_first)
        return _Comparison(session, ways, subject).report()
    except CannotCompare as reason:
        return Report.refused(subject, reason)


def _prepared(
    part: Callable[..., Any], width: int, heads: int, parameters: Mapping[str, Any] | None, causal: bool | None
) -> Session:
    arguments = attention_arguments(part)
    numbers: dict[str, Any] = {"heads": heads, "width": width}
    modules = [one for one in (part, *(parameters or {}).values()) if isinstance(one, nn.Module)]
    owner = getattr(part, "__self__", None)
    modules += [owner] if isinstance(owner, nn.Module) else []
    modules += [one for value in (parameters or {}).values() if isinstance(value, list | tuple) for one in value
                if isinstance(one, nn.Module)]  # fmt: skip
    tensors = [one for one in (parameters or {}).values() if isinstance(one, Tensor)]
    runner = Runner(part, modules, tensors)
    handed = [one.role for one in arguments if one.role.startswith(("weight ", "bias "))]
    is_split = not handed and not modules and parameters is None
    if causal is None and "causal" in getattr(part, "__name__", type(part).__name__).lower():
        causal = True
    session = Session(runner, arguments, width, heads, [], numbers, causal, is_split)
    with runner.borrow():
        if handed:
            session.readings = _handed(handed, numbers, width)
        elif is_split:
            eye = Projection(torch.eye(width))
            session.readings = [Reading(dict.fromkeys(("query", "key", "value"), eye), "a function of q, k and v")]
        elif parameters is None:
            session.readings = read_weights(modules[0], width, heads)
        else:
            session.readings = said_weights(parameters, width, heads)
    return session


def _handed(roles: Sequence[str], numbers: dict[str, Any], width: int) -> list[Reading]:
    """Draw the weights that a function is handed; the readings are [out, in] and [in, out]."""
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
    return said_weights(values, width, numbers["heads"])


def _meanings(session: Session, name: str, mask: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a mask may mean, and what it could mean by mistake."""
    if mask not in (None, "any"):
        return (("ones", "float ones") if mask == "ones" else (mask,)), ()
    if session.is_library or mask == "any":
        return ("attend", "block", "additive", "ones"), ()
    return MASK_NAMES.get(name, ("attend", "ones")), ("block", "additive")


def _ways(session: Session, mask: str | None, batch_first: bool | None) -> list[Way]:
    """Return the ways to call a part, those that it should be called in first."""
    part = session.runner.part
    first = getattr(part, "batch_first", True) if batch_first is None else batch_first
    found = []
    for is_batch_first in (first, not first):
        expected = is_batch_first == first
        if not session.mask_arguments:
            found.append(Way(is_batch_first=is_batch_first, is_expected=expected))
        for name in session.mask_arguments:
            usual, others = _meanings(session, name, mask)
            if not expected:
                usual, others = usual[:1], ()
            shapes = ("[batch, keys]",) if "padding" in name else SHAPES
            for meaning in dict.fromkeys((*usual, *others)):
                found += [
                    Way(str(meaning), shape, name, is_batch_first, expected and meaning in usual) for shape in shapes
                ]
    return [way for way in found if way.is_expected] + [way for way in found if not way.is_expected]


_FROM_LIBRARIES = ("no_scaling", "output_projection_missing")
_Match = tuple[Way, Reading, Steps, float]


class _Comparison:
    """The search for the right computation, or for the mistake that explains the output."""

    def __init__(self, session: Session, ways: Sequence[Way], subject: str) -> None:
        self.session, self.ways, self.subject = session, ways, subject
        self.ran: list[tuple[Way, Outputs]] = []

    def report(self) -> Report:
        """Compare, in float32 where the part does not take float64."""
        session, runner = self.session, self.session.runner
        match = self._search()
        if not self.ran:
            runner.dtype, runner.bound = torch.float32, ROUNDED
            for name, value in session.numbers.items():
                if isinstance(value, Tensor):
                    session.numbers[name] = value.float()
            match = self._search()
            error = runner.error
            if not self.ran and isinstance(error, TypeError) and "it returns" in str(error):
                raise CannotCompare(f"{error}")
            if not self.ran:
                says = "it raised an error" if error is None else raised(runner.part, error)
                return judged(self.subject, (Finding.of("raises", says=says),))
            session.notes.append("it does not run in float64 and was compared in float32")
        with runner.borrow():
            return self._judged(match)

    def _search(self) -> _Match | None:
        """Run the part in one way after another until it is right in one, and return that one."""
        with self.session.runner.borrow():
            for way in self.ways:
                outputs = self._outputs(way)
                if outputs and (way.argument is None or "with a mask" in outputs):
                    self.ran.append((way, outputs))
                    if (match := self._right(way, outputs)) is not None:
                        return match
            if not self.ran and (outputs := self._outputs(plain := replace(self.ways[0], argument=None))):
                self.ran.append((plain, outputs))  # no mask of any form can be passed
                match, error = self._right(plain, outputs), self.session.runner.error
                if match is not None and error is not None:
                    raise CannotCompare(f"with a mask of any form, {raised(self.session.runner.part, error)}")
                return match
        return None

    def _outputs(self, way: Way) -> Outputs:
        found = (self.session.run(probe, way) for probe in probes(self.session, way))
        return {one[0].name: one for one in found if one is not None}

    def _judged(self, match: _Match | None) -> Report:
        session, runner = self.session, self.session.runner
        if runner.is_random:
            session.findings.append(Finding.of("dropout_in_evaluation"))
        if runner.changes_weights:
            session.findings.append(Finding.of("weights_changed"))
        largest: float | None = None
        if match is not None:
            way, reading, steps, largest = match
            self._note(way, reading, steps)
            if not way.is_expected:
                # The numbers are right for another convention: report their error under the expected one.
                expected = [outputs for other, outputs in self.ran if other.is_expected]
                largest = self._largest(reading, expected[0]) if expected else None
                session.findings.append(replace(self._convention(way), difference=largest))
            self._special(way, reading, steps)
            compared = tuple(dict(self.ran)[way])
        else:
            largest, compared = self._wrong()
        return judged(self.subject, session.findings, compared=compared, largest=largest, bound=runner.bound,
            notes=tuple(session.notes),
        )  # fmt: skip

    def _bases(self, reading: Reading) -> Iterator[Steps]:
        wanted = (False, True) if self.session.causal is None else (self.session.causal,)
        return (Steps(is_causal=causal) for causal in wanted)

    def _right(self, way: Way, outputs: Outputs) -> _Match | None:
        """Return the reading and the layout in which the part is right."""
        for reading in self.session.readings:
            for base in self._bases(reading):
                for layout in CONVENTIONS:
                    steps = replace(base, **layout)
                    error = self._error(steps, reading, outputs)
                    if error <= self.session.runner.bound:
                        return way, reading, steps, error
        return None

    def _error(self, steps: Steps, reading: Reading, outputs: Outputs, *, limit: float | None = None) -> float:
        """Return the largest difference; infinite where the steps do not run."""
        largest, compared = 0.0, 0
        projections = {
            role: Projection(one.weight.double(), None if one.bias is None else one.bias.double())
            for role, one in reading.projections.items()
        }
        for probe, found in outputs.values():
            if steps.is_causal and probe.memory is not None and probe.memory.shape != probe.query.shape:
                continue
            as_double = replace(
                probe, query=probe.query.double(), memory=None if probe.memory is None else probe.memory.double()
            )
            try:
                wanted = attend(steps, projections, as_double, self.session.heads)
            except (RuntimeError, IndexError):
                return float("inf")
            if not wanted.isfinite().any() and found.isfinite().any():
                continue  # every query sees nothing, which is computed in several ways
            compared += 1
            largest = max(largest, output_error(found, wanted))
            if largest > (self.session.runner.bound if limit is None else limit):
                return largest
        return largest if compared else float("inf")

    def _largest(self, reading: Reading, outputs: Outputs) -> float:
        """Return the largest relative error of the outputs."""
        return max(
            min(self._error(base, reading, {name: output}, limit=float("inf")) for base in self._bases(reading))
            for name, output in outputs.items()
        )

    def _wrong(self) -> tuple[float, tuple[str, ...]]:
        """Add the finding of the mistake that explains the output, or of where it differs."""
        session = self.session
        outputs = self.ran[0][1]
        reading = session.readings[0]
        error = self._largest(reading, outputs)
        if reading.extra:
            raise CannotCompare(f"it has weights that an attention does not have: {', '.join(reading.extra[:4])}")
        causes = self._explained()
        if not causes:
            session.findings.append(self._unexplained(reading, outputs, error))
        for cause, others in causes:
            is_variant = session.is_library and cause in _FROM_LIBRARIES
            finding = Finding.of(
                cause, error, alternatives=tuple(others), severity="warning" if is_variant else "wrong"
            )
            session.findings.append(finding)
        return error, tuple(outputs)

    def _explained(self) -> list[tuple[str, list[str]]]:
        """Return the known mistakes that together reproduce the output, each with those that give the same numbers."""
        session = self.session
        expected = [(way, outputs) for way, outputs in self.ran if way.is_expected]
        for way, outputs in expected or self.ran:
            for reading in _likely(session.readings):
                for base in self._bases(reading):
                    for layout in CONVENTIONS[:1] if session.causal is None else CONVENTIONS:
                        found = self._single(replace(base, **layout), reading, outputs, way)
                        if found:
                            return [(found[0], found[1:])]
        if session.is_library:
            return []
        way, outputs = (expected or self.ran)[0]
        pairs = (self._pair(base, session.readings[0], outputs, way) for base in self._bases(session.readings[0]))
        return [(cause, []) for cause in next(filter(None, pairs), ())]

    def _single(self, base: Steps, reading: Reading, outputs: Outputs, way: Way) -> list[str]:
        found = []
        for cause, steps in mistakes(base, reading.projections, way.argument is not None, self.session.has_memory):
            if self.session.is_library and cause not in _FROM_LIBRARIES:
                continue
            if cause not in found and self._error(steps, reading, outputs) <= self.session.runner.bound:
                found.append(cause)
        if "out" not in reading.projections and not found and self._error(base, reading, outputs) == 0.0:
            found.append("output_projection_missing")
        return found

    def _pair(self, base: Steps, reading: Reading, outputs: Outputs, way: Way) -> tuple[str, ...]:
        """Return two mistakes that together reproduce the output, each in its most usual form."""
        known = way.argument is not None, self.session.has_memory
        for first, steps in _usual(mistakes(base, reading.projections, *known)):
            for second, both in _usual(mistakes(steps, reading.projections, *known)):
                if first < second and self._error(both, reading, outputs) <= self.session.runner.bound:
                    return first, second
        return ()

    def _unexplained(self, reading: Reading, outputs: Outputs, error: float) -> Finding:
        """Say on which inputs the part differs, where no known mistake explains it."""
        differ: list[str] = []
        agree: list[str] = []
        for name, one in outputs.items():
            error_here = self._error(Steps(is_causal=self.session.causal is True), reading, {name: one})
            (agree if error_here <= self.session.runner.bound else differ).append(name)
        where = ", ".join(differ or outputs) + (f"; it agrees on {', '.join(agree)}" if agree else "")
        return Finding(
            where, "no known mistake gives these numbers", None,
            "softmax(q kᵀ / √d_head + mask) v, for each head; concat(heads) W_o",
            "compare step by step with clearhead.MultiHeadAttention on the same weights", error,
        )  # fmt: skip

    def _convention(self, way: Way) -> Finding:
        if way.meaning == "block":
            return Finding.of("mask_polarity")
        if way.meaning == "additive":
            return Finding.of("mask_added_where_boolean")
        return Finding(
            "the axes of the input", "it attends over the batch: it reads [tokens, batch, width]",
            "batch_mixed_into_heads", "q, k, v: [batch, heads, tokens, head_size]",
            "batch_first=True; if it is meant, check it with batch_first=False",
        )  # fmt: skip

    def _note(self, way: Way, reading: Reading, steps: Steps) -> None:
        session = self.session
        session.notes.append(reading.note)
        if way.argument is not None:
            meanings = {"attend": "True = may attend", "block": "True = hidden", "additive": "0 and -inf, added"}
            session.notes.append(f"mask {way.shape}, {meanings.get(way.meaning, '1 = may attend')}")
        if steps.is_causal:
            session.notes.append("it hides the future by itself")
        if not way.is_batch_first:
            session.notes.append("it reads [tokens, batch, width]")
        if "out" not in reading.projections and not session.is_split and session.heads > 1:
            if session.is_library:
                session.notes.append("it has no output projection")
            else:
                session.findings.append(Finding.of("output_projection_missing"))

    def _special(self, way: Way, reading: Reading, steps: Steps) -> None:
        """Look at what a usual run does not show: the caller's mask, rows that see nothing, half precision."""
        session = self.session
        probe = next(iter(probes(session, way)))
        masked = dict(self.ran)[way].get("with a mask")
        if masked is not None:
            session.findings += self._empty_rows(way, masked[0])
            if self._changes_mask(way, masked[0]):
                session.findings.append(Finding.of("mask_changed_in_place"))
        session.findings += self._half(way, probe)

    def _empty_rows(self, way: Way, probe: Probe) -> Iterator[Finding]:
        assert probe.allowed is not None
        allowed = probe.allowed.clone()
        allowed[0, :, min(1, allowed.shape[2] - 1)] = False
        found = self.session.output(replace(probe, allowed=allowed), way)
        if found is None:
            return
        row = found[0, 1]
        if not row.isfinite().all():
            yield Finding.of("masked_rows_nan", severity="warning")
            return
        changed = probe.query.clone()
        others = torch.ones(changed.shape[1], dtype=torch.bool)
        others[1] = False
        changed[0, others] += 1.0
        again = self.session.output(replace(probe, query=changed, allowed=allowed), way)
        if again is not None and output_error(again[0, 1], row) > self.session.runner.bound:
            yield Finding.of("masked_rows_uniform", severity="warning")

    def _changes_mask(self, way: Way, probe: Probe) -> bool:
        session = self.session
        assert probe.allowed is not None
        mask = written_mask(probe.allowed, way, probe.query.dtype)
        given = Given(session.shaped(probe.query, way), None, mask.clone(), way.argument)
        args, named = call_arguments(session.runner.part, session.arguments, given, session.numbers)
        session.runner.part(*args, **named)
        return not torch.equal(given.mask if given.mask is not None else mask, mask)

    def _half(self, way: Way, probe: Probe) -> Iterator[Finding]:
        """Run in float16, whose output must be float16."""
        session, runner = self.session, self.session.runner
        half = torch.float16
        given = Given(session.shaped(probe.query, way).to(half), None, None, None)
        numbers = {name: one.to(half) if isinstance(one, Tensor) else one for name, one in session.numbers.items()}
        args, named = call_arguments(runner.part, session.arguments, given, numbers)
        with runner.borrow(torch.float16):
            torch.set_default_dtype(torch.float32)
            try:
                found = tensors_of(runner.part(*args, **named))
            except Exception as error:  # noqa: BLE001 a stranger's code raises anything
                if ("dtype" in str(error) and "Half" in str(error)) or "same dtype" in str(error):
                    yield Finding.of(
                        "fp16_promoted", says=f"half precision fails: {shown_error(error)}", severity="warning"
                    )
                return
        if found and found[0].dtype != half:
            yield Finding.of("fp16_promoted")


def _likely(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings in which mistakes are looked for: the orders of a fused weight that are in use."""
    usual = [
        one for one in readings if not one.note.startswith("one weight [") or one.note.endswith(("[q|k|v]", "head"))
    ]
    return list(itertools.islice(usual, 4)) or list(readings[:4])


def _usual(found: Iterator[tuple[str, Steps]]) -> Iterator[tuple[str, Steps]]:
    """Return the first form of each mistake."""
    seen: set[str] = set()
    for cause, steps in found:
        if cause not in seen:
            seen.add(cause)
            yield cause, steps
