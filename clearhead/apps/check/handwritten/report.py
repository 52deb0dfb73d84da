"""What is wrong with a hand-written part, for whoever wrote it: where, by how much, the mathematics and the mend."""

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
    """A part cannot be compared, with the reason."""


class NotSteady(CannotCompare):
    """Two runs on the same input differ, and not by dropout."""


@dataclass(frozen=True, repr=False)
class Finding(Printed):
    """One difference between a part and the mathematics.

    Args:
        where: the place in the computation.
        says: what differs, in a sentence.
        cause: the known mistake that reproduces the output; None: no known mistake does.
        mathematics: the line that the part should compute; empty: not known.
        mend: how to mend it; empty: not known.
        difference: max|a-b| / max|b| between the output and the right one; None: not a matter of numbers.
        alternatives: other known mistakes with the very same output.
        severity: a warning is right by the paper and a trap in practice.
    """

    where: str
    says: str
    cause: str | None = None
    mathematics: str = ""
    mend: str = ""
    difference: float | None = None
    alternatives: tuple[str, ...] = ()
    severity: Literal["wrong", "warning"] = "wrong"

    @classmethod
    def of(cls, cause: str, difference: float | None = None, **fields: Any) -> Finding:
        """Return the finding of a known mistake; fields replace those of its description."""
        mistake = MISTAKES[cause]
        known = {"where": mistake.where, "says": mistake.says, "mathematics": mistake.math, "mend": mistake.mend}
        return cls(cause=cause, difference=difference, **{**known, **fields})

    def lines(self, hint: int = FULL_HINT) -> Iterator[str]:
        """Yield the finding as lines: where (1), also the line of mathematics (2), also mistake and mend (3)."""
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
        for mend in dict.fromkeys((self.mend, *(MISTAKES[name].mend for name in self.alternatives))):
            if mend:
                yield f"  mend        {mend}"


def _amount(difference: float) -> str:
    if not math.isfinite(difference):
        return "everything: the output has another shape, or is not a number"
    return f"{difference:.1e} of the largest value"


@dataclass(frozen=True, repr=False)
class Report:
    """What the comparison of a hand-written part with the mathematics found.

    Args:
        subject: what was compared.
        verdict: right, wrong, cannot compare, or not written yet.
        findings: what is wrong, and warnings.
        compared: what was compared, such as "without a mask".
        largest: the largest difference from the right output; None: nothing was compared.
        bound: the largest difference that counts as rounding.
        notes: how the part was read: its weights, its mask, its layout.
        reason: why it cannot be compared; empty otherwise.
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
        """Return the report of a part that cannot be compared."""
        if isinstance(reason, NotSteady):
            return make_report(subject, (Finding.of("randomness_in_evaluation"),))
        return cls(subject, "cannot compare", reason=f"{reason}")

    @property
    def ok(self) -> bool:
        """Whether the part computes what it should."""
        return self.verdict == "right"

    def record(self, hint: int = FULL_HINT) -> dict[str, Any]:
        """Return the report as JSON values, as much of it as `lines` tells."""
        findings = []
        for finding in self.findings:
            shown = finding if hint >= FULL_HINT else replace(finding, cause=None, says="", mend="", alternatives=())
            mathematics = finding.mathematics if hint >= 2 else ""
            findings.append({**vars(shown), "mathematics": mathematics, "difference": _finite(finding.difference)})
        return {**vars(self), "ok": self.ok, "findings": findings, "largest": _finite(self.largest)}

    def lines(self, hint: int = FULL_HINT) -> Iterator[str]:
        """Yield the report as lines of text.

        Args:
            hint: how much is told: 1 where, 2 the line of mathematics, 3 the mistake and its mend.
        """
        yield f"{self.subject}: {self.verdict}{f': {self.reason}' if self.reason else ''}"
        if self.compared:
            # Some mistakes, such as dropout in evaluation, are no matter of numbers.
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
    """Return a report that is right where nothing was found but warnings; the arguments are those of `Report`."""
    is_wrong = any(finding.severity == "wrong" for finding in findings)
    verdict: Verdict = "wrong" if is_wrong else "right"
    return Report(subject, verdict, tuple(findings), tuple(compared), largest, bound, tuple(notes))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
