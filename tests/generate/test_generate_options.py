"""Generation options: the method that follows from them, and one report of all faults and conflicts."""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from clearhead.base.errors import InputError
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import (
    DECLARED,
    DecodingOptions,
    GenerateKwargs,
    GenerateOptions,
    SearchOptions,
    StreamKwargs,
    TranslateKwargs,
    number_type,
)
from clearhead.interpret.maps.map_inputs import ReadKwargs
from clearhead.tasks.evaluate.options import EvaluateKwargs


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (GenerateOptions(), "greedy"),
        (GenerateOptions(temperature=0), "greedy"),
        (GenerateOptions(temperature=0.8), "sample"),
        (GenerateOptions(top_k=5), "sample"),
        (GenerateOptions(top_p=0.9), "sample"),
        (GenerateOptions(min_p=0.1), "sample"),
        (GenerateOptions(seed=0), "sample"),
        (GenerateOptions(num_return_sequences=3), "sample"),
        (GenerateOptions(beam_size=4, num_return_sequences=3), "beam"),
        (GenerateOptions(top_k=0, top_p=1, min_p=0, repetition_penalty=1, stop=[]), "greedy"),
    ],
)
def test_the_method_follows_from_the_options(options: GenerateOptions, method: str) -> None:
    assert options.method == method
    assert options.divisor == (0.8 if options.temperature == 0.8 else 0.0 if options.temperature == 0 else 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("no_repeat_ngram_size", -1),
        ("num_return_sequences", 0),
        ("beam_size", 0),
        ("length_penalty", -10.1),
        ("seed", -1),
        ("batch_size", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be ") as caught:
        GenerateOptions(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("top_k", 2.0), ("seed", True), ("temperature", "1"), ("stop", 7)])
def test_value_of_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    """The value is set after construction, which the type checker of the tests would refuse."""
    options = GenerateOptions()
    object.__setattr__(options, name, value)
    with pytest.raises(InputError, match=f"^{name} must be .* got {value!r}"):
        options.__post_init__()


CONFLICTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": 0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, ["top_k", "top_p", "min_p"]),
    ({"temperature": 0, "seed": 1, "num_return_sequences": 2}, ["seed", "num_return_sequences"]),
    (
        {"beam_size": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": "a"},
        ["temperature", "top_k", "top_p", "min_p", "seed", "stop"],
    ),
    ({"length_penalty": 0.6}, ["length_penalty"]),
    ({"beam_size": 2, "num_return_sequences": 3}, ["num_return_sequences is 3 but beam_size is 2"]),
    ({"min_new_tokens": 5, "max_new_tokens": 3}, ["min_new_tokens is 5"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "named"), CONFLICTS)
def test_options_in_conflict_are_all_named(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        GenerateOptions(**options)
    message = str(caught.value)
    assert all(name in message for name in named)
    assert len(named) == 1 or f"{len(named)} faults in" in message, message


def test_all_values_out_of_range_are_in_one_report() -> None:
    with pytest.raises(InputError, match="3 faults in the generation options"):
        GenerateOptions(top_k=-1, top_p=2.0, stop="")


def test_stops_are_one_text_or_several() -> None:
    assert GenerateOptions(stop="ab").stops == ("ab",)
    assert GenerateOptions(stop=["a", "b"]).stops == ("a", "b")
    assert GenerateOptions().stops == ()


def without_none(hint: Any) -> set[Any]:
    return set(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) - {NoneType}


LANGUAGES = {"from_language", "to_language"}


@pytest.mark.parametrize(
    ("keywords", "kind", "others"),
    [
        (GenerateKwargs, GenerateOptions, set()),
        (StreamKwargs, GenerateOptions, set()),
        (TranslateKwargs, SearchOptions, LANGUAGES),
        (EvaluateKwargs, SearchOptions, LANGUAGES | {"window", "stride", "tokenize", "lowercase", "similarities"}),
        (ReadKwargs, GenerateOptions, LANGUAGES | {"chat"}),
    ],
)
def test_typed_keywords_are_those_declared(keywords: type, kind: type[DecodingOptions], others: set[str]) -> None:
    hints = get_type_hints(keywords)
    assert hints.keys() - DECLARED[kind].keys() == others
    for name in hints.keys() - others:
        assert without_none(hints[name]) == without_none(DECLARED[kind][name][0]), name
        assert NoneType in get_args(hints[name]) or name == "stop"


def test_every_option_of_generation_has_a_keyword() -> None:
    assert get_type_hints(GenerateKwargs).keys() == DECLARED[GenerateOptions].keys()
    assert StreamKwargs.__annotations__.keys() < GenerateKwargs.__annotations__.keys()


IN_FILE = [name for name, (_, option) in DECLARED[GenerateOptions].items() if option.hf is not None]


@pytest.mark.parametrize("name", IN_FILE)
def test_a_file_and_a_call_have_the_same_ranges(name: str) -> None:
    kind, option = DECLARED[GenerateOptions][name]
    step = 1 if number_type(kind) is int else 0.5
    most = option.most if option.hf_most is None else option.hf_most
    below = option.least if option.above else option.least - step
    beyond = [value for value in (below, most + step) if value < math.inf]
    for value in beyond:
        with pytest.raises(InputError, match=f"g.json: {option.hf}: expected"):
            GenerationConfig.from_settings({option.hf: value}, source="g.json")
    for value in beyond[: None if option.hf_most is None else 1]:
        assert option.fault(value, kind) is not None
    for value in (below + step, min(most, below + 7)):
        assert option.fault(value, kind) is None
        actual = GenerationConfig.from_settings({option.hf: value, "do_sample": True}, source="g.json")
        assert actual.options[name] == value
