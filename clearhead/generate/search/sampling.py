"""Greedy search and sampling: choose one token after the other.

Every sequence has its own stream of random numbers, so its text does not depend on the other rows of its batch.

Shapes: R rows (sequences still in the batch), T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from numpy.random import PCG64, Generator, SeedSequence
from torch import Tensor
from torch.nn import functional

from clearhead.base.progress import update
from clearhead.fast.logits import draw_tokens, top_and_log_total
from clearhead.generate.options import GenerateOptions
from clearhead.generate.processors import NO_ID, Processor, apply, build_logits_warpers, only_banned, select
from clearhead.generate.results import GeneratedSequence
from clearhead.generate.running import Generated, Member, SequenceProgress, SurvivingRows

# Number of random numbers drawn at a time; it does not change the stream.
_DRAWN_AHEAD = 64


def fetch(tokens_R: Int[Tensor, " rows"], log_probs_R: Float[Tensor, " rows"]) -> tuple[list[int], list[float]]:
    """Copy tokens and log-probabilities to Python lists with a single synchronisation."""
    both = torch.stack([tokens_R.double(), log_probs_R.double()]).tolist()
    return [int(token) for token in both[0]], both[1]


def draw(probs_RV: Float[Tensor, "rows vocab"], uniform_R: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw one id from each row of probabilities by inverting the cumulative distribution.

    Args:
        probs_RV: probabilities, not negative; ids of probability 0 are never drawn.
        uniform_R: uniform random numbers, fp64, from 0 to below 1.
    """
    # The rounding errors of an fp32 cumulative sum exceed the probabilities of rare tokens.
    running_RV = probs_RV.double().cumsum(1)
    total_R1 = running_RV[:, -1:]
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    place_R1 = torch.searchsorted(running_RV, torch.minimum(uniform_R[:, None] * total_R1, below_R1), right=True)
    return place_R1[:, 0].clamp_(max=probs_RV.shape[1] - 1)


def draw_open(logits_RV: Float[Tensor, "rows vocab"], uniform_R: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw one id from the softmax of each row, as `draw` does; -1 if all logits of a row are -inf."""
    tokens_R = draw(logits_RV.softmax(1), uniform_R)
    return tokens_R.masked_fill(logits_RV.gather(1, tokens_R[:, None])[:, 0] == -torch.inf, -1)


class RandomStream:
    """A stream of uniform random numbers.

    Args:
        seed: seed of the stream.
    """

    def __init__(self, seed: SeedSequence) -> None:
        self._seed, self._ahead = seed, list[float]()
        self.position: int = 0
        """Number of random numbers that `next` and `skip` have passed."""

    def next(self) -> float:
        """Return the next number, from 0 to below 1."""
        if not self._ahead:
            self._ahead = self.generator().random(_DRAWN_AHEAD)[::-1].tolist()
        self.position += 1
        return self._ahead.pop()

    def skip(self, count: int) -> None:
        """Pass over the next `count` numbers, such as those that a `generator` has drawn."""
        self.position += count
        self._ahead = []

    def generator(self) -> Generator:
        """Return a generator of the numbers from the present position on; the position stays unchanged."""
        return Generator(PCG64(self._seed).advance(self.position))


def sequence_seed(seed: int | None, number: int, ids: Sequence[int]) -> SeedSequence:
    """Return the seed of one sequence, made of the caller's seed, the prompt and the number of the sequence.

    Args:
        seed: the caller's seed. None means a new seed in every call.
        number: index of the sequence among those of its prompt.
        ids: ids of the prompt, followed by the source if there is one.
    """
    return SeedSequence() if seed is None else SeedSequence([seed, number, len(ids), *ids])


@dataclass(frozen=True)
class TokenChooser:
    """Chooses the next token of each row from its logits.

    Args:
        chain: logits processors.
        options: options of sampling, applied after the chain. None means greedy search.
    """

    chain: Sequence[Processor]
    options: GenerateOptions | None = None

    def choose(
        self,
        logits_RV: Float[Tensor, "rows vocab"],
        ids_RT: Int[Tensor, "rows tokens"],
        uniform_R: Float[Tensor, " rows"] | None = None,
        allowed_RV: Bool[Tensor, "rows vocab"] | None = None,
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return the chosen token of each row, and its log-probability from the unprocessed logits.

        Args:
            logits_RV: fp32 or bf16 logits.
            ids_RT: prompt and generated ids.
            uniform_R: random number for each row, fp64, from 0 to below 1. None means greedy search.
            allowed_RV: mask of tokens that may follow. If the logits processors ban all of them in a row, the row
                ignores the processors. None means that all tokens may follow.
        """
        if allowed_RV is not None:
            chooser, masked_RV = (
                TokenChooser((), self.options),
                self._mask_disallowed(logits_RV.float(), ids_RT, allowed_RV),
            )
            tokens_R = chooser.choose(masked_RV, ids_RT, uniform_R)[0]
            return tokens_R, _log_probabilities(logits_RV, tokens_R, masked_RV.amax(1) != -torch.inf)
        banned_X = only_banned(self.chain, ids_RT.shape[1], logits_RV.device)
        if uniform_R is not None:
            return self._sample(logits_RV, ids_RT, banned_X, uniform_R)
        if banned_X is not None:
            best_R1, tokens_R1, log_total_R = top_and_log_total(logits_RV, 1, banned_X)
            return tokens_R1[:, 0], best_R1[:, 0] - log_total_R
        best_R, tokens_R = apply(self.chain, logits_RV.float(), ids_RT).max(1)
        return tokens_R, _log_probabilities(logits_RV, tokens_R, best_R != -torch.inf)

    def _mask_disallowed(
        self,
        logits_RV: Float[Tensor, "rows vocab"],
        ids_RT: Int[Tensor, "rows tokens"],
        allowed_RV: Bool[Tensor, "rows vocab"],
    ) -> Float[Tensor, "rows vocab"]:
        changed_RV = apply(self.chain, logits_RV, ids_RT)
        leaves_R1 = (allowed_RV & (changed_RV != -torch.inf)).any(1, keepdim=True)
        return torch.where(leaves_R1, changed_RV, logits_RV).masked_fill(~allowed_RV, -torch.inf)

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
        arguments = changed_RV, uniform_R, banned_X
        tokens_R = draw_tokens(*arguments, divisor=options.divisor, top_k=options.top_k, top_p=top_p, min_p=min_p)
        if tokens_R is None:
            changed_RV = apply([*self.chain, *build_logits_warpers(options)], logits_RV.float(), ids_RT)
            tokens_R = draw_open(changed_RV, uniform_R)
        can_R = tokens_R >= 0
        tokens_R = tokens_R.clamp(min=0)
        return tokens_R, _log_probabilities(logits_RV, tokens_R, can_R)

    def keep(self, rows_K: Int[Tensor, " kept"]) -> TokenChooser:
        """Return the chooser of a batch that keeps only the rows `rows_K`."""
        return TokenChooser(select(self.chain, rows_K), self.options)


def _log_probabilities(
    logits_RV: Float[Tensor, "rows vocab"], tokens_R: Int[Tensor, " rows"], can_R: Bool[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return the log-probability of the token of each row; -inf if no token may follow."""
    log_total_R = top_and_log_total(logits_RV, 1)[2]
    chosen_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - log_total_R
    return chosen_R.where(can_R | log_total_R.isnan(), -torch.inf)


class Sampling(Member):
    """Rows of a running batch that are sampled or decoded greedily in the same way; see `Member`.

    Args:
        rows: sequences, one for each row.
        ids_RT: prompts of the rows; `NO_ID` marks padding.
        chooser: chooses the tokens.
        streams: random numbers for each row; an empty list means greedy search.
        kind: value that is equal for members that choose tokens in the same way. None means: never merge.
    """

    def __init__(
        self,
        rows: list[GeneratedSequence],
        ids_RT: Int[Tensor, "rows tokens"],
        chooser: TokenChooser,
        streams: list[RandomStream],
        kind: object = None,
    ) -> None:
        self._rows = rows
        self.kind: object = kind
        self.ids_RT: Int[Tensor, "rows total"] = ids_RT
        self.chooser: TokenChooser = chooser
        self.streams: list[RandomStream] = streams

    @property
    def sequences(self) -> Sequence[GeneratedSequence]:
        """The sequences of the rows."""
        return self._rows

    @property
    def tokens(self) -> Int[Tensor, "rows 1"]:
        """The newest token of each row."""
        return self.ids_RT[:, -1:]

    @property
    def num_sentences(self) -> int:
        """Number of encoder-memory sentences: each row has its own."""
        return len(self._rows)

    def advance(self, logits_RV: Float[Tensor, "rows vocab"]) -> tuple[list[SequenceProgress], SurvivingRows]:
        """Choose a token for each row; a row whose logits are not numbers fails alone."""
        uniform_R = None
        if self.streams:
            uniform_R = torch.tensor([stream.next() for stream in self.streams], dtype=torch.float64)
            uniform_R = uniform_R.to(logits_RV.device)
        tokens_R, log_probs_R = self.chooser.choose(
            logits_RV, self.ids_RT, uniform_R, self._allowed_tokens(logits_RV.device)
        )
        self.ids_RT = torch.cat([self.ids_RT, tokens_R[:, None]], 1)
        self._note_alternatives(logits_RV)
        update(len(self._rows[0].ids) + 1, max(row.limit for row in self._rows), "tokens")
        progress = []
        for row, token, log_probability in zip(self._rows, *fetch(tokens_R, log_probs_R), strict=True):
            text = row.take(token, log_probability)
            progress.append(SequenceProgress(row, text, row.is_done))
        return progress, self._keep([index for index, row in enumerate(self._rows) if not row.is_done])

    def _allowed_tokens(self, device: torch.device) -> Bool[Tensor, "rows vocab"] | None:
        """Return the mask of tokens that may follow in each row; either all rows have a constraint or none has."""
        allowed = [row.constraint.allowed_tokens() for row in self._rows if row.constraint is not None]
        return torch.stack(allowed).to(device) if allowed else None

    def _note_alternatives(self, logits_RV: Float[Tensor, "rows vocab"]) -> None:
        asking = [index for index, row in enumerate(self._rows) if row.num_alternatives]
        if not asking:
            return
        most = max(self._rows[index].num_alternatives for index in asking)
        best_RK, ids_RK, log_total_R = top_and_log_total(logits_RV[asking], min(most, logits_RV.shape[1]))
        best = zip(ids_RK.tolist(), (best_RK - log_total_R[:, None]).tolist(), strict=True)
        for index, (ids, log_probabilities) in zip(asking, best, strict=True):
            row = self._rows[index]
            row.alternatives.append(list(zip(ids, log_probabilities, strict=True))[: row.num_alternatives])

    def drop(self, sequence: Generated) -> SurvivingRows:
        """Remove an unfinished sequence and its row from the batch."""
        return self._keep([index for index, row in enumerate(self._rows) if row is not sequence])

    def absorb(self, other: Member) -> bool:
        """Append the rows of another member, if both choose their tokens alike; return whether that was done."""
        if self.kind is None or not isinstance(other, Sampling) or other.kind != self.kind:
            return False
        length = max(self.ids_RT.shape[1], other.ids_RT.shape[1])
        both = [functional.pad(ids, (length - ids.shape[1], 0), value=NO_ID) for ids in (self.ids_RT, other.ids_RT)]
        self.ids_RT = torch.cat(both)
        self._rows, self.streams = self._rows + other._rows, self.streams + other.streams
        return True

    def copy_row(self, sequence: Generated) -> tuple[int, Sampling] | None:
        """Return the index of a row and a member with this row alone; None if no row has the sequence."""
        index = next((index for index, row in enumerate(self._rows) if row is sequence), None)
        if index is None:
            return None
        ids_1T, row = self.ids_RT[index : index + 1], self._rows[index]
        if self.kind is not None:
            # Padding comes from members that joined. If rows cannot join, padding belongs to the prompt.
            ids_1T = ids_1T[:, int((ids_1T[0] != NO_ID).int().argmax()) :]
        chooser = self.chooser.keep(torch.tensor([index], device=ids_1T.device))
        return index, Sampling([row], ids_1T, chooser, self.streams[index : index + 1], self.kind)

    def _keep(self, remaining: list[int]) -> SurvivingRows:
        if len(remaining) == len(self._rows):
            return SurvivingRows()
        rows_K = torch.tensor(remaining, dtype=torch.int64, device=self.ids_RT.device)
        self._rows = [self._rows[index] for index in remaining]
        self.streams = [self.streams[index] for index in remaining] if self.streams else []
        self.ids_RT, self.chooser = self.ids_RT[rows_K], self.chooser.keep(rows_K)
        return SurvivingRows(rows_K, rows_K)
