"""Greedy search and sampling: one token after the other.

Every sequence has its own stream of random numbers, so that its text does not depend on the other rows of its batch.

Shapes: R rows (sequences still in the batch), T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import PCG64, Generator, SeedSequence
from torch import Tensor

from clearhead.core import Transformer
from clearhead.fast.draw import draw_tokens
from clearhead.fast.top import top_and_log_total
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefill import Prefill
from clearhead.generate.processors import Processor, apply, build_logits_warpers, only_banned, select

# Numbers drawn at a time; it does not change the stream.
_DRAWN_AHEAD = 64
# Of more than these, finding one more candidate for each costs more than a pass over the changed logits.
_FEW_BANNED = 16


def fetch(tokens_R: Int[Tensor, " rows"], log_probs_R: Float[Tensor, " rows"]) -> tuple[list[int], list[float]]:
    """Copy tokens and log-probabilities to Python with a single synchronisation."""
    both = torch.stack([tokens_R.double(), log_probs_R.double()]).tolist()
    return [int(token) for token in both[0]], both[1]


def draw(probs_RV: Float[Tensor, "rows vocab"], uniform_R: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw one id from each row by inverting the cumulative distribution.

    Args:
        probs_RV: not negative; ids of probability 0 are never drawn.
        uniform_R: uniform random numbers, fp64, from 0 to below 1.
    """
    # The rounding errors of an fp32 cumulative sum exceed the probabilities of rare tokens.
    running_RV = probs_RV.double().cumsum(1)
    total_R1 = running_RV[:, -1:]
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    place_R1 = torch.searchsorted(running_RV, torch.minimum(uniform_R[:, None] * total_R1, below_R1), right=True)
    return place_R1[:, 0].clamp_(max=probs_RV.shape[1] - 1)


class RandomStreams:
    """A stream of uniform random numbers for each row.

    Args:
        seeds: one for each row.
        device: of the numbers.
    """

    def __init__(self, seeds: Sequence[SeedSequence], device: torch.device) -> None:
        self._generators = [Generator(PCG64(seed)) for seed in seeds]
        self._device = device
        self._used = _DRAWN_AHEAD
        self._drawn_RN: Float[Tensor, "rows ahead"] | None = None

    def next(self) -> Float[Tensor, " rows"]:
        """Return the next number of each row, fp64, from 0 to below 1."""
        if self._drawn_RN is None or self._used == _DRAWN_AHEAD:
            drawn = np.stack([generator.random(_DRAWN_AHEAD) for generator in self._generators])
            self._drawn_RN, self._used = torch.from_numpy(drawn).to(self._device), 0
        self._used += 1
        return self._drawn_RN[:, self._used - 1]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        self._generators = [self._generators[row] for row in rows]
        if self._drawn_RN is not None:
            self._drawn_RN = self._drawn_RN[list(rows)]


def sequence_seed(seed: int | None, number: int, ids: Sequence[int]) -> SeedSequence:
    """Return the seed of one sequence, which depends on the user's seed, the prompt, and the sequence's number.

    Args:
        seed: None: a new one in every call.
        number: of the sequence among those of its prompt.
        ids: the prompt, followed by the source if there is one.
    """
    return SeedSequence() if seed is None else SeedSequence([seed, number, len(ids), *ids])


@dataclass(frozen=True)
class TokenChooser:
    """Chooses the next token of each row from its logits.

    Args:
        chain: logits processors.
        streams: random numbers; None: greedy.
        options: of sampling: what shapes the distribution behind the chain; None: nothing.
    """

    chain: Sequence[Processor]
    streams: RandomStreams | None
    options: GenerateOptions | None = None

    def choose(
        self, logits_RV: Float[Tensor, "rows vocab"], ids_RT: Int[Tensor, "rows tokens"]
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return a token for each row, and its log-probability by the unprocessed logits.

        Args:
            logits_RV: fp32 or bf16.
            ids_RT: prompt and generated ids.
        """
        banned_X = only_banned(self.chain, ids_RT.shape[1], logits_RV.device)
        if self.streams is not None:
            return self._sample(logits_RV, ids_RT, banned_X, self.streams.next())
        if banned_X is not None and len(banned_X) <= _FEW_BANNED:
            # One of them is not banned, unless all tokens are; nothing as large as the logits is written.
            best_RC, tokens_RC, log_total_R = top_and_log_total(logits_RV, min(len(banned_X) + 1, logits_RV.shape[1]))
            best_R, place_R = best_RC.masked_fill(torch.isin(tokens_RC, banned_X), -torch.inf).max(1)
            return tokens_RC.gather(1, place_R[:, None])[:, 0], best_R - log_total_R
        best_R, tokens_R = apply(self.chain, logits_RV.float(), ids_RT).max(1)
        return tokens_R, _log_probabilities(logits_RV, tokens_R, best_R != -torch.inf)

    def _sample(
        self,
        logits_RV: Float[Tensor, "rows vocab"],
        ids_RT: Int[Tensor, "rows tokens"],
        banned_X: Int[Tensor, " banned"] | None,
        uniform_R: Float[Tensor, " rows"],
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
        options, changed_RV = self.options or GenerateOptions(), logits_RV
        if banned_X is None:
            changed_RV, banned_X = apply(self.chain, logits_RV.float(), ids_RT), ids_RT.new_empty(0)
        top_p, min_p = float(options.top_p), float(options.min_p)
        given = changed_RV, uniform_R, banned_X
        tokens_R = draw_tokens(*given, divisor=options.divisor, top_k=options.top_k, top_p=top_p, min_p=min_p)
        if tokens_R is None:
            changed_RV = apply([*self.chain, *build_logits_warpers(options)], logits_RV.float(), ids_RT)
            tokens_R = draw(changed_RV.softmax(1), uniform_R)
            tokens_R = tokens_R.masked_fill(changed_RV.gather(1, tokens_R[:, None])[:, 0] == -torch.inf, -1)
        can_R = tokens_R >= 0
        tokens_R = tokens_R.clamp(min=0)
        return tokens_R, _log_probabilities(logits_RV, tokens_R, can_R)

    def keep(self, rows_K: Int[Tensor, " kept"]) -> TokenChooser:
        """Return the chooser of these rows only."""
        if self.streams is not None:
            self.streams.keep(rows_K.tolist())
        return TokenChooser(select(self.chain, rows_K), self.streams, self.options)


def _log_probabilities(
    logits_RV: Float[Tensor, "rows vocab"], tokens_R: Int[Tensor, " rows"], can_R: Bool[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return the log-probability of a token of each row; -inf where none may follow."""
    log_total_R = top_and_log_total(logits_RV, 1)[2]
    chosen_R = logits_RV.gather(1, tokens_R[:, None])[:, 0].float() - log_total_R
    return chosen_R.where(can_R | log_total_R.isnan(), -torch.inf)


class Sampling:
    """Sampling, or greedy search if the chooser has no random streams.

    Args:
        module: in evaluation mode.
        prefill: one prompt for each sequence.
        chooser: chooses tokens.
    """

    def __init__(self, module: Transformer, prefill: Prefill, chooser: TokenChooser) -> None:
        self._module, self._chooser, self._cache = module, chooser, prefill.cache
        self._ids_RT, self._logits_RV = prefill.ids, prefill.logits
        self._newest_R: Int[Tensor, " rows"] | None = None

    def step(self) -> tuple[list[int], list[float]]:
        """Return the next token of each row and its log-probability: -inf where every token is banned."""
        if self._newest_R is not None:
            # A token is read only if another one follows.
            out = self._module.decode(self._newest_R[:, None], cache=self._cache)
            assert out.logits is not None
            self._logits_RV = out.logits[:, -1]
        tokens_R, log_probs_R = self._chooser.choose(self._logits_RV, self._ids_RT)
        self._newest_R = tokens_R
        self._ids_RT = torch.cat([self._ids_RT, tokens_R[:, None]], 1)
        return fetch(tokens_R, log_probs_R)

    def keep(self, rows_K: Int[Tensor, " kept"]) -> None:
        """Keep these rows only; called after a step."""
        assert self._newest_R is not None
        self._cache.select(rows_K, memory_rows=rows_K)
        self._newest_R, self._ids_RT = self._newest_R[rows_K], self._ids_RT[rows_K]
        self._chooser = self._chooser.keep(rows_K)
