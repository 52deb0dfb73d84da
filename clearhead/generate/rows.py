"""What a batch works on: sequences that are generated, and sentences that are searched for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from clearhead.base.errors import InputError, RunFailure
from clearhead.generate.constraints import Constraint
from clearhead.generate.results import Continuation, StopReason, length_normalised
from clearhead.generate.streaming_decoder import UNFINISHED, StreamingDecoder


@dataclass
class Row:
    """One sequence that is generated.

    Args:
        prompt: the number of its prompt.
        number: among the sequences of its prompt.
        limit: most tokens.
        end_ids: that end it.
        decoder: makes text of its tokens; None: nobody asks for text.
        num_alternatives: how many of the most probable tokens are noted with each one.
        constraint: what may follow; None: everything. A stop text then cuts, as the limit does.
    """

    prompt: int
    number: int
    limit: int
    end_ids: tuple[int, ...]
    decoder: StreamingDecoder | None
    ids: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    pieces: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None
    failure: RunFailure | InputError | None = None
    num_alternatives: int = 0
    constraint: Constraint | None = None
    log_probabilities: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether no token follows."""
        return self.stop_reason is not None or self.failure is not None

    def take(self, token: int, log_probability: float) -> str:
        """Add a token; return the text that it makes final.

        Args:
            token: its id.
            log_probability: NaN where the model's output is none, -inf where no token may follow: both end the sequence
                with a failure, and no other.
        """
        self.failure = _failure(log_probability, len(self.ids) + 1)
        if self.failure is not None and self.constraint is not None:
            self.failure = self.constraint.failure or self.failure
        if self.failure is not None:
            return ""
        self.ids.append(token)
        self.log_probability += log_probability
        self.log_probabilities.append(log_probability)
        if token in self.end_ids:
            self.stop_reason = "end"
        elif self.constraint is not None:
            self.constraint.take(token)
        if self.stop_reason is None and len(self.ids) == self.limit:
            self.stop_reason = "length"
        if self.decoder is None:
            return ""
        piece = "" if token in self.end_ids else self.decoder.add(token)
        if self.stop_reason is not None:
            rest = self.decoder.finish()
            # The first bytes of a character are no start of a valid text.
            piece += rest if self.constraint is None else rest.rstrip(UNFINISHED)
        if self.decoder.is_stopped:
            self.stop_reason = "stop" if self.constraint is None else "length"
        self.pieces.append(piece)
        return piece

    def continuation(self) -> Continuation:
        """Return the finished sequence.

        Raises:
            RunFailure: it ended with one.
            InputError: its constraint ended it.
        """
        if self.failure is not None:
            raise self.failure
        assert self.stop_reason is not None
        score = length_normalised(self.log_probability, len(self.ids), 1.0)
        text = None if self.decoder is None else "".join(self.pieces)
        return Continuation(tuple(self.ids), score, self.log_probability, self.stop_reason, text)


@dataclass
class Sentence:
    """A sentence, or a prompt, that is searched for.

    Args:
        prompt: its number among all.
        limit: most tokens of a hypothesis.
        candidates: the best ones, best first; empty until the search is done, and where nothing was found.
        failure: why it has none: the model's output is not a number.
    """

    prompt: int
    limit: int
    candidates: list[Continuation] = field(default_factory=list)
    is_done: bool = False
    failure: RunFailure | None = None

    def ranked(self) -> list[Continuation]:
        """Return the best candidates.

        Raises:
            RunFailure: the search ended with a failure, or without candidates.
        """
        if self.failure is not None:
            raise self.failure
        if not self.candidates:
            raise RunFailure("no token may follow: the options ban every token of the vocabulary.")
        return self.candidates


def _failure(log_probability: float, number: int) -> RunFailure | None:
    """Return what is wrong with the log-probability of a token, which has this number among the generated ones."""
    if math.isnan(log_probability):
        return RunFailure(f"the model's output at generated token {number} is not a number.")
    if log_probability == -math.inf:
        return RunFailure(
            f"no token may follow at generated token {number}: the options ban every token of the vocabulary, "
            "none of it continues a text under the schema, or the model's output is infinite."
        )
    return None
