"""The tree of a beam search: every token that it considered, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.generate.search.recorder import Considered
from clearhead.interpret.maps.token_texts import token_texts
from clearhead.interpret.view.explorer.data import BeamNode
from clearhead.text.tokenizer import Tokenizer


def beam_tree(considered: Sequence[Considered], tokenizer: Tokenizer, start: int) -> tuple[BeamNode, ...]:
    """Return what a search considered as a tree, parents before children.

    Args:
        considered: step by step.
        tokenizer: of what it wrote.
        start: the id that the search started from, the root of the tree.
    """
    (first,) = token_texts(tokenizer, [start])
    root = BeamNode(-1, first, log_probability=0.0, score=0.0, step=0, state="kept")
    numbers = {one.ids: number for number, one in enumerate(considered, start=1)}
    return (
        root,
        *(
            BeamNode(
                parent=numbers.get(one.ids[:-1], 0),
                token=token_texts(tokenizer, one.ids)[-1],
                log_probability=one.log_probability,
                score=one.score,
                step=len(one.ids),
                state=one.state,
                reason=one.reason,
                rank=one.rank,
            )
            for one in considered
        ),
    )
