"""What search and generation return, in ids and in text, and the one formula of their score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["end", "stop", "length"]


def length_normalised(log_probability: float, length: int, length_penalty: float) -> float:
    """Return log_probability / length ** length_penalty.

    Args:
        log_probability: sum of the natural-log probabilities of all tokens, the end token too.
        length: number of those tokens.
        length_penalty: exponent alpha; 0 leaves the sum as it is.

    Source: Wu et al. 2016, section 7, in the form without its constant 5.
    """
    return float(log_probability / length**length_penalty)


@dataclass(frozen=True)
class Candidate:
    """One finished hypothesis in ids.

    Args:
        ids: target tokens without the start token or the prompt; the last one is the end token, if it ended.
        score: `log_probability` / len(ids) ** length_penalty.
        log_probability: sum of the natural-log probabilities of `ids`.
        cut_off: True when it did not end by itself: a translation's end token was then forced at the greatest length,
            because no hypothesis had ended; a continued prompt has no end token.
    """

    ids: tuple[int, ...]
    score: float
    log_probability: float
    cut_off: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """One finished hypothesis in text.

    Args:
        text: the decoded translation.
        tokens: its tokens as strings, the end token too.
        score: length-normalised log-probability.
        log_probability: sum of the natural-log probabilities of the tokens.
    """

    text: str
    tokens: list[str]
    score: float
    log_probability: float


@dataclass(frozen=True)
class Continuation:
    """What was generated behind one prompt, in ids.

    Args:
        ids: generated tokens, the end token and the tokens of a stop text included.
        score: `log_probability` / len(ids) ** length_penalty.
        log_probability: sum of the natural-log probabilities of `ids` as the model gives them, before temperature and
            filters; in beam search with a repetition penalty the penalised values, which its ranking compares.
        stop_reason: "end": the end token came; "stop": a stop text was complete; "length": the limit was reached.
        text: the text up to the stop text, where one was looked for; else None.
    """

    ids: tuple[int, ...]
    score: float
    log_probability: float
    stop_reason: StopReason
    text: str | None = None


@dataclass(frozen=True)
class Generation:
    """What was generated behind one prompt, in text.

    Args:
        text: without the prompt and without the stop text that ended it.
        tokens: all generated tokens as strings, the end token and those of a stop text included.
        score: length-normalised log-probability, before temperature and filters.
        stop_reason: "end": the end token came; "stop": a stop text was complete; "length": the limit was reached.
    """

    text: str
    tokens: list[str]
    score: float
    stop_reason: StopReason
