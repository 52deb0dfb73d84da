"""Prefill: prompts are read in one pass into a KV cache, before any token is generated.

Prompts of a batch are padded on the left, so that they end together. Positions count real tokens only, so padding does
not change the results.

Shapes: R rows (prompts), T prompt tokens, S source tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.base.errors import ContextTooLong, InputError, Message, argument
from clearhead.core import Sequence as Read
from clearhead.core import Transformer
from clearhead.fast.cache import IndexedCache, each_row
from clearhead.generate.batching import device_of, pad_ids, position_limit
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefixes import Prefixes
from clearhead.generate.processors import NO_ID
from clearhead.text.long_texts import LONGEST_PROMPT

_READERS = {True: "contrastive search", False: "an answer"}
PIECE_TOKENS = 512
"""Of a prompt that are read between two steps of a running batch; kernels cut prompts at multiples of it."""


@dataclass(frozen=True)
class Prefill:
    """Prompts that the model has read.

    Args:
        cache: KV cache with all their tokens.
        ids: the prompts, `NO_ID` for padding.
        source_ids: the sources, `NO_ID` for padding; the prompts for a decoder-only model.
        hidden: the decoder's last hidden states of all their tokens, or of those of the last piece.
        logits: fp32, of the next token of each.
    """

    cache: IndexedCache
    ids: Int[Tensor, "rows tokens"]
    source_ids: Int[Tensor, "rows source"]
    hidden: Float[Tensor, "rows read width"]
    logits: Float[Tensor, "rows vocab"]

    def repeat(self, count: int) -> Prefill:
        """Return every prompt `count` times, side by side, each with its own rows of the cache."""
        if count == 1:
            return self
        rows_R = torch.arange(len(self.ids), device=self.ids.device).repeat_interleave(count)
        self.cache.select(rows_R, memory_rows=rows_R)
        parts = {name: getattr(self, name)[rows_R] for name in ("ids", "source_ids", "hidden", "logits")}
        return replace(self, **parts)

    def each_prompt(self) -> list[Prefill]:
        """Return each prompt by itself, without padding; this one is no longer used."""
        lengths, sources = ((ids != NO_ID).sum(1).tolist() for ids in (self.ids, self.source_ids))
        caches = each_row(self.cache, lengths, sources if self.cache.memory_attention else None)
        return [
            Prefill(
                cache,
                self.ids[row : row + 1, -length:],
                # Sources are padded behind their tokens, prompts in front of them.
                self.source_ids[row : row + 1, :source]
                if cache.memory_attention
                else self.source_ids[row : row + 1, -source:],
                self.hidden[row : row + 1, -length:],
                self.logits[row : row + 1],
            )
            for row, (cache, length, source) in enumerate(zip(caches, lengths, sources, strict=True))
        ]


def prefill_prompts(
    module: Transformer,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]] | None = None,
    *,
    pad_id: int,
    limits: Sequence[int] | None = None,
) -> Prefill:
    """Run the model over prompts.

    Args:
        module: in evaluation mode; a decoder-only or encoder-decoder model.
        prompts: ids of the decoder, none empty.
        sources: ids of the encoder, one sequence for each prompt; None for a decoder-only model.
        pad_id: padding id.
        limits: most tokens generated for each prompt, for RoPE scaling that depends on the total length; None: not
            known.
    """
    ids_RT, mask_RT = pad_left(prompts, pad_id, device_of(module))
    all_real = bool(mask_RT.all())
    mask = None if all_real else mask_RT
    cache = IndexedCache()
    if limits is not None:
        declared = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        cache.total_length = torch.tensor(declared, device=ids_RT.device)
    assert module.decoder is not None and module.head is not None, "check_model lets no other model through"
    prompt_RT = source_ids_RS = ids_RT.masked_fill(~mask_RT, NO_ID)
    memory, memory_mask = None, None
    if sources is not None:
        source_RS, memory_mask = pad_ids(sources, pad_id, device_of(module))
        memory = module.encode(source_RS, mask=memory_mask).memory
        cache.memory_mask = memory_mask
        source_ids_RS = source_RS.masked_fill(~memory_mask, NO_ID)
    # Of the last token only: all logits of a long prompt would take more memory than its hidden states.
    hidden_RTD = module.decoder(Read(ids_RT, mask), memory, memory_mask, cache)
    logits_RV = module.head(hidden_RTD[:, -1:])[:, -1].float()
    return Prefill(cache, prompt_RT, source_ids_RS, hidden_RTD, logits_RV)


def prefill_pieces(
    module: Transformer,
    prompt: Sequence[int],
    source: Sequence[int] | None,
    *,
    pad_id: int,
    limit: int,
    prefixes: Prefixes | None = None,
) -> Iterator[Prefill | None]:
    """Run the model over one prompt, `PIECE_TOKENS` at a time; yield None after each piece but the last.

    Args:
        module: in evaluation mode; a decoder-only or encoder-decoder model.
        prompt: ids of the decoder, not empty.
        source: ids of the encoder; None for a decoder-only model.
        pad_id: padding id.
        limit: most tokens generated.
        prefixes: of the model, where it can share them: a beginning that is kept is not read, and the prompt's is kept.
    """
    if source is not None or (prefixes is None and len(prompt) <= PIECE_TOKENS):
        sources = None if source is None else [source]
        yield prefill_prompts(module, [prompt], sources, pad_id=pad_id, limits=[limit])
        return
    assert module.decoder is not None and module.head is not None, "check_model lets no other model through"
    ids_1T = torch.tensor([list(prompt)], device=device_of(module))
    cache = IndexedCache(torch.tensor([len(prompt) + limit], device=ids_1T.device))
    shared = 0 if prefixes is None else prefixes.take(prompt, cache)
    # One token is read as a step reads it, to other last digits than among several, so it is no piece.
    starts = range(shared, max(len(prompt) - 1, shared + 1), PIECE_TOKENS)
    for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
        if start > shared:
            yield None
        hidden_1TD = module.decoder(Read(ids_1T[:, start:stop]), None, None, cache)
    if prefixes is not None:
        prefixes.keep(prompt, cache)
    logits_1V = module.head(hidden_1TD[:, -1:])[:, -1].float()
    yield Prefill(cache, ids_1T, ids_1T, hidden_1TD, logits_1V)


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Return sequences as a left-padded int64 tensor, and the mask of their real tokens."""
    longest = max(len(sequence) for sequence in sequences)
    ids_BT = torch.tensor([[*[pad_id] * (longest - len(sequence)), *sequence] for sequence in sequences], device=device)
    padding_B1 = torch.tensor([[longest - len(sequence)] for sequence in sequences], device=device)
    return ids_BT, torch.arange(longest, device=device) >= padding_B1


def check_model(module: Transformer, *, with_sources: bool) -> None:
    """Refuse models that do not predict next tokens.

    Raises:
        InputError: there is no decoder, no head over a vocabulary, or sources do not match the stacks.
    """
    if module.decoder is None:
        raise InputError("generation needs a model with a decoder; this one has only an encoder")
    if module.head is None or module.head.is_pooled:
        raise InputError("generation needs a model whose head predicts the next token; this one's head does not")
    if with_sources and module.encoder is None:
        raise InputError("sources are for a model with an encoder; this one reads its prompt with the decoder")
    if module.encoder is not None and not with_sources:
        raise InputError("a model with an encoder needs a source for each prompt")


def token_limits(
    module: Transformer, prompts: Sequence[Sequence[int]], options: GenerateOptions, *, most: int | None = None
) -> list[int]:
    """Return how many tokens can be generated for each prompt.

    The position limit holds for prompt and generated tokens together. A table of positions leaves room for one more
    token, because the last one is not read; except in contrastive search, which reads its candidates. Without a limit a
    prompt may have `LONGEST_PROMPT` tokens.

    Args:
        module: the model.
        prompts: ids of its decoder.
        options: of generation.
        most: prompt and generated tokens together, as a checkpoint limits them; None: no such limit.

    Raises:
        ContextTooLong: a prompt, or a prompt with the tokens that the call asks for, has more than the position limit.
        InputError: a prompt is empty, longer than what is read at once, or holds ids outside the vocabulary.
    """
    positions = position_limit(module, options)
    is_table, is_contrastive = positions == module.max_positions, options.method == "contrastive"
    unread = int(is_table and not is_contrastive)
    needs = "" if unread else f" and {_READERS[is_contrastive]} needs one more"
    lift = "." if is_table else Message(", or set ", argument("beyond_positions"), ".")
    faults, limits, kind = [], [], InputError
    for number, prompt in enumerate(prompts, start=1):
        room = options.max_new_tokens if positions is None else positions - len(prompt) + unread
        wanted = options.max_new_tokens if most is None else most - len(prompt)
        if not prompt:
            faults.append(f"prompt {number} has no tokens: begin it with the start token.")
        elif not 0 <= min(prompt) <= max(prompt) < module.num_target_ids:
            faults.append(f"prompt {number} holds ids outside the model's {module.num_target_ids} rows.")
        elif room < 1:
            kind = ContextTooLong
            faults.append(
                f"prompt {number} has {len(prompt)} tokens, the start token included, but the model has {positions} "
                f"positions{needs}: shorten it" + lift
            )
        elif module.max_positions is None and len(prompt) > LONGEST_PROMPT:
            faults.append(
                f"prompt {number} has {len(prompt):,} tokens, but at most {LONGEST_PROMPT:,} are read at once: "
                "shorten it."
            )
        elif options.must_fit and positions is not None and len(prompt) + options.max_new_tokens > positions:
            kind = ContextTooLong
            faults.append(
                f"prompt {number} has {len(prompt)} tokens and "
                + argument("max_new_tokens")
                + f" is {options.max_new_tokens}, together {len(prompt) + options.max_new_tokens}, but the model has "
                f"{positions} positions ({positions - len(prompt)} left): ask for fewer, shorten the prompt" + lift
            )
        elif wanted < 1:
            faults.append(
                f"prompt {number} has {len(prompt)} tokens, but the checkpoint's max_length is {most} with the prompt: "
                "set " + argument("max_new_tokens") + "."
            )
        limits.append(min(room, wanted, options.max_new_tokens))
    if faults:
        raise kind.from_faults(faults, subject="the prompts")
    return limits
