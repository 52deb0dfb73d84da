"""Report on a hand-written module: where it differs, by how much, the correct formula, and the fix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.apps.check.handwritten.mistakes import MISTAKES
from clearhead.base.printing import Printed, block

Verdict = Literal["right", "wrong", "cannot compare", "not written yet"]
FULL_HINT = 3


class CannotCompare(Exception):
    """Raised if a module or function cannot be compared; the message is the reason."""


class NotSteady(CannotCompare):
    """Raised if two runs on the same input differ for another reason than dropout."""


@dataclass(frozen=True, repr=False)
class Finding(Printed):
    """One difference between a hand-written module and the mathematics, with cause and fix if known.

    Args:
        where: place in the computation, or address in the model.
        says: description of the difference, in one sentence.
        cause: known mistake that reproduces the output; None if no known mistake does.
        mathematics: formula that the module should compute; empty if not known.
        fix: correction in words or code; empty if not known.
        difference: max|a-b| / max|b| between the output and the correct one; None if no numbers were compared.
        alternatives: other known mistakes with exactly the same output.
        severity: "wrong", or "warning" for code that is right by the paper but a trap in practice.
    """

    where: str
    says: str
    cause: str | None = None
    mathematics: str = ""
    fix: str = ""
    difference: float | None = None
    alternatives: tuple[str, ...] = ()
    severity: Literal["wrong", "warning"] = "wrong"

    @classmethod
    def of(cls, cause: str, difference: float | None = None, **fields: Any) -> Finding:
        """Return the finding of a known mistake; `fields` override its description."""
        mistake = MISTAKES[cause]
        known = {"where": mistake.where, "says": mistake.says, "mathematics": mistake.math, "fix": mistake.fix}
        return cls(cause=cause, difference=difference, **{**known, **fields})

    def lines(self, hint: int = FULL_HINT) -> Iterator[str]:
        """Yield the finding as lines of text: the position; from hint 2 on the formula, at 3 mistake and fix."""
        yield f"  {'warning' if self.severity == 'warning' else 'where'}       {self.where}"
        if self.difference is not None:
            yield f"  differs by  {_amount(self.difference)}"
        if hint >= 2 and self.mathematics:
            yield f"  should be   {self.mathematics}"
        if hint < FULL_HINT:
            return
        yield f"  mistake     {self.says}"
        for name in self.alternatives:
            yield f"  or          {MISTAKES[name].says} (the same numbers)"
        for fix in dict.fromkeys((self.fix, *(MISTAKES[name].fix for name in self.alternatives))):
            if fix:
                yield f"  fix         {fix}"


def _amount(difference: float) -> str:
    if not math.isfinite(difference):
        return "everything: the output has another shape, or is not a number"
    return f"{difference:.1e} of the largest value"


@dataclass(frozen=True, repr=False)
class Report:
    """Result of comparing a hand-written module or function with the mathematics.

    Args:
        subject: name and sizes of the module.
        verdict: "right", "wrong", "cannot compare" or "not written yet".
        findings: mistakes and warnings.
        compared: names of the compared inputs, such as "with a mask".
        largest: largest difference from the correct output; None if no numbers were compared.
        bound: largest difference that counts as rounding; None if no numbers were compared.
        notes: assumptions about the module: its weights, mask and layout.
        reason: explanation if the module cannot be compared; empty otherwise.
    """

    subject: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    compared: tuple[str, ...] = ()
    largest: float | None = None
    bound: float | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""

    @classmethod
    def refuse(cls, subject: str, reason: CannotCompare) -> Report:
        """Return the report of a module that cannot be compared; randomly differing runs are reported as a mistake."""
        if isinstance(reason, NotSteady):
            return make_report(subject, (Finding.of("randomness_in_evaluation"),))
        return cls(subject, "cannot compare", reason=f"{reason}")

    @property
    def ok(self) -> bool:
        """True if the module computes the correct result; warnings are allowed."""
        return self.verdict == "right"

    def record(self, hint: int = FULL_HINT) -> dict[str, Any]:
        """Return the report as JSON values; `hint` limits the details as in `lines`."""
        findings = []
        for finding in self.findings:
            shown = finding if hint >= FULL_HINT else replace(finding, cause=None, says="", fix="", alternatives=())
            mathematics = finding.mathematics if hint >= 2 else ""
            findings.append({**vars(shown), "mathematics": mathematics, "difference": _finite(finding.difference)})
        return {**vars(self), "ok": self.ok, "findings": findings, "largest": _finite(self.largest)}

    def lines(self, hint: int = FULL_HINT) -> Iterator[str]:
        """Yield the report as lines of text.

        Args:
            hint: level of detail: 1 shows where, 2 also the formula, 3 also the mistake and its fix.
        """
        yield f"{self.subject}: {self.verdict}{f': {self.reason}' if self.reason else ''}"
        if self.compared:
            # Some mistakes, such as dropout in evaluation, do not change the compared numbers.
            is_equal = self.verdict == "wrong" and (self.largest or 0.0) <= (self.bound or 0.0)
            apart = "apart from the findings, the " if is_equal else ""
            amount = "" if self.largest is None else f"; {apart}largest difference {_amount(self.largest)}"
            bound = "" if self.bound is None else f" (rounding: up to {self.bound:.0e})"
            yield f"  compared    {', '.join(self.compared)}{amount}{bound}"
        for note in self.notes:
            yield f"  note        {note}"
        for finding in self.findings:
            yield from finding.lines(hint)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return block([*self.lines()], more="print() shows all")


def make_report(
    subject: str, findings: Sequence[Finding], *, compared: Sequence[str] = (), largest: float | None = None,
    bound: float | None = None, notes: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Make a report: "right" if all findings are warnings, else "wrong"; the arguments are those of `Report`."""
    is_wrong = any(finding.severity == "wrong" for finding in findings)
    verdict: Verdict = "wrong" if is_wrong else "right"
    return Report(subject, verdict, tuple(findings), tuple(compared), largest, bound, tuple(notes))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
