"""Experiments of the live page: force another token, or patch in activations of a second text."""

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

LONGEST = 128  # maximum number of tokens generated after the forced one


class ForcedToken(Data):
    """Body of /force: a token that replaces the next one, after which the model continues.

    Args:
        request: the request that the page shows.
        position: the position of the last unchanged token in the input of the decoder.
        index: the id of the forced token.
    """

    request: PageRequest
    position: Annotated[int, Field(ge=0, lt=2**24)]
    index: Annotated[int, Field(ge=0, lt=2**31)]


@torch.no_grad()
def force_token(computation: Computation, forced: ForcedToken) -> str:
    """Return the text up to a position, the forced token, and the continuation by the model.

    The model continues greedily, without special tokens and with the edits of the request.

    Args:
        computation: the runs of the request.
        forced: the forced token.

    Raises:
        InputError: the model does not generate text, or the position or token does not exist.
    """
    maps, _ = computation.base(forced.request)
    with computation.watching(), computation.changing(forced.request.edits, stack_lengths(maps)):
        return _continue(maps, forced, computation.work)


def _continue(maps: AttentionMaps, forced: ForcedToken, work: Work) -> str:
    module, tokenizer, reading = maps.module, maps.tokenizers.target, maps.inputs
    sequence = reading.target or reading.source
    if module.decoder is None or not reading.labels:
        raise InputError("only a model that generates text can continue a forced token; this one does not")
    if forced.position >= sequence.ids.shape[1] or forced.index >= tokenizer.vocab_size:
        raise InputError(f"there is no token {forced.index} after position {forced.position}")
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
    """Body of /sweep: two texts whose activations are exchanged one by one, and the output to follow.

    Args:
        request: the request with the first text; its edits are ignored.
        text, target: the second text, and the target text of an encoder-decoder.
        position, index: the position and the id of the output to follow, unless `request` compares two outputs. None
            means the output that `AttentionRun.outcome` chooses.
    """

    request: PageRequest
    text: InputText
    target: InputText | None = None
    position: Number | None = None
    index: Number | None = None


def compute_patch_grid(computation: Computation, grid: PatchGridRequest) -> dict[str, Any]:
    """Return the effect of each patch by `AttentionRun.patch` as JSON, for positions that both texts have.

    Args:
        computation: the runs of the request.
        grid: the two texts and the output to follow.

    Raises:
        InputError: a text cannot be read, or the output does not exist.
    """
    here, _ = computation.base(grid.request)
    there, _ = computation.base(PageRequest(text=grid.text, target=grid.target))
    lengths = stack_lengths(there)
    common = {
        name: [(position, position) for position in range(min(length, lengths[name]))]
        for name, length in stack_lengths(here).items()
    }
    with computation.watching():
        return _json(here.patch(there, _choose_output(here, grid), positions=common))


def _json(patches: Patches) -> dict[str, Any]:
    """Return the effects of all patches as JSON; null for a position that is missing from the second text."""
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
    if grid.request.of is not None:
        return outputs_to_compare(maps, grid.request)
    if grid.index is None:
        return None
    name, position = maps.output_names.name(grid.index), position_of(maps, grid.position)
    return name if position is None else (position, name)
