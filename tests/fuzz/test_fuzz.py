"""A small part of the fuzz, always the same; `make fuzz` runs as much of it as there is time for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.cases import Findings, fuzz
from tests.fuzz.folders import KINDS
from tests.fuzz.mutations import mutated_bytes, mutated_json

CASES = 80


def test_changed_files_are_refused_or_still_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Findings()
    for number in fuzz(tmp_path, 16, found):
        if number + 1 == CASES:
            break
    assert not found.faults, found.report()
    assert found.outcomes["InputError"] > CASES / 3 and found.outcomes["usable"] > CASES / 12, found.report()


def test_a_finding_is_counted_and_shown_with_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("a key")

    for name, make in list(KINDS.items()):
        monkeypatch.setitem(KINDS, name, lambda folder: (folder / "a").mkdir(parents=True) or (folder / "b").touch())
        assert make
    monkeypatch.setattr("tests.fuzz.cases.use", fail)
    found = Findings()
    next(fuzz(tmp_path, 1, found))
    assert list(found.outcomes.values()) == [1] and "case 0: " in found.report() and "KeyError" in found.report()


@pytest.mark.parametrize("mutated", [mutated_json, mutated_bytes])
def test_a_change_follows_from_its_seed(mutated: object) -> None:
    content = b'{"a": [1, {"b": null}], "c": "text"}'
    assert callable(mutated)
    made = [[mutated(content, random.Random(number)) for number in range(50)] for _ in range(2)]
    assert made[0] == made[1] and len({changed for changed, _ in made[0]}) > 25
