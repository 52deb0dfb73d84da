"""Beginnings of prompts whose keys and values are kept for the next prompt that begins alike.

They are kept in blocks of tokens, each a copy, so that nothing that runs is touched when one is used or given up. What
is computed of a token does not depend on where its prompt is cut, so that a result has the same bits with a kept
beginning as without (where `Runner.is_batch_invariant`; elsewhere it is the same up to rounding).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import Transformer
from clearhead.fast.cache import IndexedCache

BLOCK_TOKENS: Final = 64
"""Of a block; beginnings are shared in whole blocks."""
LEAST_REST: Final = 2
"""Tokens of a prompt that are read in any case: one alone would be read as a step reads it, to other last digits."""


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
        return BLOCK_TOKENS * len(self._kept(prompt))

    def take(self, prompt: Sequence[int], cache: IndexedCache) -> int:
        """Put what is kept of a prompt's beginning into an empty cache; return how many tokens that are."""
        blocks = self._kept(prompt)
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
        if cache.kept or not cache.self_attention or cache.row_index is not None:
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

    def _kept(self, prompt: Sequence[int]) -> list[tuple[Hashable, _Block]]:
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
