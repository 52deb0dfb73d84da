"""Flat list of a stack's branches in the order in which they run, as the input of one kernel call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clearhead.core.stack import Branch, Layer, Stack, Step


@dataclass(frozen=True)
class PlannedBranch:
    """Branch of a residual step (an attention or feed-forward network), at one depth of the stack.

    Args:
        branch: the module.
        step: the residual step of the branch, with the norms before all branches and after their sum.
        depth: number of layers that run before.
        is_first, is_last: True if the branch is the first or the last one of its step.
    """

    branch: Branch
    step: Step
    depth: int
    is_first: bool
    is_last: bool


def list_branches(stack: Stack) -> Iterator[PlannedBranch]:
    """Yield the branches of a stack; a layer with shared weights occurs once for each depth."""
    for depth, index in enumerate(stack.order):
        layer = stack.layers[index]
        assert isinstance(layer, Layer)
        for step in layer.steps:
            assert isinstance(step, Step)
            last = len(step.branches) - 1
            for number, branch in enumerate(step.branches):
                assert isinstance(branch, Branch)
                yield PlannedBranch(branch, step, depth, number == 0, number == last)
