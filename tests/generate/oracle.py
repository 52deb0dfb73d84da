"""A model whose next-token logits are any function of source and prefix, and searches plain enough to be believed."""

from __future__ import annotations

import functools
import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.core import Output, Transformer
from clearhead.fast.cache import IndexedCache
from clearhead.generate import running
from clearhead.generate.options import SearchOptions
from clearhead.generate.results import Continuation

PAD, BOS, EOS = 0, 1, 2
NextLogits = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float]]


def random_logits(vocab: int, *, spread: float = 2.0, end_bonus: float = 0.0) -> NextLogits:
    """Logits that look random, but depend on nothing but source and prefix."""

    @functools.cache
    def next_logits(source: tuple[int, ...], prefix: tuple[int, ...]) -> Sequence[float]:
        draw = random.Random(zlib.crc32(repr((source, prefix)).encode()))
        logits = [draw.gauss(0.0, spread) for _ in range(vocab)]
        logits[EOS] += end_bonus
        return logits

    return next_logits


def use_prefix_caches(patch: pytest.MonkeyPatch) -> None:
    """Let caches hold sources and prefixes themselves, and reorder them as if they were keys and values."""

    def select(self: Any, rows: Tensor, memory_rows: Tensor | None = None) -> None:
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]
        if memory_rows is not None:
            self.sources = [self.sources[row] for row in memory_rows.tolist()]

    def join(caches: list[Any]) -> Any:
        """Return a cache with the rows of all."""
        whole: Any = IndexedCache()
        whole.sources = [source for cache in caches for source in cache.sources]
        whole.prefixes = [prefix for cache in caches for prefix in cache.prefixes]
        return whole

    patch.setattr(IndexedCache, "select", select)
    patch.setattr(IndexedCache, "is_separable", True)
    patch.setattr(running, "concat_caches", join)


class PrefixModel(Transformer):
    """Answers the decoder's calls from a function; its "memory" is the source itself."""

    def __init__(self, next_logits: NextLogits, vocab: int, max_positions: int | None = None) -> None:
        nn.Module.__init__(self)
        self.next_logits = next_logits
        self.vocab = vocab
        self.most = max_positions
        self.spec = SimpleNamespace(position_limit=max_positions)  # type: ignore[assignment]
        self.rows_per_call: list[int] = []

    @property
    def max_positions(self) -> int | None:
        return self.most

    @property
    def num_target_ids(self) -> int:
        return self.vocab

    def encode(self, ids: Tensor, **_: object) -> Output:
        return Output(logits=None, hidden=ids[:, :, None].float(), memory=ids[:, :, None].float())

    def decode(
        self,
        target_ids: Tensor,
        memory: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Output:
        assert target_mask is None and target_ids.shape[1] == 1
        if memory is not None:
            assert memory_mask is not None
            rows = zip(memory[:, :, 0].long().tolist(), memory_mask.tolist(), strict=True)
            cache.sources = [tuple(itertools.compress(ids, mask)) for ids, mask in rows]
            cache.prefixes = [() for _ in cache.sources]
        self.rows_per_call.append(len(target_ids))
        cache.prefixes = [
            (*prefix, token) for prefix, token in zip(cache.prefixes, target_ids[:, 0].tolist(), strict=True)
        ]
        beams = len(cache.prefixes) // len(cache.sources)
        assert beams * len(cache.sources) == len(cache.prefixes)
        logits = [self.next_logits(cache.sources[row // beams], prefix) for row, prefix in enumerate(cache.prefixes)]
        logits_R1V = torch.tensor(logits, dtype=torch.float32)[:, None]
        return Output(logits=logits_R1V, hidden=logits_R1V, memory=memory)


@dataclass(frozen=True)
class Problem:
    """One sentence to search: its source, what follows each prefix, and the settings."""

    next_logits: NextLogits
    source: tuple[int, ...]
    options: SearchOptions

    @property
    def limit(self) -> int:
        return self.options.target_limit(len(self.source), None)

    def choices(self, ids: tuple[int, ...]) -> dict[int, float]:
        """Log-probability of every token that may come next."""
        log_probs = self.log_probs(ids)
        too_short = len(ids) + 1 < self.options.min_length
        return {i: p for i, p in enumerate(log_probs) if i not in (PAD, BOS) and not (i == EOS and too_short)}

    def log_probs(self, ids: tuple[int, ...]) -> list[float]:
        """Log-probability of every id, those that may not be chosen too."""
        logits = self.next_logits(self.source, (BOS, *ids))
        normaliser = math.log(math.fsum(math.exp(logit) for logit in logits))
        return [logit - normaliser for logit in logits]

    def candidate(self, ids: tuple[int, ...], total: float, cut_off: bool = False) -> Continuation:
        score = total / len(ids) ** self.options.length_penalty
        return Continuation(ids, score, total, "length" if cut_off else "end")

    def best(self, candidates: list[Continuation]) -> list[Continuation]:
        return sorted(candidates, key=lambda c: (-c.score, len(c.ids), c.ids))[: self.options.n_best]


def every_sequence(problem: Problem) -> list[Continuation]:
    """The best of all sequences that end within the limit."""
    finished = []
    live: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(problem.limit):
        extended = {(*ids, i): total + p for ids, total in live.items() for i, p in problem.choices(ids).items()}
        finished += [problem.candidate(ids, total) for ids, total in extended.items() if ids[-1] == EOS]
        live = {ids: total for ids, total in extended.items() if ids[-1] != EOS}
    return problem.best(finished)


def plain_beam_search(problem: Problem) -> list[Continuation]:
    """The rules of `clearhead.generate.search.beam` in their plainest form, always run on to the limit."""
    beams = problem.options.beam_size
    finished: list[Continuation] = []
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(problem.limit):
        extended = [((*ids, i), total + p) for ids, total in live for i, p in problem.choices(ids).items()]
        extended.sort(key=lambda entry: -entry[1])
        finished += [problem.candidate(ids, total) for ids, total in extended[:beams] if ids[-1] == EOS]
        before, live = live, [entry for entry in extended if entry[0][-1] != EOS][:beams]
        if (beams == 1 and finished) or not live:
            break
    if not finished:
        for ids, total in before:
            finished.append(problem.candidate((*ids, EOS), total + problem.log_probs(ids)[EOS], cut_off=True))
    return problem.best(finished)
