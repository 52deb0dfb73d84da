"""Report on a checked model, as text, as JSON values and as one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.base.errors import escape_unsafe
from clearhead.base.printing import Printed, block

Group = Literal["information flow", "invariances", "health"]
_SIGNS = {(True, True): "#", (False, False): ".", (False, True): "!", (True, False): "?"}
Verdict = Literal["right", "wrong", "warning", "not tried"]
GROUPS: tuple[Group, ...] = ("information flow", "invariances", "health")


@dataclass(frozen=True, repr=False)
class Drawing(Printed):
    """Table of dependencies: rows are outputs, columns inputs.

    Args:
        outputs, inputs: positions of the tokens.
        allowed: dependencies that the masks allow, bool [outputs, inputs].
        reads: measured dependencies, bool [outputs, inputs].
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    allowed: Tensor
    reads: Tensor

    def rows(self) -> Iterator[str]:
        """Yield one line per output, with one character per input token.

        "#": read. ".": not read. "!": read although masked. "?": not read although allowed.
        """
        for allowed, reads in zip(self.allowed.tolist(), self.reads.tolist(), strict=True):
            yield "".join(_SIGNS[may, does] for may, does in zip(allowed, reads, strict=True))


@dataclass(frozen=True, repr=False)
class CheckOutcome(Printed):
    """Result of one experiment.

    Args:
        group: group of experiments in the report.
        name: name of the experiment.
        verdict: "right", "wrong", "warning" or "not tried".
        says: the result in words, or the reason why it was not tried.
        numbers: relative differences by name, such as "single" and "double" precision.
        drawing: table of dependencies; None for experiments without one.
    """

    group: Group
    name: str
    verdict: Verdict
    says: str
    numbers: tuple[tuple[str, float], ...] = ()
    drawing: Drawing | None = None

    def numbers_text(self) -> str:
        """Return the differences as text."""
        return ", ".join(f"{name} {value:.1e}" for name, value in self.numbers)

    def record(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.numbers}
        rows = None if self.drawing is None else list(self.drawing.rows())
        return {"name": self.name, "verdict": self.verdict, "says": self.says, "numbers": numbers, "drawing": rows}


@dataclass(frozen=True, repr=False)
class ModelReport(Printed):
    """Result of checking a model.

    Args:
        subject: name of the model.
        facts: lines about the model and the machine.
        outcomes: results of the experiments.
        findings: mistakes and warnings; their `where` is an address.
        seconds: duration of the check.
    """

    subject: str
    facts: tuple[str, ...]
    outcomes: tuple[CheckOutcome, ...]
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if no finding is wrong; warnings are allowed."""
        return not any(finding.severity == "wrong" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        counts = {kind: sum(outcome.verdict == kind for outcome in self.outcomes) for kind in ("right", "not tried")}
        wrong = {finding.where for finding in self.findings if finding.severity == "wrong"}
        warnings = sum(finding.severity == "warning" for finding in self.findings)
        parts = [f"wrong at {_count_phrase(len(wrong), 'place')}" if wrong else "nothing is wrong"]
        if warnings:
            parts.append(_count_phrase(warnings, "warning"))
        parts.append(f"{counts['right']} experiments passed")
        if counts["not tried"]:
            parts.append(f"{counts['not tried']} not tried")
        return ", ".join(parts)

    def by_place(self) -> Iterator[tuple[Finding, str]]:
        """Yield the first finding of each address, with the names of the other experiments that show it."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.where, finding.severity), []).append(finding)
        for first, *others in groups.values():
            yield first, ", ".join(finding.says.partition(": ")[0] for finding in others)

    def of(self, group: Group) -> Sequence[CheckOutcome]:
        """Return the outcomes of one group."""
        return [outcome for outcome in self.outcomes if outcome.group == group]

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        findings = [
            {
                "severity": finding.severity, "where": finding.where, "says": finding.says,
                "fix": finding.fix or None, "mathematics": finding.mathematics or None,
                "difference": (
                    finding.difference if finding.difference is None or math.isfinite(finding.difference) else None
                ),
            }
            for finding in self.findings
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
            for name, text in (("also", others), ("should be", finding.mathematics), ("fix", finding.fix)):
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
                numbers = f" ({outcome.numbers_text()})" if outcome.numbers else ""
                yield f"  {outcome.name:{width}}  {outcome.verdict:9}  {outcome.says}{numbers}"
            yield from _side_by_side(outcomes)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return block([*self.lines()], more="print() shows all")


def _side_by_side(outcomes: Sequence[CheckOutcome]) -> Iterator[str]:
    """Yield the lines of the small drawings side by side, four in a row."""
    drawn = [
        (outcome.name, list(outcome.drawing.rows()))
        for outcome in outcomes
        if outcome.drawing is not None and len(outcome.drawing.outputs) <= 16
    ]
    if not drawn:
        return
    yield ""
    yield "  rows: outputs, columns: inputs; # reads, . does not, ! reads a hidden token, ? misses an allowed token"
    for start in range(0, len(drawn), 4):
        group = drawn[start : start + 4]
        widths = [max(len(name), len(rows[0])) for name, rows in group]
        height = max(len(rows) for _, rows in group)
        columns = [[name, *rows, *[""] * (height - len(rows))] for name, rows in group]
        for line in zip(*columns, strict=True):
            yield "  " + "   ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip()


def _count_phrase(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_CELL = 14
_MARKS = {"right": "✓", "wrong": "✗", "warning": "!", "not tried": "–"}
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2933; --faint: #5c6873; --line: #d5dbe1; --box: #f6f8fa;
  --right: #1a7f4b; --wrong: #c02626; --warning: #94620a; --read: #2a78b8; --may: #e4e8ec; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --ink: #e4e8ec; --faint: #9aa5b0; --line: #343c44;
  --box: #1c2227; --right: #56c28a; --wrong: #ff7b72; --warning: #e0a948; --read: #58a6e0; --may: #2a323a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1080px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 0 0 6px; }
.faint { color: var(--faint); font-size: 13px; overflow-wrap: anywhere; }
.verdict { font-size: 17px; font-weight: 600; margin: 12px 0; }
.right { color: var(--right); } .wrong { color: var(--wrong); } .warning { color: var(--warning); }
.not { color: var(--faint); }
.finding { border: 1px solid var(--line); border-left: 4px solid var(--wrong); background: var(--box);
  padding: 10px 14px; margin: 10px 0; border-radius: 4px; overflow-wrap: anywhere; }
.finding.of-warning { border-left-color: var(--warning); }
code { font: 13px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-top: 1px solid var(--line); }
th { font-weight: 600; width: 34%; } td.mark { width: 106px; white-space: nowrap; }
td.numbers { text-align: right; color: var(--faint); font-variant-numeric: tabular-nums; padding-right: 0; }
.drawings { display: flex; flex-wrap: wrap; gap: 20px 32px; margin-top: 16px; }
figure { margin: 0; } figcaption { font-size: 13px; margin-bottom: 4px; }
svg { display: block; max-width: 100%; height: auto; }
.reads { fill: var(--read); } .may-not { fill: var(--may); } .leak { fill: var(--wrong); }
.gap { fill: none; stroke: var(--warning); stroke-width: 2; } svg text { fill: var(--faint); font-size: 9px; }
.legend span { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; vertical-align: -1px; }
@media (max-width: 620px) { table, tbody, tr, th, td { display: block; width: auto; border: 0; padding: 0; }
  td.mark { width: auto; } td.numbers { text-align: left; }
  tr { border-top: 1px solid var(--line); padding: 8px 0; } }
"""


def report_html(report: ModelReport) -> str:
    """Return a report as one HTML document without scripts."""
    return "\n".join(_lines(report)) + "\n"


def _text(value: str) -> str:
    """Escape a text for HTML, and show control characters as visible signs."""
    return escape(escape_unsafe(value))


def _lines(report: ModelReport) -> Iterator[str]:
    mark = "right" if report.ok else "wrong"
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_text(report.subject)}: check of a model</title>"
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>"
    yield f"<h1>{_text(report.subject)}</h1>"
    yield f'<p class="verdict {mark}">{_MARKS[mark]} {_text(report.verdict)}</p>'
    for fact in [*report.facts, f"checked in {report.seconds:.0f} s by clearhead check"]:
        yield f'<p class="faint">{_text(fact)}</p>'
    if report.findings:
        yield "<h2>Findings</h2>"
    for finding, others in report.by_place():
        yield from _finding(finding, others)
    for group in GROUPS:
        outcomes = report.of(group)
        if outcomes:
            yield f"<h2>{_text(group.capitalize())}</h2>\n<table><tbody>"
            yield from map(_row, outcomes)
            yield "</tbody></table>"
        drawn = [outcome for outcome in outcomes if outcome.drawing is not None]
        if drawn:
            yield '<div class="drawings">'
            for outcome in drawn:
                assert outcome.drawing is not None
                yield f"<figure><figcaption>{_text(outcome.name)}</figcaption>{_drawing(outcome.drawing)}</figure>"
            yield "</div>"
            yield (
                '<p class="faint legend" style="margin-top: 12px"><span>rows: outputs, columns: inputs</span>'
                '<span><i style="background: var(--read)"></i>reads</span>'
                '<span><i style="background: var(--may)"></i>hidden by the mask</span>'
                '<span><i style="background: var(--wrong)"></i>reads a hidden token</span>'
                '<span><i style="border: 2px solid var(--warning)"></i>misses an allowed token</span></p>'
            )
    yield "</main>\n</body>\n</html>"


def _finding(finding: Finding, others: str) -> Iterator[str]:
    kind = "" if finding.severity == "wrong" else " of-warning"
    yield f'<div class="finding{kind}">'
    yield f"<p><strong>{'Wrong' if not kind else 'Warning'}</strong> at <code>{_text(finding.where)}</code></p>"
    yield f"<p>{_text(finding.says)}</p>"
    if finding.difference is not None:
        amount = f"{finding.difference:.1e} of the largest value" if math.isfinite(finding.difference) else "everything"
        yield f'<p class="faint">differs by {amount}</p>'
    for name, text in (("also", others), ("should be", finding.mathematics), ("fix", finding.fix)):
        if text:
            yield f'<p class="faint">{name}: {_text(text)}</p>'
    yield "</div>"


def _row(outcome: CheckOutcome) -> str:
    kind = outcome.verdict.split()[0]
    return (
        f'<tr><th scope="row">{_text(outcome.name)}</th>'
        f'<td class="mark {kind}">{_MARKS[outcome.verdict]} {outcome.verdict}</td>'
        f"<td>{_text(outcome.says)}</td>"
        f'<td class="numbers">{_text(outcome.numbers_text())}</td></tr>'
    )


def _drawing(drawing: Drawing) -> str:
    """Draw the dependencies as SVG; if rows are small, only every n-th row has a label."""
    height, width = drawing.reads.shape
    cell = max(2, min(_CELL, 420 // max(1, height)))
    side = max(cell, _CELL) if width < 8 else cell
    left, top = 22, 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + side * width}" height="{top + cell * height}" '
        f'viewBox="0 0 {left + side * width} {top + cell * height}" role="img" aria-label="table of dependencies">'
    ]
    every = math.ceil(12 / cell)
    for row, output in enumerate(drawing.outputs):
        if row % every == 0:
            y = top + cell * row + cell / 2 + 3
            parts.append(f'<text x="{left - 5}" y="{y:g}" text-anchor="end">{output}</text>')
    for column, token in enumerate(drawing.inputs):
        parts.append(f'<text x="{left + side * column + side / 2:g}" y="10" text-anchor="middle">{token}</text>')
    for row, (may, does) in enumerate(zip(drawing.allowed.tolist(), drawing.reads.tolist(), strict=True)):
        for column, (allowed, reads) in enumerate(zip(may, does, strict=True)):
            kind = {(True, True): "reads", (False, True): "leak", (True, False): "gap"}.get((allowed, reads), "may-not")
            x, y, gap = left + side * column, top + cell * row, 1 if cell > 4 else 0
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{side - gap}" height="{cell - gap}"/>')
    return "".join([*parts, "</svg>"])
