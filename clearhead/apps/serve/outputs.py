"""What a model puts out for a text, beside what it puts out while it is changed.

Legend: T tokens, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.outcome import Chosen, Outcome, OutputNames

MOST_NUMBERS = 2**23
"""Probabilities of one run that are kept."""
LISTED = 6
LEAST = 1e-45
"""The smallest probability in float32."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of one run.

    Args:
        positions: where the last stack reads what an output is predicted at; None: the output is of the whole text.
        labels: the output that follows each of these in the text, -1 where unknown.
        probabilities: of every output at these positions; None: the model gives none.
        state: the mean of the last hidden states, where there are no probabilities.
        written: what the model wrote; None: it wrote nothing.
    """

    positions: tuple[int | None, ...]
    labels: tuple[int, ...]
    probabilities: Float32[Tensor, "positions outputs"] | None
    state: Float32[Tensor, " width"]
    written: str | None


@torch.no_grad()
def outputs_of(maps: AttentionMaps, hidden_1TD: Float[Tensor, "1 tokens width"], written: str | None) -> Outputs:
    """Return the outputs of a run.

    Args:
        maps: of the run.
        hidden_1TD: what its last stack returned.
        written: what the model wrote in it.
    """
    state = hidden_1TD[0].float().mean(0).cpu()
    head = maps.module.head
    try:
        names = maps.output_names
    except InputError:
        return Outputs((), (), None, state, written)
    assert head is not None
    if head.is_pooled:
        logits = head(hidden_1TD, (maps.reading.target or maps.reading.source).mask)
        return Outputs((None,), (-1,), names.probabilities(logits.float()).cpu(), state, written)
    positions = _positions(maps, names)
    logits = head(hidden_1TD[:, positions])[0, :, : len(names.names)].float()
    known = maps.reading.labels if names.tokenizer is not None and maps.module.decoder is not None else ()
    labels = tuple(known[place] if place < len(known) else -1 for place in positions)
    return Outputs(tuple(positions), labels, names.probabilities(logits).cpu(), state, written)


def _positions(maps: AttentionMaps, names: OutputNames) -> list[int]:
    """Return the positions that are shown: the masks, or as many of the last ones as can be kept."""
    ids = (maps.reading.target or maps.reading.source).ids[0].tolist()
    mask_id = None if names.tokenizer is None or maps.module.decoder is not None else names.tokenizer.mask_id
    masks = [place for place, index in enumerate(ids) if index == mask_id]
    most = min(512, max(1, MOST_NUMBERS // len(names.names)))
    return masks[:most] or list(range(max(0, len(ids) - most), len(ids)))


def compared(maps: AttentionMaps, before: Outputs, after: Outputs | None, of: Chosen = None) -> dict[str, Any]:
    """Return outputs as JSON, those of the unchanged model beside those of the changed one.

    Args:
        maps: of the unchanged run.
        before, after: of both runs, at the same positions; None: nothing is changed.
        of: two outputs whose difference is told as well; None: none.
    """
    later = before if after is None else after
    written = [before.written, None if after is None else after.written]
    if before.probabilities is None or later.probabilities is None:
        # An embedding: how far the change turns it.
        turned = float(torch.cosine_similarity(before.state, later.state, dim=0))
        return {
            "written": written,
            "rows": [],
            "similarity": turned,
            "states": [before.state.tolist(), later.state.tolist()],
        }
    rows = [
        _row(maps, position, label, (one, two))
        for position, label, one, two in zip(
            before.positions, before.labels, before.probabilities, later.probabilities, strict=True
        )
    ]
    names = maps.output_names
    end = None if names.tokenizer is None else names.tokenizer.eos_id
    difference = None if of is None else _difference(maps, maps.outcome(of), (before, later))
    return {"written": written, "rows": rows, "end": end, "difference": difference}


def _difference(maps: AttentionMaps, outcome: Outcome, both: tuple[Outputs, Outputs]) -> dict[str, Any] | None:
    """Return how much larger the log-probability of one output is than that of another, before and after."""
    place = outcome.logits_position
    if place not in both[0].positions:
        return None
    row = both[0].positions.index(place)
    values = [
        sum(sign * math.log(max(float(one.probabilities[row, index]), LEAST)) for index, sign in outcome.signs.items())
        for one in both
        if one.probabilities is not None
    ]
    return {"name": maps.output_names.difference(outcome, " rather than "), "position": place, "values": values}


def _row(maps: AttentionMaps, position: int | None, label: int, both: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the outputs at a position: the token that is read there, the one that follows, and the most probable."""
    likely = chain.from_iterable(one.topk(min(LISTED, len(one))).indices.tolist() for one in both)
    tokens = maps.target_tokens or maps.tokens
    return {
        "position": position,
        "reads": "" if position is None else tokens[position],
        "follows": None if label < 0 else _candidate(maps, label, both),
        "candidates": [_candidate(maps, index, both) for index in dict.fromkeys(likely)],
    }


def _candidate(maps: AttentionMaps, index: int, both: tuple[Tensor, Tensor]) -> list[Any]:
    """Return an output as it is written, its index, and its probability before and after."""
    return [maps.output_names.written(index), index, *(float(one[index]) for one in both)]
