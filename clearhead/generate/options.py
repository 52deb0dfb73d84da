"""Options of search and generation, all checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from clearhead.errors import InputError, nearest

DEFAULT_TARGET_PER_SOURCE = 2
DEFAULT_TARGET_EXTRA = 10
GREATEST_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class SearchOptions:
    """The settings of greedy (`beam_size` 1) and beam search.

    Every length is counted in target tokens and includes the end token.

    Args:
        beam_size: unfinished hypotheses kept for each sentence, at least 1.
        length_penalty: exponent alpha, 0 to 10, in score = sum of log-probabilities / length ** alpha.
        n_best: hypotheses returned for each sentence, from 1 to `beam_size`.
        max_length: longest hypothesis, at least 1; None: twice the sentence's own source tokens plus ten.
        min_length: shortest hypothesis, from 0 to `max_length`; the end token is banned before it.
        batch_size: most sentences decoded together, at least 1; None: only `batch_tokens` limits them.
        batch_tokens: most padded source tokens decoded together, each counted once for every beam; at least 1.
        early_stopping: a sentence is done once `beam_size` of its hypotheses have finished, even if a live one could
            still beat them.
        repetition_penalty, no_repeat_ngram_size, encoder_no_repeat_ngram_size: as in `GenerateOptions`.

    Raises:
        InputError: values outside these ranges; one report names all of them.
    """

    beam_size: int = 5
    length_penalty: float = 1.0
    n_best: int = 1
    max_length: int | None = None
    min_length: int = 0
    batch_size: int | None = None
    batch_tokens: int = 8192
    early_stopping: bool = False
    repetition_penalty: float | int = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        """Check the values, then how they fit together."""
        faults = _value_faults(self) or _search_conflicts(self)
        if faults:
            raise InputError.from_faults(faults, subject="the search options")

    def target_limit(self, source_length: int, max_positions: int | None) -> int:
        """Return the longest hypothesis allowed for one sentence, in tokens with the end token.

        Args:
            source_length: tokens of the sentence as the encoder reads it.
            max_positions: positions the decoder has; None: unlimited.
        """
        if self.max_length is not None:
            return self.max_length
        limit = max(DEFAULT_TARGET_PER_SOURCE * source_length + DEFAULT_TARGET_EXTRA, self.min_length)
        return limit if max_positions is None else min(limit, max_positions)


@dataclass(frozen=True)
class GenerateOptions:
    """How text is continued; every filter is off as long as it is not given.

    One of four methods follows from the options. Beam search where `beam_size` is above 1. Contrastive search where
    `penalty_alpha` is above 0. Sampling where `temperature` is above 0, or is not given and an option asks for chance:
    `top_k`, `top_p`, `min_p`, `seed`, or several sequences. Otherwise greedy search. An option that the method does
    not use is refused. A value that switches a filter off counts as not given.

    Args:
        max_new_tokens: most tokens generated, the end token included; at least 1.
        min_new_tokens: tokens that come before the end token at the earliest, from 0 to `max_new_tokens`.
        temperature: what logits are divided by, at least 0; 0 always takes the most probable token.
            None: 1 where another option asks for chance, else 0.
        top_k: draw from the k most probable tokens; the number of candidates in contrastive search; 0: off.
        top_p: draw from the smallest set of tokens with this probability, above 0 and at most 1; 1: off.
        min_p: draw from tokens with at least this share of the largest probability, from 0 (off) to 1.
        repetition_penalty: divides the logits of tokens that have occurred, prompt included; above 0; 1: off.
        no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included; 0: off.
        encoder_no_repeat_ngram_size: no n-gram of this size is one of what was read: of the source, or of the prompt of
            a decoder alone; 0: off.
        num_return_sequences: sequences for each prompt, at least 1; with beams the best ones, at most `beam_size`.
        beam_size: unfinished hypotheses kept for each prompt, at least 1.
        length_penalty: exponent alpha, 0 to 10, in score = sum of log-probabilities / length ** alpha.
        penalty_alpha: how much contrastive search minds a token that resembles what is there, from 0 (off) to 1.
        stop: one text or several; generation ends where the first of them is complete, and the text excludes it.
        seed: at least 0; with it the same prompt always gives the same sequences. None: a new one in every call.
        batch_size: most prompts that run together, at least 1; None: as many as a token budget allows.

    Raises:
        InputError: values out of range or in conflict; one report names all of them.
    """

    max_new_tokens: int = 100
    min_new_tokens: int = 0
    temperature: float | int | None = None
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    beam_size: int = 1
    length_penalty: float | int = 1.0
    penalty_alpha: float | int = 0.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check the values, then how they fit together."""
        faults = _value_faults(self) or _conflicts(self)
        if faults:
            raise InputError.from_faults(faults, subject="the generation options")

    @property
    def method(self) -> Literal["beam", "contrastive", "sample", "greedy"]:
        """How the next token is found."""
        if self.beam_size > 1:
            return "beam"
        if self.penalty_alpha > 0:
            return "contrastive"
        if self.temperature is None:
            return "sample" if self._asks_for_chance else "greedy"
        return "sample" if self.temperature > 0 else "greedy"

    @property
    def divisor(self) -> float:
        """What the logits are divided by when tokens are drawn."""
        return 1.0 if self.temperature is None else float(self.temperature)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end generation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def _asks_for_chance(self) -> bool:
        """Say whether an option is set that only sampling can use."""
        several = self.num_return_sequences > 1
        return several or self.seed is not None or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class StreamKwargs(TypedDict, total=False):
    """Options of one streamed sequence, as keyword arguments; see `GenerateOptions`. None: not given."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | int | None
    top_k: int | None
    top_p: float | int | None
    min_p: float | int | None
    repetition_penalty: float | int | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    penalty_alpha: float | int | None
    stop: str | Sequence[str]
    seed: int | None


class GenerateKwargs(StreamKwargs, total=False):
    """Options of generation, as keyword arguments; see `GenerateOptions`. None: not given."""

    num_return_sequences: int | None
    beam_size: int | None
    length_penalty: float | int | None
    batch_size: int | None


class TranslateKwargs(TypedDict, total=False):
    """Options of a translation, as keyword arguments; see `Model.translate`. None: not given."""

    beam_size: int | None
    length_penalty: float | int | None
    max_length: int | None
    batch_size: int | None
    from_language: str | None
    to_language: str | None


def given_options(kwargs: Mapping[str, Any], allowed: type) -> dict[str, Any]:
    """Return the keyword arguments of a call without those that are None.

    Args:
        kwargs: as the caller gave them.
        allowed: a TypedDict with all options.

    Raises:
        InputError: an option that it does not have.
    """
    names = allowed.__annotations__
    if unknown := [name for name in kwargs if name not in names]:
        raise InputError.from_faults(
            [
                f"there is no option '{name}'{nearest(name, names)}; expected one of {', '.join(names)}"
                for name in unknown
            ],
            subject="the options",
        )
    return {name: value for name, value in kwargs.items() if value is not None and value != ()}


# Lowest values of options that are whole numbers.
_LOWEST = {
    "max_new_tokens": 1, "min_new_tokens": 0, "top_k": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1, "beam_size": 1, "seed": 0, "batch_size": 1, "n_best": 1, "max_length": 1,
    "min_length": 0, "batch_tokens": 1,
}  # fmt: skip
# Ranges of options that are real numbers, in words and as a test.
_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("of at least 0", lambda x: x >= 0),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0", lambda x: x > 0),
    "length_penalty": (f"from 0 to {GREATEST_LENGTH_PENALTY:g}", lambda x: 0 <= x <= GREATEST_LENGTH_PENALTY),
    "penalty_alpha": ("from 0 to 1", lambda x: 0 <= x <= 1),
}


def _value_faults(options: SearchOptions | GenerateOptions) -> list[str]:
    """Return one sentence for each value of the wrong type or out of range."""
    faults = []
    for option in fields(options):
        name, value = option.name, getattr(options, option.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is None and option.default is None:
            continue
        if name in _LOWEST and not (is_number and isinstance(value, int) and value >= _LOWEST[name]):
            faults.append(f"{name} must be a whole number of at least {_LOWEST[name]}, not {value!r}.")
        elif name in _RANGES and not (is_number and _RANGES[name][1](value)):
            faults.append(f"{name} must be a number {_RANGES[name][0]}, not {value!r}.")
        elif name == "stop":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
                faults.append(f"stop must be a text or several, none of them empty, not {value!r}.")
    return faults


def _conflicts(options: GenerateOptions) -> list[str]:
    """Return one sentence for each option that the method has no use for, or that contradicts another."""
    given = {
        "temperature": bool(options.temperature),
        "top_k": options.top_k > 0,
        "top_p": options.top_p < 1,
        "min_p": options.min_p > 0,
        "seed": options.seed is not None,
        "penalty_alpha": options.penalty_alpha > 0,
        "stop": bool(options.stops),
        "num_return_sequences": options.num_return_sequences > 1,
        "length_penalty": options.length_penalty != 1,
    }
    unused, why = {
        "beam": (("temperature", "top_k", "top_p", "min_p", "seed", "penalty_alpha", "stop"), "beam search ignores it"),
        "contrastive": (
            ("temperature", "top_p", "min_p", "seed", "num_return_sequences"),
            "contrastive search takes the best of its candidates, without chance",
        ),
        "sample": ((), ""),
        "greedy": (
            ("top_k", "top_p", "min_p", "seed", "num_return_sequences"),
            "temperature 0 always takes the most probable token",
        ),
    }[options.method]
    faults = [
        f"{name} is {getattr(options, name)!r}, which has no effect here: {why}." for name in unused if given[name]
    ]
    if given["length_penalty"] and options.method != "beam":
        faults.append(
            f"length_penalty is {options.length_penalty!r}, which has no effect here: only beams are ranked by it, "
            "so set beam_size above 1 or leave it out."
        )
    if options.method == "contrastive" and options.top_k < 2:
        faults.append("penalty_alpha needs top_k of at least 2: the number of candidates it chooses from.")
    if options.method == "beam" and options.num_return_sequences > options.beam_size:
        faults.append(
            f"num_return_sequences is {options.num_return_sequences} but beam_size is {options.beam_size}: "
            f"raise beam_size to at least {options.num_return_sequences}, or ask for fewer sequences."
        )
    if options.min_new_tokens > options.max_new_tokens:
        faults.append(
            f"min_new_tokens is {options.min_new_tokens}, which is above max_new_tokens {options.max_new_tokens}: "
            "lower it."
        )
    return faults


def _search_conflicts(options: SearchOptions) -> list[str]:
    """Return one sentence for each pair of values that contradict each other."""
    faults = []
    if options.n_best > options.beam_size:
        faults.append(
            f"n_best is {options.n_best} but beam_size is {options.beam_size}: "
            f"raise beam_size to at least {options.n_best}, or ask for fewer hypotheses."
        )
    if options.max_length is not None and options.min_length > options.max_length:
        faults.append(f"min_length is {options.min_length}, which is above max_length {options.max_length}: lower it.")
    return faults
