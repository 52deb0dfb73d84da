"""Saving reports the fields of a spec that no config of a family can express."""

from __future__ import annotations

from clearhead.checkpoints.hf.mapping.config import DifferentStacks, NotExpressible


def test_a_report_of_several_faults_has_a_line_for_each() -> None:
    error = DifferentStacks.of(["a is 1", "b is 2"], "saving as x")
    assert str(error) == "2 faults in saving as x:\n  - a is 1\n  - b is 2"
    assert isinstance(error, NotExpressible) and error.expressed is None
