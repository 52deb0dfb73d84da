"""Search for one or two known mistakes that reproduce the outputs of a hand-written module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding, Report, make_report
from clearhead.apps.check.handwritten.running import CandidateRunner, output_error

Settings = Mapping[str, Any]
Changes = Sequence[tuple[str, Settings]]
Compute = Callable[[Settings], Sequence[Tensor]]


def largest_difference(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest relative difference between the outputs of two computations."""
    return max((output_error(output, other) for output, other in zip(outputs, wanted, strict=True)), default=math.inf)


def _error(outputs: Sequence[Tensor], compute: Compute, settings: Settings) -> float:
    try:
        return largest_difference(outputs, compute(settings))
    except (RuntimeError, IndexError):
        return math.inf


def single_mistakes(outputs: Sequence[Tensor], compute: Compute, changes: Changes, bound: float) -> list[str]:
    """Return the known mistakes that reproduce the outputs without a second mistake; for arguments, see `explain`."""
    causes = [cause for cause, settings in changes if _error(outputs, compute, settings) <= bound]
    return list(dict.fromkeys(causes))


def explain(outputs: Sequence[Tensor], compute: Compute, changes: Changes, bound: float) -> list[list[str]]:
    """Return one or two known mistakes that reproduce the outputs, each in a list with mistakes of the same effect.

    The result is empty if no mistakes reproduce the outputs.

    Args:
        outputs: outputs of the candidate.
        compute: the correct computation; its settings override the defaults.
        changes: known mistakes, each with the settings that cause it.
        bound: largest difference that counts as rounding.
    """
    if single := single_mistakes(outputs, compute, changes, bound):
        return [single]
    for (first, left), (second, right) in itertools.combinations(changes, 2):
        if first != second and not set(left) & set(right) and _error(outputs, compute, {**left, **right}) <= bound:
            return [[first], [second]]
    return []


def compare_outputs(
    subject: str, outputs: Sequence[Tensor], compute: Compute, changes: Changes, runner: CandidateRunner,
    names: Sequence[str], *, where: str, mathematics: str, loose: float = 0.0, notes: Sequence[str] = (),
    findings: Sequence[Finding] = (),
) -> Report:  # fmt: skip
    """Compare a candidate's outputs with the correct ones and with those of known mistakes; return the report.

    Args:
        subject: name and sizes of the candidate.
        outputs: outputs of the candidate.
        compute: the correct computation; its settings override the defaults.
        changes: known mistakes, each with the settings that cause it.
        runner: the runner that called the candidate.
        names: names of the outputs.
        where: place of the difference, for the report.
        mathematics: formula that the candidate should compute.
        loose: rounding bound for known mistakes, used if it is larger than the bound of the runner.
        notes, findings: notes and findings to add to the report.
    """
    findings = [*findings, *([Finding.of("dropout_in_evaluation")] if runner.is_random else [])]
    if runner.changes_weights:
        findings.append(Finding.of("weights_changed"))
    error = largest_difference(outputs, compute({}))
    if not error <= runner.bound:
        causes = explain(outputs, compute, changes, max(runner.bound, loose))
        findings += [
            Finding.of(cause, error, alternatives=tuple(others), where=where, mathematics=mathematics)
            for cause, *others in causes
        ]
        if not causes:
            findings.append(Finding(where, "no known mistake gives these numbers", None, mathematics, "", error))
    return make_report(subject, findings, compared=tuple(names), largest=error, bound=runner.bound, notes=tuple(notes))
