"""Trials of the explorer: forced decoding of another token, and a sweep of activations from a second text."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from clearhead.apps.serve.interventions import Data, finite
from clearhead.apps.serve.runs import Asked, Computation, Written, outputs_asked, position_of, stack_lengths
from clearhead.apps.serve.work import Work
from clearhead.base.errors import InputError
from clearhead.core import Cache
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.effects import Patches
from clearhead.interpret.maps.outcome import Chosen
from clearhead.text.word_starts import word_boundaries

LONGEST = 128  # tokens that the model goes on by


class Forced(Data):
    """A token that is put in the place of the one that follows a position.

    Args:
        asked: what the page shows.
        position: of the last token that stays, in what the decoder reads.
        index: of the token behind it.
    """

    asked: Asked
    position: Annotated[int, Field(ge=0, lt=2**24)]
    index: Annotated[int, Field(ge=0, lt=2**31)]


@torch.no_grad()
def force_token(computation: Computation, given: Forced) -> str:
    """Return the text up to a position, with another token after it, and what the model writes from there on.

    The model continues greedily, without special tokens and with the changes of the request.

    Args:
        computation: of the request.
        given: the token.

    Raises:
        InputError: the model does not write text, or there is no such position or token.
    """
    maps, _ = computation.base(given.asked)
    with computation.watching(), computation.changing(given.asked.edits, stack_lengths(maps)):
        return _continued(maps, given, computation.work)


def _continued(maps: AttentionMaps, given: Forced, work: Work) -> str:
    module, tokenizer, reading = maps.module, maps.tokenizers.target, maps.reading
    sequence = reading.target or reading.source
    if module.decoder is None or not reading.labels:
        raise InputError("a token can be forced where a model writes text token by token; this one does not")
    if given.position >= sequence.ids.shape[1] or given.index >= tokenizer.vocab_size:
        raise InputError(f"there is no token {given.index} behind position {given.position}")
    ids = [*sequence.ids[0, : given.position + 1].tolist(), given.index]
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


def sweep(computation: Computation, given: Sweep) -> dict[str, Any]:
    """Return the changes of `AttentionRun.patch` as JSON; positions behind the end of either text have none.

    Args:
        computation: of the request.
        given: what is patched.

    Raises:
        InputError: a text cannot be read, or there is no such output.
    """
    here, _ = computation.base(given.asked)
    there, _ = computation.base(Asked(text=given.text, target=given.target))
    lengths = stack_lengths(there)
    common = {
        name: [(position, position) for position in range(min(length, lengths[name]))]
        for name, length in stack_lengths(here).items()
    }
    with computation.watching():
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
