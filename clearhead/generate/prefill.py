"""Prefill: the model reads prompts into a KV cache before it generates the first token.

Prompts of a batch are padded on the left, so that they end at the same position. Positions count real tokens only, so
padding does not change the results.

`Prefixes` keeps keys and values of the beginnings of prompts for later prompts with the same beginning. It holds copies
of blocks of tokens, so using or dropping a block changes no running sequence. The state of a token does not depend on
the chunks in which its prompt was read. So a shared beginning changes no bit of a result if `Runner.is_batch_invariant`
is true; otherwise results agree up to rounding.

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
"""Number of tokens in a block; prompts share their beginnings in whole blocks."""
LEAST_REST: Final = 2
"""Minimum number of tokens of a prompt that are read: a single token is read as in a step, with other last digits."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Keys and values of one block of prompt tokens, with their scales, for every attention of a model."""

    number: int
    tensors: dict[tuple[str, tuple[nn.Module, int]], Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Prefixes:
    """Cache of the keys and values of prompt beginnings for one model; the least recently used are dropped first.

    Args:
        most_bytes: maximum size of their keys and values, in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes: int = most_bytes
        self.num_bytes: int = 0
        self._blocks: OrderedDict[Hashable, _Block] = OrderedDict()
        self._numbers = itertools.count(1)

    def count(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens at the beginning of a prompt that are cached and need not be read."""
        return BLOCK_TOKENS * len(self._find_blocks(prompt))

    def take(self, prompt: Sequence[int], cache: IndexedCache) -> int:
        """Copy the cached beginning of a prompt into an empty cache and return its number of tokens."""
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
        """Store a copy of the beginning of a prompt.

        Args:
            prompt: ids of the prompt.
            cache: cache with one row that begins with the prompt, without padding. Nothing is stored if custom modules
                keep state in the cache, because that state cannot be cut.
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
        # A block is usable only while the earlier blocks are cached, so the first block is dropped last.
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
    """Return whether prompts can share beginnings: the model runs on the CPU, and tokens depend on earlier ones only.

    Sharing is impossible for a model with an encoder, or with a mask that lets a token see later tokens. It is also
    impossible if rotations depend on the length of the whole sequence.
    """
    nodes = [node for _, node in spec.walk(module.spec)]
    if module.encoder is not None or any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return False
    if any(isinstance(node, spec.Full | spec.DynamicScaling | spec.LongRopeScaling) for node in nodes):
        return False
    return not any(isinstance(node, spec.Window) and node.after for node in nodes)


@dataclass(frozen=True)
class Prefill:
    """Result of a prefill: the KV cache of the prompts and the logits of their next tokens.

    Args:
        cache: KV cache with all tokens of the prompts.
        ids: ids of the prompts; `NO_ID` marks padding.
        source_ids: ids of the sources; `NO_ID` marks padding. For a decoder-only model, the prompts.
        logits: fp32 logits of the next token of each prompt.
    """

    cache: IndexedCache
    ids: Int[Tensor, "rows tokens"]
    source_ids: Int[Tensor, "rows source"]
    logits: Float[Tensor, "rows vocab"]

    def repeat(self, count: int) -> Prefill:
        """Return every prompt `count` times in adjacent rows, each with its own rows of the cache."""
        if count == 1:
            return self
        rows_R = torch.arange(len(self.ids), device=self.ids.device).repeat_interleave(count)
        self.cache.select(rows_R, memory_rows=rows_R)
        parts = {name: getattr(self, name)[rows_R] for name in ("ids", "source_ids", "logits")}
        return replace(self, **parts)

    def split_prompts(self) -> list[Prefill]:
        """Return each prompt as its own `Prefill` without padding; this object must not be used afterwards."""
        lengths, sources = ((ids != NO_ID).sum(1).tolist() for ids in (self.ids, self.source_ids))
        caches = split_rows(self.cache, lengths, sources if self.cache.memory_attention else None)
        return [
            Prefill(
                cache,
                self.ids[row : row + 1, -length:],
                # Sources are padded on the right, prompts on the left.
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
    """Run the model over prompts and return their cache and next logits.

    Args:
        module: a decoder-only or encoder-decoder model in evaluation mode.
        prompts: ids that the decoder reads, none empty.
        sources: ids that the encoder reads, one sequence for each prompt. None means a decoder-only model.
        pad_id: id of the padding token.
        limits: maximum number of generated tokens for each prompt, for RoPE scaling that depends on the total length.
            None means unknown.
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
        assert out.logits is not None, "the model must have a head over a vocabulary"
        return Prefill(cache, prompt_RT, source_RS.masked_fill(~memory_mask, NO_ID), out.logits[:, -1].float())
    assert module.decoder is not None and module.head is not None, "no decoder or no head: call check_model first"
    hidden_RTD = module.decoder(Read(ids_RT, mask), None, None, cache)
    # The head runs on the last token only: all logits of a long prompt would take more memory than its hidden states.
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
    """Run the model over one prompt, `CHUNK_TOKENS` at a time; yield None after each chunk except the last.

    Args:
        module: a decoder-only or encoder-decoder model in evaluation mode.
        prompt: ids that the decoder reads, not empty.
        source: ids that the encoder reads. None means a decoder-only model.
        pad_id: id of the padding token.
        limit: maximum number of generated tokens.
        prefixes: cached beginnings of prompts of this model. A cached beginning is not read again, and the beginning of
            this prompt is stored. None means no sharing.
    """
    if source is not None or (prefixes is None and len(prompt) <= CHUNK_TOKENS):
        sources = None if source is None else [source]
        yield prefill_prompts(module, [prompt], sources, pad_id=pad_id, limits=[limit])
        return
    assert module.decoder is not None and module.head is not None, "no decoder or no head: call check_model first"
    ids_1T = torch.tensor([list(prompt)], device=device_of(module))
    cache = IndexedCache(torch.tensor([len(prompt) + limit], device=ids_1T.device))
    shared = 0 if prefixes is None else prefixes.take(prompt, cache)
    # A single token is read as in a step, with other last digits than among several. So it is no chunk by itself.
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
    """Refuse models that do not predict next tokens, and sources that do not match the model.

    Raises:
        InputError: the model has no decoder or no head over a vocabulary, or sources do not match its stacks.
    """
    if module.decoder is None:
        raise InputError("generation needs a model with a decoder, but this model has only an encoder")
    if module.head is None or module.head.is_pooled:
        raise InputError("generation needs a model whose head predicts the next token, but this model's head does not")
    if with_sources and module.encoder is None:
        raise InputError("sources need a model with an encoder, but this model reads its prompt with the decoder")
    if module.encoder is not None and not with_sources:
        raise InputError("a model with an encoder needs a source for each prompt")


def token_limits(
    module: Transformer, prompts: Sequence[Sequence[int]], options: GenerateOptions, *, most: int | None = None
) -> list[int]:
    """Return the maximum number of tokens that can be generated for each prompt.

    The position limit applies to prompt and generated tokens together. A table of positions allows one more token,
    because the model never reads the last one. Without a limit, a prompt may have `LONGEST_PROMPT` tokens.

    Args:
        module: the model.
        prompts: ids that the decoder reads.
        options: options of generation.
        most: the checkpoint's limit for prompt and generated tokens together. None means no such limit.

    Raises:
        ContextTooLong: a prompt, alone or with the requested tokens, exceeds the position limit.
        InputError: a prompt is empty, longer than `LONGEST_PROMPT`, or holds ids outside the vocabulary.
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
            faults.append(f"prompt {number} holds ids outside the vocabulary: use ids below {module.num_target_ids}.")
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
