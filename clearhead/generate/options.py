"""Options of search and generation: declared once, then merged with defaults and checked before a model runs.

`drop_unset_options` takes the keywords of a call. `resolve_options` merges them with the settings of a checkpoint
(`GenerationConfig.settings`) into `GenerateOptions` or `SearchOptions`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType, NoneType
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, get_args, get_type_hints

from clearhead.base.errors import InputError, argument, did_you_mean

DEFAULT_TARGET_PER_SOURCE = 2
DEFAULT_TARGET_EXTRA = 10
# Largest values that a checkpoint's files may ask for; an option of a call may be larger.
MOST_SEQUENCES, MOST_TOKENS = 2**10, 2**20

Method = Literal["greedy", "sample", "beam"]
METHODS: Mapping[Method, str] = MappingProxyType(
    {"greedy": "greedy search", "sample": "sampling", "beam": "beam search"}
)
REMOVED: Mapping[str, str] = MappingProxyType(
    {"penalty_alpha": "contrastive search is not supported; transformers also removed it"}
)
"""Options of other libraries that are refused, each with the reason."""


@dataclass(frozen=True)
class Option:
    """Declaration of an option: everything except its name, type and default.

    Args:
        help: description of the effect, without a full stop.
        least, most: smallest and largest allowed value of a number.
        above: True if a number must be greater than `least`.
        methods: decoding methods that use the option.
        hf: name of the option in generation_config.json. None means that the file has no such key.
        hf_most: largest value in that file; a caller may ask for more.
    """

    help: str
    least: int = 0
    most: float | int = 2**31 - 1
    above: bool = False
    methods: tuple[Method, ...] = tuple(METHODS)
    hf: str | None = None
    hf_most: int | None = None

    def fault(self, value: Any, kind: Any) -> str | None:
        """Return a phrase that says what the value must be, or None if the value is valid.

        Args:
            value: any value.
            kind: type of the option.
        """
        number = number_type(kind)
        kinds = get_args(kind) or (kind,)
        if bool in kinds or (value is None and NoneType in kinds):
            return None
        if number is None:
            texts = [value] if isinstance(value, str) else value
            if isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts):
                return None
            return "a text or several, none of them empty"
        if number is int:
            if not isinstance(value, int) or isinstance(value, bool) or value < self.least:
                return f"a whole number of at least {self.least}"
            return None if value <= self.most else f"at most {self.most:,}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_excluded = value == math.inf or (self.above and value == self.least)
        if is_number and self.least <= value <= self.most and not is_excluded:
            return None
        if self.most == math.inf:
            return f"a number {'above' if self.above else 'of at least'} {self.least}"
        return f"a number {f'above {self.least} and at most' if self.above else f'from {self.least} to'} {self.most}"


def declare(default: Any, option: Option) -> Any:
    """Return the dataclass field of an option."""
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class DecodingOptions:
    """Options that search and generation share.

    A field holds the type of an option, its default and its declaration. Command-line options, the reader of a
    checkpoint's settings and the checks of values are made from these fields.

    Raises:
        InputError: values are out of range or in conflict; one report names all of them.
    """

    usual: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Defaults of a call. The defaults of the fields are the values that turn an option off."""
    subject: ClassVar[str]
    bounds: ClassVar[tuple[str, str]]
    """Names of the options for the minimum and maximum length of a sequence."""

    beam_size: int = declare(1, Option("Number of beams; above 1: beam search", 1, 1000, hf="num_beams"))
    length_penalty: float | int = declare(
        1.0,
        Option(
            "Exponent A of the length in the score; below 0 favours short texts",
            -10,
            10,
            methods=("beam",),
            hf="length_penalty",
        ),
    )
    repetition_penalty: float | int = declare(
        1.0,
        Option(
            "Above 1: tokens that have occurred become less likely", 0, math.inf, above=True, hf="repetition_penalty"
        ),
    )
    no_repeat_ngram_size: int = declare(
        0, Option("Never repeat an N-gram of tokens; 0: off", hf="no_repeat_ngram_size", hf_most=MOST_TOKENS)
    )
    encoder_no_repeat_ngram_size: int = declare(
        0,
        Option("Never generate an N-gram of the input; 0: off", hf="encoder_no_repeat_ngram_size", hf_most=MOST_TOKENS),
    )
    batch_size: int | None = declare(
        None, Option("Maximum number of texts in a batch; by default a token budget decides", 1)
    )

    def __post_init__(self) -> None:
        """Check each value, then their combinations."""
        _refuse(self, value_faults(DECLARED[type(self)], vars(self)) or self._conflicts())

    @classmethod
    def with_defaults(cls, merged: Mapping[str, Any], call_options: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the options of a call with defaults that depend on other options, and drop ineffective settings.

        Args:
            merged: options of the call and settings of its checkpoint.
            call_options: options of the call.
        """
        return {**cls.usual, **merged}

    @property
    def tokens_before_end(self) -> int:
        """Minimum number of tokens before the end token."""
        raise NotImplementedError

    @property
    def is_search(self) -> bool:
        """True if the decoding method is beam search, which ranks its hypotheses."""
        raise NotImplementedError

    @property
    def num_sequences(self) -> int:
        """Number of results for each prompt or text."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch that each prompt or text takes."""
        return self.beam_size if self.is_search else self.num_sequences

    def _conflicts(self) -> list[str]:
        shortest, longest = self.bounds
        least, most = getattr(self, shortest), getattr(self, longest)
        is_short = most is None or least <= most
        if is_short:
            return []
        return [argument(shortest) + f" is {least}, which is above " + argument(longest) + f" {most}: lower it."]

    def _beyond_beams(self, name: str) -> list[str]:
        """Return a sentence in a list if an option asks for more sequences than there are beams, else an empty list."""
        count = getattr(self, name)
        if count <= self.beam_size:
            return []
        beams = argument("beam_size")
        return [
            argument(name) + f" is {count} but " + beams + f" is {self.beam_size}: raise " + beams + f" to at least "
            f"{count}, or ask for fewer."
        ]


@dataclass(frozen=True)
class SearchOptions(DecodingOptions):
    """Options of greedy search (`beam_size` 1) and beam search for translations.

    Lengths count the target tokens including the end token. The end token is banned before `min_length`.
    """

    usual: ClassVar[Mapping[str, float]] = MappingProxyType({"beam_size": 5})
    subject: ClassVar[str] = "the search options"
    bounds: ClassVar[tuple[str, str]] = ("min_length", "max_length")

    n_best: int = declare(1, Option("Number of translations of each line, at most the beam size", 1))
    max_length: int | None = declare(
        None, Option("Maximum tokens of a translation; by default twice the source plus ten", 1)
    )
    min_length: int = declare(0, Option("Minimum tokens of a translation"))
    batch_tokens: int | None = declare(
        None, Option("Maximum padded source tokens of a batch, times beams; by default 8192, or a GPU's memory", 1)
    )
    early_stopping: bool | None = declare(
        None,
        Option(
            "True: stop once as many have finished as beams; False: once no other looks better; None: once none can win"
        ),
    )

    @classmethod
    def with_defaults(cls, merged: Mapping[str, Any], call_options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with at least as many beams as requested hypotheses, unless the call sets `beam_size`."""
        options = super().with_defaults(merged, call_options)
        if "beam_size" not in call_options:
            options["beam_size"] = max(options["beam_size"], options.get("n_best", 1))
        return options

    @property
    def tokens_before_end(self) -> int:
        """Minimum number of tokens before the end token; `min_length` includes the end token."""
        return max(self.min_length - 1, 0)

    @property
    def is_search(self) -> bool:
        """Always True: with one beam, the search keeps one hypothesis."""
        return True

    @property
    def num_sequences(self) -> int:
        """Number of translations of each text."""
        return self.n_best

    def target_limit(self, source_length: int, max_positions: int | None) -> int:
        """Return the maximum length of a hypothesis for one sentence, in tokens with the end token.

        Args:
            source_length: number of tokens of the sentence that the encoder reads.
            max_positions: number of positions of the decoder. None means no limit.
        """
        if self.max_length is not None:
            return self.max_length
        limit = max(DEFAULT_TARGET_PER_SOURCE * source_length + DEFAULT_TARGET_EXTRA, self.min_length)
        return limit if max_positions is None else min(limit, max_positions)

    def _conflicts(self) -> list[str]:
        return [*self._beyond_beams("n_best"), *super()._conflicts()]


@dataclass(frozen=True)
class GenerateOptions(DecodingOptions):
    """Options of text generation; filters are off by default.

    The options decide the method. `beam_size` above 1 means beam search. `temperature` above 0 means sampling, and so
    does `temperature` None with `top_k`, `top_p`, `min_p`, `seed` or several sequences. Otherwise it is greedy search.
    An option without effect on the method is refused, unless its value turns it off. The same seed and prompt give the
    same sequences. The result does not contain the stop text. A prompt and the `max_new_tokens` of a call must fit into
    the model's positions. Without `max_new_tokens`, a text ends at the last position at the latest.
    """

    # Defaults of sampling, if neither the call nor its checkpoint chooses a method.
    usual: ClassVar[Mapping[str, float]] = MappingProxyType({"temperature": 0.8, "top_p": 0.95})
    subject: ClassVar[str] = "the generation options"
    bounds: ClassVar[tuple[str, str]] = ("min_new_tokens", "max_new_tokens")

    max_new_tokens: int = declare(
        100,
        Option("Maximum number of generated tokens, with the end token", 1, hf="max_new_tokens", hf_most=MOST_TOKENS),
    )
    min_new_tokens: int = declare(
        0, Option("Minimum number of tokens before the end token", hf="min_new_tokens", hf_most=MOST_TOKENS)
    )
    temperature: float | int | None = declare(
        None,
        Option("Divisor of the logits; 0: greedy search", 0, math.inf, methods=("greedy", "sample"), hf="temperature"),
    )
    top_k: int = declare(0, Option("Choose among the K most probable tokens; 0: off", methods=("sample",), hf="top_k"))
    top_p: float | int = declare(
        1.0,
        Option(
            "Sample from the smallest set of tokens with total probability P",
            0,
            1,
            above=True,
            methods=("sample",),
            hf="top_p",
        ),
    )
    min_p: float | int = declare(
        0.0,
        Option(
            "Sample from tokens with at least P times the largest probability", 0, 1, methods=("sample",), hf="min_p"
        ),
    )
    num_return_sequences: int = declare(
        1,
        Option(
            "Number of sequences per prompt",
            1,
            methods=("sample", "beam"),
            hf="num_return_sequences",
            hf_most=MOST_SEQUENCES,
        ),
    )
    stop: str | Sequence[str] = declare(
        (), Option("Stop before this text, or before the first of several", methods=("greedy", "sample"))
    )
    seed: int | None = declare(
        None, Option("Sample with this seed; the same seed gives the same text", 0, 2**63 - 1, methods=("sample",))
    )
    beyond_positions: bool = declare(
        False, Option("Continue beyond the max_position_embeddings of a checkpoint that computes its positions")
    )
    truncate: bool = declare(
        False, Option("Read only the start of a text that is longer than the encoder reads, with a warning")
    )
    must_fit: bool = False
    """Refuse a prompt that leaves fewer positions than the `max_new_tokens` that the caller chose."""

    @classmethod
    def with_defaults(cls, merged: Mapping[str, Any], call_options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options that sample with a seed, unless the call or the checkpoint chooses a method.

        If temperature and filters are unset, they get the defaults of `usual`. Beam search and a temperature of 0 stay
        unchanged. If a checkpoint asks for greedy search, an option of sampling in the call overrides it.
        """
        options = dict(merged)
        if (
            options.get("temperature") == 0
            and "temperature" not in call_options
            and not _ASK_FOR_SAMPLING.isdisjoint(call_options)
        ):
            del options["temperature"]
        if "temperature" not in options and _method({**options, "temperature": 0}) == "greedy":
            options["temperature"] = cls.usual["temperature"]
            if options.keys().isdisjoint(("top_k", "top_p", "min_p")):
                options["top_p"] = cls.usual["top_p"]
        method = _method(options)
        if method == "sample":
            options.setdefault("seed", secrets.randbelow(2**31))
        used = [name for name, (_, option) in DECLARED[cls].items() if name in call_options or method in option.methods]
        used_options = {name: value for name, value in options.items() if name in used}
        return {**used_options, "must_fit": "max_new_tokens" in call_options}

    @property
    def tokens_before_end(self) -> int:
        """Minimum number of tokens before the end token."""
        return self.min_new_tokens

    @property
    def method(self) -> Method:
        """The decoding method."""
        return _method(vars(self))

    @property
    def is_search(self) -> bool:
        """True if the method is beam search."""
        return self.method == "beam"

    @property
    def num_sequences(self) -> int:
        """Number of sequences for each prompt."""
        return self.num_return_sequences

    def search(self, early_stopping: bool | None) -> SearchOptions:
        """Return the options of the beam search that continues a prompt.

        Args:
            early_stopping: setting of the checkpoint, see `SearchOptions`.
        """
        return SearchOptions(
            beam_size=self.beam_size,
            length_penalty=float(self.length_penalty),
            n_best=self.num_return_sequences,
            early_stopping=early_stopping,
        )

    @property
    def divisor(self) -> float:
        """Divisor of the logits in sampling: the temperature, at least 1e-20 against overflow; 0 for greedy search."""
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        return max(temperature, 1e-20) if temperature else 0.0

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end generation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _conflicts(self) -> list[str]:
        """Return one sentence for each option that has no effect on the method or conflicts with another option."""
        method, faults = self.method, []
        for name, (_, option) in DECLARED[type(self)].items():
            if method not in option.methods and _is_on(name, getattr(self, name)):
                users = " and ".join(METHODS[other] for other in option.methods if other != "greedy")
                faults.append(
                    argument(name) + f" is {getattr(self, name)!r}, which has no effect here: {METHODS[method]} does "
                    f"not use it, but {users} would; leave it out."
                )
        if method == "beam":
            faults += self._beyond_beams("num_return_sequences")
        return faults + super()._conflicts()


OptionsT = TypeVar("OptionsT", bound=DecodingOptions)


def _declared_options(kind: type[DecodingOptions]) -> Mapping[str, tuple[Any, Option]]:
    types = get_type_hints(kind)
    declared = [option for option in fields(kind) if "option" in option.metadata]
    return MappingProxyType({option.name: (types[option.name], option.metadata["option"]) for option in declared})


DECLARED: Mapping[type[DecodingOptions], Mapping[str, tuple[Any, Option]]] = MappingProxyType(
    {kind: _declared_options(kind) for kind in (SearchOptions, GenerateOptions)}
)
"""Type and declaration of each option, by class and name."""


def number_type(kind: Any) -> type[int] | type[float] | None:
    """Return int or float for the type of a number option, ignoring None; None for other types."""
    kinds = get_args(kind) or (kind,)
    return next((number for number in (float, int) if number in kinds), None)


_DEFAULTS = MappingProxyType({option.name: option.default for option in fields(GenerateOptions)})
_ASK_FOR_SAMPLING = frozenset(
    name
    for name, (_, option) in DECLARED[GenerateOptions].items()
    if "sample" in option.methods and "greedy" not in option.methods
)


def resolve_options(kind: type[OptionsT], call_options: Mapping[str, Any], settings: Mapping[str, Any]) -> OptionsT:
    """Return the options of a call: its own values first, then the settings of its checkpoint, then the defaults.

    Args:
        kind: class of the options.
        call_options: options of the call, by name.
        settings: settings of the checkpoint, by name. Settings that are not options of this class are ignored. A
            setting without effect on the method, or a minimum length above the maximum, gives way to the call.

    Raises:
        InputError: an option of the call is out of range, has no effect, or conflicts with another option.
    """
    _refuse(kind, value_faults(DECLARED[kind], call_options))
    known = {name: value for name, value in settings.items() if name in DECLARED[kind]}
    options = kind.with_defaults({**known, **call_options}, call_options)
    shortest, longest = kind.bounds
    most = options.get(longest, getattr(kind, longest))
    if shortest not in call_options and most is not None:
        options[shortest] = min(options.get(shortest, 0), most)
    return kind(**options)


def _method(options: Mapping[str, Any]) -> Method:
    """Return the decoding method that the options lead to; missing options have their defaults."""
    options = {**_DEFAULTS, **options}
    if options["beam_size"] > 1:
        return "beam"
    if options["temperature"] is None:
        samples = any(_is_on(name, options[name]) for name in _ASK_FOR_SAMPLING)
    else:
        samples = options["temperature"] > 0
    return "sample" if samples else "greedy"


def _is_on(name: str, value: object) -> bool:
    """Return whether an option of generation differs from the values that turn it off."""
    off = {"temperature": (None, 0), "stop": ((), [])}.get(name, (_DEFAULTS[name],))
    return value not in off


def value_faults(declared: Mapping[str, tuple[Any, Option]], values: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each value that has the wrong type or is out of range.

    Args:
        declared: expected type and declaration (bounds, help) of each option, by name.
        values: values of some options, by name.
    """
    faults = []
    for name, (expected, option) in declared.items():
        fault = option.fault(values[name], expected) if name in values else None
        if fault is not None:
            faults.append(argument(name) + f" must be {fault}, got {values[name]!r}.")
    return faults


def _refuse(options: DecodingOptions | type[DecodingOptions], faults: Sequence[str]) -> None:
    if faults:
        raise InputError.from_faults(faults, subject=options.subject)


class StreamKwargs(TypedDict, total=False):
    """Options of one streamed sequence, as keyword arguments; see `GenerateOptions`. None means unset."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | int | None
    top_k: int | None
    top_p: float | int | None
    min_p: float | int | None
    repetition_penalty: float | int | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    stop: str | Sequence[str]
    seed: int | None
    beyond_positions: bool | None
    truncate: bool | None


class SearchKwargs(TypedDict, total=False):
    """Options of generation and translation, as keyword arguments; see `DecodingOptions`. None means unset."""

    beam_size: int | None
    length_penalty: float | int | None
    batch_size: int | None


class GenerateKwargs(StreamKwargs, SearchKwargs, total=False):
    """Options of generation, as keyword arguments; see `GenerateOptions`. None means unset."""

    num_return_sequences: int | None


class TranslateKwargs(SearchKwargs, total=False):
    """Options of a translation, as keyword arguments; see `Model.translate`. None means unset."""

    max_length: int | None
    from_language: str | None
    to_language: str | None


def drop_unset_options(kwargs: Mapping[str, Any], allowed: type) -> dict[str, Any]:
    """Return the keyword arguments of a call that are set: not None and not an empty tuple.

    Args:
        kwargs: keyword arguments of the caller.
        allowed: TypedDict with all allowed options.

    Raises:
        InputError: an option is not in `allowed`.
    """
    names = allowed.__annotations__
    if unknown := [name for name in kwargs if name not in names]:
        raise InputError.from_faults([_unknown_option(name, names) for name in unknown], subject="the options")
    return {name: value for name, value in kwargs.items() if value is not None and value != ()}


def _unknown_option(name: str, names: Iterable[str]) -> str:
    """Return the sentence that refuses an unknown option."""
    if name in REMOVED:
        return f"there is no option '{name}': {REMOVED[name]}; leave it out"
    return f"there is no option '{name}'{did_you_mean(name, names)}; expected one of {', '.join(names)}"
