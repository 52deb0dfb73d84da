"""Options of search and generation, all checked before anything runs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from clearhead.errors import InputError, argument, nearest

DEFAULT_TARGET_PER_SOURCE = 2
DEFAULT_TARGET_EXTRA = 10
GREATEST_LENGTH_PENALTY = 10.0
# Of sampling where nothing else is said.
TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass(frozen=True)
class SearchOptions:
    """The settings of greedy (`beam_size` 1) and beam search.

    Lengths count target tokens with the end token.

    Args:
        beam_size: unfinished hypotheses kept for each sentence, 1 to 1,000.
        length_penalty: exponent alpha, 0 to 10, in score = sum of log-probabilities / length ** alpha.
        n_best: hypotheses returned for each sentence, from 1 to `beam_size`.
        max_length: longest hypothesis, at least 1; None: twice the source tokens plus ten.
        min_length: shortest hypothesis, from 0 to `max_length`; the end token is banned before it.
        batch_size: most sentences decoded together, at least 1; None: only `batch_tokens` limits them.
        batch_tokens: most padded source tokens decoded together, times beams; at least 1.
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
    """How text is generated; filters are off by default.

    The method follows from the options: beam search if `beam_size` is above 1; contrastive search if `penalty_alpha` is
    above 0; sampling if `temperature` is above 0, or is None and `top_k`, `top_p`, `min_p`, `seed` or several sequences
    ask for it; else greedy search. An option without effect on the method is refused, unless its value turns it off.

    Args:
        max_new_tokens: most tokens generated, the end token included; at least 1.
        min_new_tokens: fewest tokens before the end token, from 0 to `max_new_tokens`.
        temperature: divides the logits, at least 0; 0 is greedy. None: 1 if another option asks for sampling, else 0.
        top_k: sample from the k most probable tokens; the number of candidates of contrastive search; 0: off.
        top_p: sample from the smallest set of tokens with this probability, above 0 and at most 1; 1: off.
        min_p: sample from tokens with at least this share of the largest probability, from 0 (off) to 1.
        repetition_penalty: divides the logits of tokens that have occurred, prompt included; above 0; 1: off.
        no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included; 0: off.
        encoder_no_repeat_ngram_size: no n-gram of this size of the source, or of the prompt of a decoder-only model, is
            repeated; 0: off.
        num_return_sequences: sequences for each prompt, at least 1; in beam search at most `beam_size`.
        beam_size: unfinished hypotheses kept for each prompt, 1 to 1,000.
        length_penalty: exponent alpha, 0 to 10, in score = sum of log-probabilities / length ** alpha.
        penalty_alpha: weight of the similarity penalty of contrastive search, from 0 (off) to 1.
        stop: one stop text or several; generation ends at the first of them, which the result excludes.
        seed: at least 0; the same seed and prompt give the same sequences. None: a new seed in every call.
        batch_size: most prompts of a batch, at least 1; None: a token budget decides.

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
        """The decoding method."""
        if self.beam_size > 1:
            return "beam"
        if self.penalty_alpha > 0:
            return "contrastive"
        if self.temperature is None:
            return "sample" if self._asks_for_sampling else "greedy"
        return "sample" if self.temperature > 0 else "greedy"

    @property
    def divisor(self) -> float:
        """What sampling divides the logits by."""
        return 1.0 if self.temperature is None else float(self.temperature)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end generation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def _asks_for_sampling(self) -> bool:
        """Whether an option is set that only sampling uses."""
        several = self.num_return_sequences > 1
        return several or self.seed is not None or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def with_default_sampling(options: Mapping[str, Any]) -> GenerateOptions:
    """Return options that sample, from a seed, where nothing says how a token is chosen.

    Args:
        options: of a call and of its checkpoint; without a temperature it is `TEMPERATURE`, and without a filter too
            top_p is `TOP_P`. Beam and contrastive search, and a temperature of 0, stay as they are.

    Raises:
        InputError: as for `GenerateOptions`.
    """
    chosen = dict(options)
    if "temperature" not in chosen and chosen.get("beam_size", 1) == 1 and not chosen.get("penalty_alpha"):
        chosen["temperature"] = TEMPERATURE
        if not any(name in chosen for name in ("top_k", "top_p", "min_p")):
            chosen["top_p"] = TOP_P
    found = GenerateOptions(**chosen)
    return replace(found, seed=secrets.randbelow(2**31)) if found.method == "sample" and found.seed is None else found


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
# Their highest values: a seed has 63 bits, and more beams than this only wait for each other.
_HIGHEST = {"seed": 2**63 - 1, "beam_size": 1000}
MOST = 2**31 - 1
"""The highest value of every other whole number."""
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
            faults.append(argument(name) + f" must be a whole number of at least {_LOWEST[name]}, not {value!r}.")
        elif name in _LOWEST and value > _HIGHEST.get(name, MOST):
            faults.append(argument(name) + f" must be at most {_HIGHEST.get(name, MOST):,}, not {value!r}.")
        elif name in _RANGES and not (is_number and _RANGES[name][1](value)):
            faults.append(argument(name) + f" must be a number {_RANGES[name][0]}, not {value!r}.")
        elif name == "stop":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
                faults.append(argument("stop") + f" must be a text or several, none of them empty, not {value!r}.")
    return faults


def _conflicts(options: GenerateOptions) -> list[str]:
    """Return one sentence for each option without effect on the method, or in conflict with another."""
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
            "contrastive search does not sample",
        ),
        "sample": ((), ""),
        "greedy": (
            ("top_k", "top_p", "min_p", "seed", "num_return_sequences"),
            argument("temperature") + " 0 is greedy",
        ),
    }[options.method]
    idle = [name for name in unused if given[name]]
    effect = ", which has no effect here: " + why + "."
    faults = [argument(name) + f" is {getattr(options, name)!r}" + effect for name in idle]
    if given["length_penalty"] and options.method != "beam":
        faults.append(
            argument("length_penalty") + f" is {options.length_penalty!r}, which has no effect here: only beams are "
            "ranked by it, so set " + argument("beam_size") + " above 1 or leave it out."
        )
    if options.method == "contrastive" and options.top_k < 2:
        needed = " needs " + argument("top_k") + " of at least 2: the number of candidates it chooses from."
        faults.append(argument("penalty_alpha") + needed)
    beams, most = argument("beam_size"), argument("max_new_tokens") + f" {options.max_new_tokens}"
    if options.method == "beam" and options.num_return_sequences > options.beam_size:
        faults.append(
            argument("num_return_sequences") + f" is {options.num_return_sequences} but " + beams + f" is "
            f"{options.beam_size}: raise " + beams + f" to at least {options.num_return_sequences}, or ask for fewer "
            "sequences."
        )
    if options.min_new_tokens > options.max_new_tokens:
        faults.append(
            argument("min_new_tokens") + f" is {options.min_new_tokens}, which is above " + most + ": lower it."
        )
    return faults


def _search_conflicts(options: SearchOptions) -> list[str]:
    """Return one sentence for each pair of values in conflict."""
    faults = []
    if options.n_best > options.beam_size:
        faults.append(
            argument("n_best") + f" is {options.n_best} but " + argument("beam_size") + f" is {options.beam_size}: "
            "raise " + argument("beam_size") + f" to at least {options.n_best}, or ask for fewer hypotheses."
        )
    if options.max_length is not None and options.min_length > options.max_length:
        faults.append(f"min_length is {options.min_length}, which is above max_length {options.max_length}: lower it.")
    return faults
