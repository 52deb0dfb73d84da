"""One report for all faults, and the nearest valid name where there is one."""

from __future__ import annotations

from clearhead.errors import InputError, RunFailure, nearest, visible


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
    assert nearest("widht", ["heads", "width", "layers"]) == " (did you mean 'width'?)"
    assert nearest("quark", ["heads", "width", "layers"]) == ""
    assert nearest("width", []) == ""
    assert nearest("de", ["en_XX", "de_DE", "fr_XX"]) == " (did you mean 'de_DE'?)"
    assert nearest("e", ["en_XX", "es_XX", "de_DE"]) == nearest("", ["de_DE"]) == ""


def test_mistakes_and_failures_are_told_apart() -> None:
    assert issubclass(InputError, ValueError) and not issubclass(InputError, RunFailure)
    assert issubclass(RunFailure, RuntimeError) and not issubclass(RunFailure, InputError)


def test_a_report_within_another_keeps_its_lines() -> None:
    report = InputError.from_faults(["a\nb is missing", "c is 7"], subject="the spec").within("spec.json")
    assert str(report) == "spec.json: 2 faults in the spec:\n  - a\\nb is missing\n  - c is 7"
    assert report.as_fault == "spec.json: 2 faults in the spec: a\\nb is missing; c is 7"
    assert InputError("a is missing").as_fault == "a is missing"


def test_a_name_from_a_file_cannot_forge_a_message() -> None:
    name = "w\x1b[2J\nerror: all is well\u202e\ud800\x9b"
    message = str(InputError(f"the tensor '{name}' is not known"))
    assert message == r"the tensor 'w\x1b[2J\nerror: all is well\u202e\ud800\x9b' is not known"
    assert str(InputError.from_faults([name, "b"])).count("\n") == 2
    assert visible("one\ntwo\t\x07", kept="\n\t") == "one\ntwo\t\\x07"
