"""State of sequences and searches during generation, and their results: ids, text and scores.

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
        length: number of these tokens.
        length_penalty: exponent alpha; 0 returns the sum unchanged.

    Source: Wu et al. 2016, section 7, in the form without its constant 5.
    """
    return float(log_probability / length**length_penalty)


@dataclass(frozen=True, repr=False)
class Hypothesis(Printed):
    """One finished hypothesis of a translation, as text with its score.

    Args:
        text: the decoded translation.
        tokens: tokens of the translation as strings, with the end token.
        score: length-normalised log-probability.
        log_probability: sum of the natural-log probabilities of the tokens.
        ids: ids of the tokens.
        alignment: pairs of matching word indices in text and translation, counted from 0, such as "0-0 1-2". None means
            not requested.
    """

    text: str
    tokens: list[str]
    score: float
    log_probability: float
    ids: tuple[int, ...] = ()
    alignment: str | None = None


@dataclass(frozen=True, repr=False)
class Continuation(Printed):
    """A generated sequence or a translation, in ids.

    Args:
        ids: ids of the generated tokens, with the end token and the tokens of a stop text.
        score: `log_probability` / len(ids) ** length_penalty.
        log_probability: sum of the natural-log probabilities of `ids`, before temperature and filters. Beam search with
            processors sums the processed values, by which it ranks.
        stop_reason: "end" for an end token, "stop" for a complete stop text, "length" for the length limit. A
            translation then has a forced end token, because no hypothesis had ended.
        text: text before the stop text. None means that the ids were not decoded.
    """

    ids: tuple[int, ...]
    score: float
    log_probability: float
    stop_reason: StopReason
    text: str | None = None


@dataclass(frozen=True, repr=False)
class Generation(Printed):
    """A generated sequence as text.

    Args:
        text: generated text, without the prompt and the stop text.
        tokens: all generated tokens as strings, with the end token and the tokens of a stop text.
        score: length-normalised log-probability, before temperature and filters.
        stop_reason: "end" for an end token, "stop" for a complete stop text, "length" for the length limit.
        seed: seed of the sampling. None means that the sequence was not sampled.
    """

    text: str
    tokens: list[str]
    score: float
    stop_reason: StopReason
    seed: int | None = None


class Constraint(ABC):
    """Limits the tokens that may follow in one sequence; each sequence has its own object."""

    @abstractmethod
    def allowed_tokens(self) -> Bool[Tensor, " vocab"]:
        """Return a mask of the tokens that may follow, on the CPU; end tokens only if the sequence may end here."""

    @abstractmethod
    def take(self, token: int) -> None:
        """Advance by one allowed token (not an end token)."""

    @property
    @abstractmethod
    def failure(self) -> InputError | None:
        """Error of the constraint that explains why no token is allowed, or None."""


BeginConstraint = Callable[[], Constraint]
"""Function that creates a new constraint for a sequence."""


Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""Character that decoders return for bytes that are not a whole character, or not yet."""
_LONGEST_WINDOW = 24
_SHORT_WINDOW = 8


class StreamingDecoder:
    """Decodes ids one at a time, at constant cost per step.

    The strings returned by `add` and `finish` together are the text of the ids after the text of their context. They
    end before the stop text whose last character comes first.

    Args:
        decode: function from ids to text. The text of more ids starts with the text of fewer ids, except for an
            unfinished last character.
        stops: stop texts, none empty.
        context: ids before the first id. Their text is not returned, but a space after it is.
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
        """Return the text that is still held back, after the last id."""
        if self.is_stopped:
            return ""
        fresh = self._decode(self._window)[self._known :] if self._window else ""
        shown = self._release(fresh)
        held, self._held = self._held, ""
        return shown + held

    def _shorten_window(self, text: str) -> None:
        """Drop the older ids if the newer ids alone decode to the same characters."""
        newer = self._window[-_SHORT_WINDOW:]
        alone = self._decode(newer)
        if alone and UNFINISHED not in alone and text.endswith(alone):
            self._window, self._known = newer, len(alone)

    def _release(self, fresh: str) -> str:
        """Return the new text up to a possible start of a stop text; set `is_stopped` if a stop text is complete."""
        text = self._held + fresh
        stops = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if stops:
            self.is_stopped, self._held = True, ""
            return text[: min(stops)[1]]
        held = _longest_start(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is the beginning of a stop text."""
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
    """Return the text that ids add to the text of the ids before them."""
    window, known = _context_window(decode, list(context))
    return decode([*window, *ids])[known:]


@dataclass
class GeneratedSequence:
    """State of one generated sequence.

    Attributes:
        prompt: index of its prompt.
        number: index among the sequences of its prompt.
        limit: maximum number of tokens.
        end_ids: ids that end the sequence.
        decoder: decodes its tokens to text. None means that no text is needed.
        num_alternatives: number of most probable tokens to record with each token.
        constraint: limits the tokens that may follow. None means no limit. With a constraint, a stop text ends the
            sequence with the stop reason "length".
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
        """True if the sequence has ended or failed."""
        return self.stop_reason is not None or self.failure is not None

    def take(self, token: int, log_probability: float) -> str:
        """Add a token and return the text that becomes final.

        Args:
            token: id of the token.
            log_probability: log-probability of the token. NaN means that the model's output is not a number. -inf means
                that no token may follow. Both end this sequence with a failure, and no other sequence.
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
            # An incomplete character at the end is not part of a valid text.
            piece += rest if self.constraint is None else rest.rstrip(UNFINISHED)
        if self.decoder.is_stopped:
            self.stop_reason = "stop" if self.constraint is None else "length"
        self.pieces.append(piece)
        return piece

    def continuation(self) -> Continuation:
        """Return the finished sequence.

        Raises:
            RunFailure: the sequence ended with a failure.
            InputError: the constraint ended the sequence.
        """
        if self.failure is not None:
            raise self.failure
        assert self.stop_reason is not None
        score = length_normalised(self.log_probability, len(self.ids), 1.0)
        text = None if self.decoder is None else "".join(self.pieces)
        return Continuation(tuple(self.ids), score, self.log_probability, self.stop_reason, text)


@dataclass
class Sentence:
    """State of the search for one sentence or prompt.

    Attributes:
        prompt: index of the sentence or prompt.
        limit: maximum number of tokens of a hypothesis.
        candidates: best hypotheses, best first; empty until the search ends, and if no hypothesis exists.
        failure: error if the model's output is not a number.
    """

    prompt: int
    limit: int
    candidates: list[Continuation] = field(default_factory=list)
    is_done: bool = False
    failure: RunFailure | None = None

    def best_candidates(self) -> list[Continuation]:
        """Return the best hypotheses, best first.

        Raises:
            RunFailure: the search failed or has no hypotheses.
        """
        if self.failure is not None:
            raise self.failure
        if not self.candidates:
            raise RunFailure("no token may follow: the options ban every token of the vocabulary.")
        return self.candidates


def _failure(log_probability: float, number: int) -> RunFailure | None:
    """Return the error if the log-probability of generated token `number` is NaN or -inf, else None."""
    if math.isnan(log_probability):
        return RunFailure(f"the model's output at generated token {number} is not a number.")
    if log_probability == -math.inf:
        return RunFailure(
            f"no token may follow at generated token {number}: the options ban every token, the schema allows none, "
            "or the model's output is infinite."
        )
    return None
