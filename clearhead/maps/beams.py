"""The tree of a beam search: every token that it considered, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.generate.search.recorder import Considered
from clearhead.view.explorer.data import BeamNode


def beam_tree(considered: Sequence[Considered], texts: Sequence[str]) -> tuple[BeamNode, ...]:
    """Return what a search considered as a tree, parents before children.

    Args:
        considered: step by step.
        texts: the readable text of each id.
    """
    numbers = {one.ids: number for number, one in enumerate(considered)}
    return tuple(
        BeamNode(
            parent=numbers.get(one.ids[:-1], -1),
            token=texts[one.ids[-1]],
            log_probability=one.log_probability,
            score=one.score,
            step=len(one.ids) - 1,
            state=one.state,
            reason=one.reason,
            rank=one.rank,
        )
        for one in considered
    )
