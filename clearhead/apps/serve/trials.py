"""Trials of the explorer: forced decoding of another token, and a sweep of activations from a second text."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from clearhead.apps.serve.interventions import Data, finite_or_none
from clearhead.apps.serve.page_computations import (
    Computation,
    InputText,
    PageRequest,
    outputs_to_compare,
    position_of,
    stack_lengths,
)
from clearhead.apps.serve.work import Work
from clearhead.base.errors import InputError
from clearhead.core import Cache
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.effects import Patches
from clearhead.interpret.maps.outcome import OutcomeChoice
from clearhead.text.word_starts import word_boundaries

LONGEST = 128  # tokens that the model goes on by


class ForcedToken(Data):
    """A token that is put in the place of the one that follows a position.

    Args:
        asked: what the page shows.
        position: of the last token that stays, in what the decoder reads.
        index: of the token behind it.
    """

    asked: PageRequest
    position: Annotated[int, Field(ge=0, lt=2**24)]
    index: Annotated[int, Field(ge=0, lt=2**31)]


@torch.no_grad()
def force_token(computation: Computation, forced: ForcedToken) -> str:
    """Return the text up to a position, with another token after it, and what the model writes from there on.

    The model continues greedily, without special tokens and with the changes of the request.

    Args:
        computation: of the request.
        given: the token.

    Raises:
        InputError: the model does not write text, or there is no such position or token.
    """
    maps, _ = computation.base(forced.asked)
    with computation.watching(), computation.changing(forced.asked.edits, stack_lengths(maps)):
        return _continue(maps, forced, computation.work)


def _continue(maps: AttentionMaps, forced: ForcedToken, work: Work) -> str:
    module, tokenizer, reading = maps.module, maps.tokenizers.target, maps.inputs
    sequence = reading.target or reading.source
    if module.decoder is None or not reading.labels:
        raise InputError("a token can be forced where a model writes text token by token; this one does not")
    if forced.position >= sequence.ids.shape[1] or forced.index >= tokenizer.vocab_size:
        raise InputError(f"there is no token {forced.index} behind position {forced.position}")
    ids = [*sequence.ids[0, : forced.position + 1].tolist(), forced.index]
    memory = None if reading.target is None else module.encode(reading.source.ids, mask=reading.source.mask).memory
    allowed = torch.from_numpy(word_boundaries(tokenizer).ordinary).clone()
    allowed[tokenizer.eos_id] = True
    cache, new = Cache(), sequence.ids.new_tensor([ids])
    most = min(len(ids) + LONGEST, module.max_positions or len(ids) + LONGEST)
    while ids[-1] != tokenizer.eos_id and len(ids) < most:
        work.check()
        logits = module.decode(new, memory, memory_mask=reading.source.mask, cache=cache).logits
        assert logits is not None
        index = int(logits[0, -1, : len(allowed)].cpu().masked_fill(~allowed, -torch.inf).argmax())
        ids.append(index)
        new, memory = new.new_tensor([[index]]), None
    return tokenizer.decode(ids)


Number = Annotated[int, Field(ge=0, lt=2**31)]


class PatchGridRequest(Data):
    """What is asked.

    Args:
        asked: the first text; its changes are left out.
        text, target: the second text, and what the decoder of a two-stack model reads with it.
        position, index: the output that is followed, unless the request compares two: where the last stack reads what
            it is predicted at, and its number; None: the one that `AttentionRun.outcome` chooses.
    """

    asked: PageRequest
    text: InputText
    target: InputText | None = None
    position: Number | None = None
    index: Number | None = None


def compute_patch_grid(computation: Computation, grid: PatchGridRequest) -> dict[str, Any]:
    """Return the changes of `AttentionRun.patch` as JSON; positions behind the end of either text have none.

    Args:
        computation: of the request.
        given: what is patched.

    Raises:
        InputError: a text cannot be read, or there is no such output.
    """
    here, _ = computation.base(grid.asked)
    there, _ = computation.base(PageRequest(text=grid.text, target=grid.target))
    lengths = stack_lengths(there)
    common = {
        name: [(position, position) for position in range(min(length, lengths[name]))]
        for name, length in stack_lengths(here).items()
    }
    with computation.watching():
        return _json(here.patch(there, _choose_output(here, grid), positions=common))


def _json(patches: Patches) -> dict[str, Any]:
    """Return changes as JSON, null where a position has no counterpart."""
    return {
        "outcome": patches.outcome,
        "total": patches.total,
        "tokens": {name: list(tokens) for name, tokens in patches.tokens.items()},
        "streams": {
            name: [list(map(finite_or_none, row)) for row in rows.tolist()] for name, rows in patches.streams.items()
        },
        "heads": [[effect.stack, effect.layer, effect.head, effect.change] for effect in patches.heads],
    }


def _choose_output(maps: AttentionMaps, grid: PatchGridRequest) -> OutcomeChoice:
    if grid.asked.of is not None:
        return outputs_to_compare(maps, grid.asked)
    if grid.index is None:
        return None
    name, position = maps.output_names.name(grid.index), position_of(maps, grid.position)
    return name if position is None else (position, name)
