"""The branches of a stack as a flat list, in the order in which they run: what one call of kernels is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clearhead.core.stack import Branch, Layer, Stack, Step


@dataclass(frozen=True)
class PlannedBranch:
    """One branch at one depth.

    Args:
        branch: the module.
        step: the residual step that it is in, with the norms before all of its branches and after their sum.
        depth: how many layers run before.
        is_first, is_last: of the branches of the step.
    """

    branch: Branch
    step: Step
    depth: int
    is_first: bool
    is_last: bool


def list_branches(stack: Stack) -> Iterator[PlannedBranch]:
    """Give the branches of a stack; those of layers that share their weights come once for each depth."""
    for depth, index in enumerate(stack.order):
        layer = stack.layers[index]
        assert isinstance(layer, Layer)
        for step in layer.steps:
            assert isinstance(step, Step)
            last = len(step.branches) - 1
            for number, branch in enumerate(step.branches):
                assert isinstance(branch, Branch)
                yield PlannedBranch(branch, step, depth, number == 0, number == last)
