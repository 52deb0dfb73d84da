"""Results of search and generation, in ids and in text, and the formula of their score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
