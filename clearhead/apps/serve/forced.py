"""Forced decoding: a text that somebody would have preferred, token by token, and how the model goes on from there."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from clearhead.apps.serve.interventions import Data
from clearhead.apps.serve.runs import Asked
from clearhead.apps.serve.work import Work
from clearhead.base.errors import InputError
from clearhead.core import Cache
from clearhead.interpret.maps.attention_maps import AttentionMaps
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
def forced(maps: AttentionMaps, given: Forced, work: Work) -> str:
    """Return the text up to a position, with another token behind it, and what the model writes from there on.

    It goes on greedily, without special tokens, in the calling context with its changes.

    Args:
        maps: of the run that the page shows.
        given: the token.
        work: ends the computation where nobody waits for it.

    Raises:
        InputError: the model does not write text, or there is no such position or token.
    """
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
