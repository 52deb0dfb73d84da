"""What search returns: candidates in ids, hypotheses in text, and the one formula of their score."""

from __future__ import annotations

from dataclasses import dataclass


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
        ids: target tokens without the start token; the last one is the end token.
        score: `log_probability` / len(ids) ** length_penalty.
        log_probability: sum of the natural-log probabilities of `ids`.
        cut_off: True when the end token was forced at the greatest length because no hypothesis had ended by itself.
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
