"""Record the beam search for one sentence: the candidates of every step, and whether each was kept or pruned.

Shapes: R live hypotheses, V vocabulary, K most probable tokens of each, B candidates that stay live.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from clearhead.generate.results import length_normalised

State = Literal["kept", "finished", "pruned"]
IdTuple = tuple[int, ...]

END = "ends with an end token"
FORCED_END = "cut off: the end token is forced"
CUT_OFF = "cut off at the length limit"
BANNED = "the options of the search ban this token here"
BELOW = "below the worst kept candidate"
LATE_END = "ends, but is not among the best of the step"


@dataclass(frozen=True)
class ConsideredToken:
    """A token that beam search considered as the extension of a live hypothesis.

    Args:
        ids: ids of the hypothesis including the token, without start token and prompt.
        log_probability: log-probability of the token as the search adds it; for a banned token, before the ban.
        total: sum of the log-probabilities of `ids`.
        score: total / len(ids) ** length_penalty.
        state: kept for the next step, finished, or pruned.
        reason: reason for pruning or finishing; empty if it was kept.
        rank: rank among the results, from 0. None means that it is not a result.
    """

    ids: IdTuple
    log_probability: float
    total: float
    score: float
    state: State
    reason: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class _Parent:
    """A live hypothesis before a step: its ids, its sum, and its most probable tokens.

    Attributes:
        tokens: log-probability of each probable token, and whether the token is banned, by id.
    """

    ids: IdTuple
    total: float
    tokens: dict[int, tuple[float, bool]]


class BeamRecorder:
    """Records the candidates of a search for one sentence, without changing the search.

    Args:
        length_penalty: exponent alpha of the search.
        num_pruned: maximum number of pruned candidates recorded for each hypothesis and step.
        hidden: ids that are not recorded if pruned, such as padding.
    """

    def __init__(self, length_penalty: float, *, num_pruned: int = 3, hidden: Collection[int] = ()) -> None:
        self.length_penalty = length_penalty
        self.num_pruned = num_pruned
        self.hidden: frozenset[int] = frozenset(hidden)
        self._parents: list[_Parent] = []
        self._finished: dict[IdTuple, tuple[float, str]] = {}
        self._considered: dict[IdTuple, ConsideredToken] = {}

    def look(
        self,
        prefixes: Sequence[Sequence[int]],
        totals: Sequence[float],
        before_RV: Float[Tensor, "rows vocab"],
        after_RV: Float[Tensor, "rows vocab"],
    ) -> None:
        """Record the most probable tokens of each live hypothesis at the start of a step.

        Args:
            prefixes: generated ids of each hypothesis.
            totals: sum of the log-probabilities of each hypothesis.
            before_RV: log-probabilities before the processors.
            after_RV: log-probabilities after the processors.
        """
        self._finished = {}
        count = min(before_RV.shape[1], len(prefixes) + self.num_pruned + len(self.hidden))
        top_RK = before_RV.topk(count, dim=1).indices
        rows = zip(
            top_RK.tolist(), before_RV.gather(1, top_RK).tolist(), after_RV.gather(1, top_RK).tolist(), strict=True
        )
        self._parents = [
            _Parent(
                tuple(prefix),
                total,
                {
                    token: (before, True) if after == -math.inf else (min(after, 0.0), False)
                    for token, before, after in zip(*row, strict=True)
                },
            )
            for prefix, total, row in zip(prefixes, totals, rows, strict=True)
        ]

    def finish(self, ids: IdTuple, total: float, reason: str) -> None:
        """Record a hypothesis that finished in this step."""
        self._finished[ids] = (total, reason)

    def choose(
        self,
        ids_B: Int[Tensor, " beams"],
        parents_B: Int[Tensor, " beams"],
        totals_B: Float[Tensor, " beams"],
        ends: Collection[int],
        stop_reason: str,
    ) -> None:
        """Record the fates of the candidates at the end of a step.

        Args:
            ids_B: last tokens of the best candidates that do not end.
            parents_B: indices of their parents.
            totals_B: sums of their log-probabilities; -inf marks a missing candidate.
            ends: ids that end a hypothesis.
            stop_reason: reason why the search ends with this step; empty if it continues.
        """
        live = {
            (*self._parents[parent].ids, token): total
            for token, parent, total in zip(ids_B.tolist(), parents_B.tolist(), totals_B.tolist(), strict=True)
            if total > -math.inf
        }
        for parent in self._parents:
            if parent.total == -math.inf:  # no hypothesis in this row
                continue
            pruned = 0
            children = {ids: total for ids, total in live.items() if ids[:-1] == parent.ids}
            for ids, (total, reason) in self._finished.items():
                if ids[:-1] == parent.ids:
                    self._add(parent, ids, total, "finished", reason)
            for ids, total in children.items():
                if ids not in self._finished:
                    self._add(parent, ids, total, "pruned" if stop_reason else "kept", stop_reason)
            for token, (log_probability, is_banned) in parent.tokens.items():
                ids = (*parent.ids, token)
                if ids in children or ids in self._finished or token in self.hidden or pruned == self.num_pruned:
                    continue
                pruned += 1
                reason = LATE_END if token in ends else BELOW
                if is_banned:
                    reason = BANNED
                self._add(parent, ids, parent.total + log_probability, "pruned", reason)

    def _add(self, parent: _Parent, ids: IdTuple, total: float, state: State, reason: str) -> None:
        score = length_normalised(total, len(ids), self.length_penalty)
        self._considered[ids] = ConsideredToken(ids, total - parent.total, total, score, state, reason)

    def list_candidates(self, results: Sequence[IdTuple]) -> tuple[ConsideredToken, ...]:
        """Return all recorded candidates, step by step.

        Args:
            results: ids of the results of the search, best first.
        """
        ranks = {ids: rank for rank, ids in enumerate(results)}
        return tuple(replace(entry, rank=ranks.get(ids)) for ids, entry in self._considered.items())
