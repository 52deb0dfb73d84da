"""Prefill: the model reads prompts into a KV cache before it generates the first token.

Prompts of a batch are padded on the left, so that they end together. Positions count real tokens only, so padding does
not change the results.

`Prefixes` holds keys and values of the beginnings of prompts for later prompts that begin alike. It holds copies of
blocks of tokens, so that no running sequence is touched when a block is used or dropped. The state of a token does not
depend on the chunks that its prompt was read in. So a shared beginning changes no bit of a result, where
`Runner.is_batch_invariant`; elsewhere results agree up to rounding.

Shapes: R rows (prompts), T prompt tokens, S source tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.errors import ContextTooLong, InputError, Message, argument
from clearhead.core import Sequence as Read
from clearhead.core import Transformer
from clearhead.fast.cache import IndexedCache, split_rows
from clearhead.generate.batching import device_of, pad_ids, position_limit
from clearhead.generate.options import GenerateOptions
from clearhead.generate.processors import NO_ID
from clearhead.text.long_texts import LONGEST_PROMPT

CHUNK_TOKENS = 512
"""Tokens of a prompt that are read between two steps of a running batch; kernels cut prompts at its multiples."""
BLOCK_TOKENS: Final = 64
"""Tokens of a block; prompts share their beginnings in whole blocks."""
LEAST_REST: Final = 2
"""Tokens of a prompt that are always read: a single token is read as in a step, with other last digits."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Keys and values of a block, and their scales, by the names of a cache's tables and by attention."""

    number: int
    tensors: dict[tuple[str, tuple[nn.Module, int]], Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Prefixes:
    """The beginnings of prompts that one model has read; those used longest ago leave first.

    Args:
        most_bytes: of their keys and values.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes: int = most_bytes
        self.num_bytes: int = 0
        self._blocks: OrderedDict[Hashable, _Block] = OrderedDict()
        self._numbers = itertools.count(1)

    def count(self, prompt: Sequence[int]) -> int:
        """Return how many tokens at the beginning of a prompt are kept, and need not be read."""
        return BLOCK_TOKENS * len(self._find_blocks(prompt))

    def take(self, prompt: Sequence[int], cache: IndexedCache) -> int:
        """Put what is kept of a prompt's beginning into an empty cache; return how many tokens that are."""
        blocks = self._find_blocks(prompt)
        self._touch([name for name, _ in blocks])
        if blocks:
            cache.length = BLOCK_TOKENS * len(blocks)
            for table, attention in blocks[0][1].tensors:
                entry = getattr(cache, table)[attention]
                entry.length = cache.length
                entry.buffer = torch.cat([block.tensors[table, attention] for _, block in blocks], dim=3)
        return cache.length

    def keep(self, prompt: Sequence[int], cache: IndexedCache) -> None:
        """Keep copies of the beginning of a prompt.

        Args:
            prompt: its ids.
            cache: with one row, which begins with the prompt, and no padding. What own parts keep cannot be cut.
        """
        if cache.states or not cache.self_attention or cache.row_index is not None:
            return
        names: list[Hashable] = []
        number = 0
        for start in _starts(prompt):
            names.append(name := (number, tuple(prompt[start : start + BLOCK_TOKENS])))
            if name not in self._blocks:
                self._blocks[name] = _block_of(cache, start, next(self._numbers))
                self.num_bytes += self._blocks[name].num_bytes
            number = self._blocks[name].number
        self._touch(names)
        while self.num_bytes > self.most_bytes:
            _, block = self._blocks.popitem(last=False)
            self.num_bytes -= block.num_bytes

    def _find_blocks(self, prompt: Sequence[int]) -> list[tuple[Hashable, _Block]]:
        blocks: list[tuple[Hashable, _Block]] = []
        number = 0
        for start in _starts(prompt):
            name = (number, tuple(prompt[start : start + BLOCK_TOKENS]))
            block = self._blocks.get(name)
            if block is None:
                break
            blocks.append((name, block))
            number = block.number
        return blocks

    def _touch(self, names: Sequence[Hashable]) -> None:
        # A block is of use only while those before it are kept, so the first of them leaves last.
        for name in reversed(names):
            self._blocks.move_to_end(name)


def _starts(prompt: Sequence[int]) -> range:
    return range(0, (len(prompt) - LEAST_REST) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS)


def _block_of(cache: IndexedCache, start: int, number: int) -> _Block:
    tensors = {}
    for table in ("self_attention", "scales"):
        for attention, entry in getattr(cache, table).items():
            assert entry.buffer is not None
            tensors[table, attention] = entry.buffer[:, :, :, start : start + BLOCK_TOKENS].clone()
    return _Block(number, tensors)


def can_share(module: Transformer) -> bool:
    """Return whether what a model computes of a token depends on the tokens before it alone, and runs on the CPU.

    It does not where an encoder reads a text, a mask lets a token see later ones, or positions are rotated by the
    length of the whole sequence.
    """
    nodes = [node for _, node in spec.walk(module.spec)]
    if module.encoder is not None or any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return False
    if any(isinstance(node, spec.Full | spec.DynamicScaling | spec.LongRopeScaling) for node in nodes):
        return False
    return not any(isinstance(node, spec.Window) and node.after for node in nodes)


@dataclass(frozen=True)
class Prefill:
    """Prompts that the model has read.

    Args:
        cache: KV cache with all their tokens.
        ids: the prompts, `NO_ID` for padding.
        source_ids: the sources, `NO_ID` for padding; the prompts for a decoder-only model.
        logits: fp32, of the next token of each.
    """

    cache: IndexedCache
    ids: Int[Tensor, "rows tokens"]
    source_ids: Int[Tensor, "rows source"]
    logits: Float[Tensor, "rows vocab"]

    def repeat(self, count: int) -> Prefill:
        """Return every prompt `count` times, side by side, each with its own rows of the cache."""
        if count == 1:
            return self
        rows_R = torch.arange(len(self.ids), device=self.ids.device).repeat_interleave(count)
        self.cache.select(rows_R, memory_rows=rows_R)
        parts = {name: getattr(self, name)[rows_R] for name in ("ids", "source_ids", "logits")}
        return replace(self, **parts)

    def split_prompts(self) -> list[Prefill]:
        """Return each prompt by itself, without padding; this one is no longer used."""
        lengths, sources = ((ids != NO_ID).sum(1).tolist() for ids in (self.ids, self.source_ids))
        caches = split_rows(self.cache, lengths, sources if self.cache.memory_attention else None)
        return [
            Prefill(
                cache,
                self.ids[row : row + 1, -length:],
                # Sources are padded behind their tokens, prompts in front of them.
                self.source_ids[row : row + 1, :source]
                if cache.memory_attention
                else self.source_ids[row : row + 1, -source:],
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
    prompt_RT = ids_RT.masked_fill(~mask_RT, NO_ID)
    if sources is not None:
        source_RS, memory_mask = pad_ids(sources, pad_id, device_of(module))
        memory = module.encode(source_RS, mask=memory_mask).memory
        out = module.decode(ids_RT, memory, memory_mask=memory_mask, target_mask=mask, cache=cache)
        assert out.logits is not None, "a model that generates has a head"
        return Prefill(cache, prompt_RT, source_RS.masked_fill(~memory_mask, NO_ID), out.logits[:, -1].float())
    assert module.decoder is not None and module.head is not None, "check_model lets no other model through"
    hidden_RTD = module.decoder(Read(ids_RT, mask), None, None, cache)
    # Of the last token only: all logits of a long prompt would take more memory than its hidden states.
    logits_RV = module.head(hidden_RTD[:, -1:])[:, -1].float()
    return Prefill(cache, prompt_RT, prompt_RT, logits_RV)


def prefill_chunks(
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
    if source is not None or (prefixes is None and len(prompt) <= CHUNK_TOKENS):
        sources = None if source is None else [source]
        yield prefill_prompts(module, [prompt], sources, pad_id=pad_id, limits=[limit])
        return
    assert module.decoder is not None and module.head is not None, "check_model lets no other model through"
    ids_1T = torch.tensor([list(prompt)], device=device_of(module))
    cache = IndexedCache(torch.tensor([len(prompt) + limit], device=ids_1T.device))
    shared = 0 if prefixes is None else prefixes.take(prompt, cache)
    # One token is read as a step reads it, to other last digits than among several, so it is no piece.
    starts = range(shared, max(len(prompt) - 1, shared + 1), CHUNK_TOKENS)
    for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
        if start > shared:
            yield None
        hidden_1TD = module.decoder(Read(ids_1T[:, start:stop]), None, None, cache)
    if prefixes is not None:
        prefixes.keep(prompt, cache)
    logits_1V = module.head(hidden_1TD[:, -1:])[:, -1].float()
    yield Prefill(cache, ids_1T, ids_1T, logits_1V)


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
    token, because the model does not read the last one. Without a limit a prompt may have `LONGEST_PROMPT` tokens.

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
    is_table = positions == module.max_positions
    unread = int(is_table)
    needs = "" if is_table else " and an answer needs one more"
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
