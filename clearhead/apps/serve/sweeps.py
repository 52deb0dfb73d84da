"""A sweep: what each activation of a second text changes where it is put into the first, place by place."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from clearhead.apps.serve.interventions import Data, finite
from clearhead.apps.serve.runs import Asked, Runs, Written, outputs_asked, position_of, stack_lengths
from clearhead.apps.serve.work import Work
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.outcome import Chosen
from clearhead.interpret.maps.patching import Patches

Number = Annotated[int, Field(ge=0, lt=2**31)]


class Sweep(Data):
    """What is asked.

    Args:
        asked: the first text; its changes are left out.
        text, target: the second text, and what the decoder of a two-stack model reads with it.
        position, index: the output that is followed, unless the request compares two: where the last stack reads what
            it is predicted at, and its number; None: the one that `AttentionRun.outcome` chooses.
    """

    asked: Asked
    text: Written
    target: Written | None = None
    position: Number | None = None
    index: Number | None = None


def sweep(runs: Runs, given: Sweep, work: Work) -> dict[str, Any]:
    """Return the changes of `AttentionRun.patch` as JSON; positions behind the end of either text have none.

    Args:
        runs: of the model.
        given: what is asked.
        work: ends the computation where nobody waits for it.

    Raises:
        InputError: a text cannot be read, or there is no such output.
    """
    here, _ = runs.base(given.asked, work)
    there, _ = runs.base(Asked(text=given.text, target=given.target), work)
    common = {
        name: [(place, place) for place in range(min(length, stack_lengths(there)[name]))]
        for name, length in stack_lengths(here).items()
    }
    with work.watching(runs.model):
        return _json(here.patch(there, _followed(here, given), positions=common))


def _json(found: Patches) -> dict[str, Any]:
    """Return changes as JSON, null where a position has no counterpart."""
    return {
        "outcome": found.outcome,
        "total": found.total,
        "tokens": {name: list(tokens) for name, tokens in found.tokens.items()},
        "streams": {name: [list(map(finite, row)) for row in rows.tolist()] for name, rows in found.streams.items()},
        "heads": [[one.stack, one.layer, one.head, one.change] for one in found.heads],
    }


def _followed(maps: AttentionMaps, given: Sweep) -> Chosen:
    if given.asked.of is not None:
        return outputs_asked(maps, given.asked)
    if given.index is None:
        return None
    name, place = maps.output_names.name(given.index), position_of(maps, given.position)
    return name if place is None else (place, name)
