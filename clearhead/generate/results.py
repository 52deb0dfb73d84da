"""Generated sequences and searches: their state while they grow, their results in ids and in text, and their score.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Bool
from torch import Tensor

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.printing import Printed

StopReason = Literal["end", "stop", "length"]


def length_normalised(log_probability: float, length: int, length_penalty: float) -> float:
    """Return log_probability / length ** length_penalty.

    Args:
        log_probability: sum of the natural-log probabilities of all tokens, with the end token.
        length: number of those tokens.
        length_penalty: exponent alpha; 0 returns the sum itself.

    Source: Wu et al. 2016, section 7, in the form without its constant 5.
    """
    return float(log_probability / length**length_penalty)


@dataclass(frozen=True, repr=False)
class Hypothesis(Printed):
    """One finished hypothesis in text.

    Args:
        text: the decoded translation.
        tokens: its tokens as strings, with the end token.
        score: length-normalised log-probability.
        log_probability: sum of the natural-log probabilities of the tokens.
        ids: of the tokens.
        alignment: the words of the text and of the translation that belong together, counted from 0, as in
            "0-0 1-2"; None: not asked for.
    """

    text: str
    tokens: list[str]
    score: float
    log_probability: float
    ids: tuple[int, ...] = ()
    alignment: str | None = None


@dataclass(frozen=True, repr=False)
class Continuation(Printed):
    """A generated sequence or a translation in ids.

    Args:
        ids: generated tokens, with the end token and the tokens of a stop text.
        score: `log_probability` / len(ids) ** length_penalty.
        log_probability: sum of the natural-log probabilities of `ids`, before temperature and filters; in beam search
            with processors, of the processed values that it ranks by.
        stop_reason: "end": the end token came; "stop": a stop text was complete; "length": the limit was reached. A
            translation then has a forced end token, because no hypothesis had ended.
        text: the text up to the stop text; None if it was not decoded.
    """

    ids: tuple[int, ...]
    score: float
    log_probability: float
    stop_reason: StopReason
    text: str | None = None


@dataclass(frozen=True, repr=False)
class Generation(Printed):
    """A generated sequence in text.

    Args:
        text: without the prompt and the stop text.
        tokens: all generated tokens as strings, with the end token and those of a stop text.
        score: length-normalised log-probability, before temperature and filters.
        stop_reason: "end": the end token came; "stop": a stop text was complete; "length": the limit was reached.
        seed: that it was sampled with; None: it was not sampled.
    """

    text: str
    tokens: list[str]
    score: float
    stop_reason: StopReason
    seed: int | None = None


class Constraint(ABC):
    """What may follow in one sequence; it belongs to that sequence alone."""

    @abstractmethod
    def allowed_tokens(self) -> Bool[Tensor, " vocab"]:
        """Return which tokens may be next, on the CPU; an end token only where the sequence is whole."""

    @abstractmethod
    def take(self, token: int) -> None:
        """Advance by one allowed token (not an end token)."""

    @property
    @abstractmethod
    def failure(self) -> InputError | None:
        """The reason why no token is allowed any more, if the constraint itself is it."""


BeginConstraint = Callable[[], Constraint]
"""Gives each sequence a constraint of its own."""


Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""What decoders return for bytes that are not, or not yet, a whole character."""
_LONGEST_WINDOW = 24
_SHORT_WINDOW = 8


class StreamingDecoder:
    """Decodes ids one at a time, at constant cost per step.

    The parts that `add` and `finish` return are together the text of the ids after that of their context, up to the
    first stop text: the one whose last character comes first.

    Args:
        decode: ids to text; the text of more ids starts with that of fewer, except for an unfinished last character.
        stops: stop texts, none empty.
        context: ids before the first one; their text is not returned, but a space after it is.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.is_stopped: bool = False
        self._decode = decode
        self._stops = tuple(stops)
        self._window, self._known = _context_window(decode, list(context))
        self._held = ""

    def add(self, token: int) -> str:
        """Add the next id and return the text that is now final."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(UNFINISHED):
            return ""  # the next bytes may change it
        fresh, self._known = text[self._known :], max(self._known, len(text))
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten_window(text)
        return self._release(fresh)

    def finish(self) -> str:
        """Return the text held back, after the last id."""
        if self.is_stopped:
            return ""
        fresh = self._decode(self._window)[self._known :] if self._window else ""
        shown = self._release(fresh)
        held, self._held = self._held, ""
        return shown + held

    def _shorten_window(self, text: str) -> None:
        """Drop the older ids if the newer ones alone decode to the same characters."""
        newer = self._window[-_SHORT_WINDOW:]
        alone = self._decode(newer)
        if alone and UNFINISHED not in alone and text.endswith(alone):
            self._window, self._known = newer, len(alone)

    def _release(self, fresh: str) -> str:
        """Return the new text up to a possible start of a stop text; note when one is complete."""
        text = self._held + fresh
        stops = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if stops:
            self.is_stopped, self._held = True, ""
            return text[: min(stops)[1]]
        held = _longest_start(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of a text are the start of a stop text."""
    longest = min(max((len(stop) for stop in stops), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(s.startswith(text[-size:]) for s in stops)), 0)


def _context_window(decode: Decode, context: list[int]) -> tuple[list[int], int]:
    """Return the last ids of the context that decode to whole characters, and the length of their text."""
    for window in (context[-_SHORT_WINDOW:], context):
        text = decode(window) if window else ""
        if text and UNFINISHED not in text:
            break
    return list(window), len(text)


def continuation_text(decode: Decode, ids: Sequence[int], context: Sequence[int]) -> str:
    """Return the text of ids after that of their context."""
    window, known = _context_window(decode, list(context))
    return decode([*window, *ids])[known:]


@dataclass
class GeneratedSequence:
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

    def best_candidates(self) -> list[Continuation]:
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
