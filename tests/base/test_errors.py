"""Reports of several faults, and the nearest valid name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from clearhead.base.errors import (
    InputError,
    Message,
    MessageReference,
    RunFailure,
    argument,
    at_text,
    did_you_mean,
    escape_unsafe,
    key,
    nth_text,
    renaming,
    within,
)


def test_one_fault_is_one_sentence() -> None:
    assert str(InputError.from_faults(["a is missing"], subject="the file")) == "a is missing"


def test_several_faults_are_all_listed() -> None:
    report = str(InputError.from_faults(["a is missing", "b is 7"], subject="the file"))
    assert report == "2 faults in the file:\n  - a is missing\n  - b is 7"


def test_of_very_many_faults_the_first_are_listed() -> None:
    report = str(InputError.from_faults([f"fault {number}" for number in range(100_000)], subject="the file"))
    assert report.startswith("100000 faults in the file:\n  - fault 0\n") and report.count("\n") == 21
    assert report.endswith("fault 19\n  - and 99980 more")


def test_a_long_name_in_a_message_is_shortened() -> None:
    message = str(InputError(f"'{'n' * 2**20}' has no slot in '{'m' * 200}'"))
    assert message == f"'{'n' * 77}...' has no slot in '{'m' * 200}'"
    assert len(str(InputError("a name of many words " * 10_000))) == 2000


def test_the_nearest_name_is_offered_only_where_one_is_near() -> None:
    assert did_you_mean("widht", ["heads", "width", "layers"]) == " (did you mean 'width'?)"
    assert did_you_mean("quark", ["heads", "width", "layers"]) == ""
    assert did_you_mean("width", []) == ""
    assert did_you_mean("de", ["en_XX", "de_DE", "fr_XX"]) == " (did you mean 'de_DE'?)"
    assert did_you_mean("lr", ["learning_rate", "label_smoothing", "loss"]) == " (did you mean 'learning_rate'?)"
    assert did_you_mean("lr", ["learning_rate", "least_ratio"]) == ""
    assert did_you_mean("e", ["en_XX", "es_XX", "de_DE"]) == did_you_mean("", ["de_DE"]) == ""


def renamed_text(error: InputError, rename: Callable[[MessageReference], str | MessageReference]) -> str:
    with pytest.raises(InputError) as caught, renaming(rename):
        raise error
    assert caught.value is error
    return str(error)


def as_option(reference: MessageReference) -> str | MessageReference:
    return reference.as_option(f"--{reference.name.replace('_', '-')}")


def test_an_error_knows_what_it_is_about_and_its_reader_names_it() -> None:
    error = InputError("runs/batch_size: " + argument("batch_size") + " must be at least 1, got 'batch_size'")
    assert str(error) == "runs/batch_size: batch_size must be at least 1, got 'batch_size'"
    assert error.about == (MessageReference("argument", "batch_size"),)
    assert renamed_text(error, as_option) == "runs/batch_size: --batch-size must be at least 1, got 'batch_size'"


def test_what_to_set_is_named_with_its_value() -> None:
    message = "set " + Message(", ").join([argument("force", True), argument("top_k", 1), key("pattern", "*.txt")])
    error = InputError(message + "; not " + key("field"))
    assert str(error) == "set force=True, top_k=1, pattern = \"*.txt\"; not 'field'"
    assert renamed_text(error, as_option) == 'set --force, --top-k 1, --pattern "*.txt"; not --field'


def test_a_text_is_counted_by_whoever_has_more_of_them() -> None:
    error = InputError.from_faults([nth_text(2) + " is 'text 2'", at_text(3) + ": no"])
    later = renamed_text(error, lambda reference: replace(reference, number=reference.number + 10))
    assert later == "2 faults in the input:\n  - text 12 is 'text 2'\n  - text 13: no"
    assert [reference.number for reference in error.about] == [12, 13]


def test_an_error_of_another_process_is_the_same() -> None:
    error = InputError.from_faults([argument("top_k") + " is 0", "b"])
    same = pickle.loads(pickle.dumps(error))
    assert str(same) == str(error) and same.about == error.about


def test_mistakes_and_failures_are_told_apart() -> None:
    assert issubclass(InputError, ValueError) and not issubclass(InputError, RunFailure)
    assert issubclass(RunFailure, RuntimeError) and not issubclass(RunFailure, InputError)


def test_a_report_within_another_keeps_its_lines() -> None:
    report = InputError.from_faults(["a\nb is missing", "c is 7"], subject="the spec")
    with pytest.raises(InputError), within("spec.json"):
        raise report
    assert str(report) == "spec.json: 2 faults in the spec:\n  - a\\nb is missing\n  - c is 7"
    assert report.as_fault == "spec.json: 2 faults in the spec: a\\nb is missing; c is 7"
    assert InputError("a is missing").as_fault == "a is missing"


def test_a_name_from_a_file_cannot_forge_a_message() -> None:
    name = "w\x1b[2J\nerror: all is well\u202e\ud800\x9b"
    message = str(InputError(f"the tensor '{name}' is not known"))
    assert message == r"the tensor 'w\x1b[2J\nerror: all is well\u202e\ud800\x9b' is not known"
    assert str(InputError.from_faults([name, "b"])).count("\n") == 2
    assert escape_unsafe("one\ntwo\t\x07", allowed="\n\t") == "one\ntwo\t\\x07"
