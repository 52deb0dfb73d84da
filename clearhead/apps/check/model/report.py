"""The report of a check of a model: what was tried, what came out, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.base.printing import Printed, block

Group = Literal["information flow", "invariances", "health"]
_SIGNS = {(True, True): "#", (False, False): ".", (False, True): "!", (True, False): "?"}
Verdict = Literal["right", "wrong", "warning", "not tried"]
GROUPS: tuple[Group, ...] = ("information flow", "invariances", "health")


@dataclass(frozen=True, repr=False)
class Drawing(Printed):
    """What reads what: rows are outputs, columns inputs.

    Args:
        outputs, inputs: the tokens.
        allowed: what the masks allow, bool [outputs, inputs].
        reads: what was measured, of the same shape.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    allowed: Tensor
    reads: Tensor

    def rows(self) -> Iterator[str]:
        """Yield a row of the drawing: # reads, . does not, ! reads what is hidden, ? does not read what it may."""
        for allowed, reads in zip(self.allowed.tolist(), self.reads.tolist(), strict=True):
            yield "".join(_SIGNS[may, does] for may, does in zip(allowed, reads, strict=True))


@dataclass(frozen=True, repr=False)
class Outcome(Printed):
    """What one experiment found.

    Args:
        group: what kind of experiment it is.
        name: of the experiment.
        verdict: right, wrong, a warning, or not tried.
        says: the result in words; why it was not tried.
        numbers: differences by the name of what they are of.
        drawing: what reads what; None: that is not the question.
    """

    group: Group
    name: str
    verdict: Verdict
    says: str
    numbers: tuple[tuple[str, float], ...] = ()
    drawing: Drawing | None = None

    def shown_numbers(self) -> str:
        """Return the differences as text."""
        return ", ".join(f"{name} {value:.1e}" for name, value in self.numbers)

    def record(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.numbers}
        rows = None if self.drawing is None else list(self.drawing.rows())
        return {"name": self.name, "verdict": self.verdict, "says": self.says, "numbers": numbers, "drawing": rows}


@dataclass(frozen=True, repr=False)
class ModelReport(Printed):
    """What the check of a model found.

    Args:
        subject: what was checked.
        facts: about the model and the machine, one sentence each.
        outcomes: of the experiments.
        findings: what is wrong, and warnings; `where` is an address.
        seconds: that the check took.
    """

    subject: str
    facts: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not any(finding.severity == "wrong" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        counts = {one: sum(outcome.verdict == one for outcome in self.outcomes) for one in ("right", "not tried")}
        wrong = {one.where for one in self.findings if one.severity == "wrong"}
        warnings = sum(one.severity == "warning" for one in self.findings)
        parts = [f"wrong at {_counted(len(wrong), 'place')}" if wrong else "nothing is wrong"]
        if warnings:
            parts.append(_counted(warnings, "warning"))
        parts.append(f"{counts['right']} experiments as they should be")
        if counts["not tried"]:
            parts.append(f"{counts['not tried']} not tried")
        return ", ".join(parts)

    def by_place(self) -> Iterator[tuple[Finding, str]]:
        """Yield the first finding of each place, with the names of the other experiments that show it."""
        found: dict[tuple[str, str], list[Finding]] = {}
        for one in self.findings:
            found.setdefault((one.where, one.severity), []).append(one)
        for first, *others in found.values():
            yield first, ", ".join(one.says.partition(": ")[0] for one in others)

    def of(self, group: Group) -> Sequence[Outcome]:
        """Return the outcomes of a kind."""
        return [outcome for outcome in self.outcomes if outcome.group == group]

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        findings = [
            {
                "severity": one.severity, "where": one.where, "says": one.says, "mend": one.mend or None,
                "mathematics": one.mathematics or None,
                "difference": one.difference if one.difference is None or math.isfinite(one.difference) else None,
            }
            for one in self.findings
        ]  # fmt: skip
        return {
            "ok": self.ok, "subject": self.subject, "verdict": self.verdict, "facts": list(self.facts),
            "findings": findings, "seconds": round(self.seconds, 1),
            **{group.replace(" ", "_"): [outcome.record() for outcome in self.of(group)] for group in GROUPS},
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        yield f"{self.subject}: {self.verdict}; {self.seconds:.0f} s"
        for fact in self.facts:
            yield f"  {fact}"
        for finding, others in self.by_place():
            amount = "" if finding.difference is None else f" ({finding.difference:.1e} of the largest value)"
            yield f"  {finding.severity} at {finding.where}{amount}"
            yield f"    {finding.says}"
            for name, text in (("also", others), ("should be", finding.mathematics), ("mend", finding.mend)):
                if text:
                    yield f"    {name}: {text}"
        for group in GROUPS:
            outcomes = self.of(group)
            if not outcomes:
                continue
            yield ""
            yield group
            width = max(len(outcome.name) for outcome in outcomes)
            for outcome in outcomes:
                numbers = f" ({outcome.shown_numbers()})" if outcome.numbers else ""
                yield f"  {outcome.name:{width}}  {outcome.verdict:9}  {outcome.says}{numbers}"
            yield from _side_by_side(outcomes)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return block([*self.lines()], more="print() shows all")


def _side_by_side(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the small drawings beside each other; rows are outputs, columns inputs."""
    drawn = [
        (outcome.name, list(outcome.drawing.rows()))
        for outcome in outcomes
        if outcome.drawing is not None and len(outcome.drawing.outputs) <= 16
    ]
    if not drawn:
        return
    yield ""
    yield "  rows: outputs, columns: inputs; # reads, . does not, ! reads what is hidden, ? does not read what it may"
    for start in range(0, len(drawn), 4):
        group = drawn[start : start + 4]
        widths = [max(len(name), len(rows[0])) for name, rows in group]
        height = max(len(rows) for _, rows in group)
        columns = [[name, *rows, *[""] * (height - len(rows))] for name, rows in group]
        for line in zip(*columns, strict=True):
            yield "  " + "   ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip()


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
