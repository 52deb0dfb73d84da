"""Labels as JSON values of every type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.classify.data import DATA, read_labelled
from clearhead.tasks.classify.label_set import learn_labels
from tests.tasks.classify.test_data import lines, write


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        (
            {"text": "a", "lable": "x"},
            "single_label",
            r"there is no field 'label'; the fields are 'text', 'lable' \(did you mean",
        ),
        ({"text": 5, "label": "x"}, "single_label", "field 'text' is 5; expected a text"),
        ({"text": "a", "label": 1.5}, "single_label", r"the label is 1.5; expected the name of a class \(numbers need"),
        (
            {"text": "a", "label": ["x"]},
            "single_label",
            r"the label is \[\"x\"\]; expected the name of a class \(several",
        ),
        ({"text": "a", "label": None}, "single_label", "the label is missing"),
        ({"text": "a", "label": "\ud800"}, "single_label", "lone surrogate"),
        ({"text": "a", "label": [{}]}, "multi_label", r"the label is \{\}; expected the name of a class"),
        ({"text": "a", "label": True}, "regression", "the label is true; expected a finite number"),
    ],
)
def test_faulty_records(tmp_path: Path, record: dict[str, Any], kind: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", lines([json.dumps(row) for row in ({"text": "a", "label": "1"}, record)]))
    with pytest.raises(InputError, match=rf"^{re.escape(path)}:2: .*{message}"):
        learn_labels(read_labelled(DATA.source({"text": path, "labels": "label"})), kind)


def test_json_labels_of_other_types(tmp_path: Path) -> None:
    labels = [1, True, "x", 2]
    path = write(tmp_path / "a.jsonl", lines([json.dumps({"text": "a", "label": label}) for label in labels]))
    data = read_labelled(DATA.source({"text": path, "labels": "label"}))
    assert learn_labels(data, "single_label").names == ("1", "2", "true", "x")


def test_labels_that_only_look_like_numbers_are_names(tmp_path: Path) -> None:
    labels = ["--5", "10", "-7", "2", "-", "5-", "+3", "\u0665", "9" * 400]
    path = write(tmp_path / "a.jsonl", lines([json.dumps({"text": "a", "label": label}) for label in labels]))
    names = learn_labels(read_labelled(DATA.source({"text": path, "labels": "label"})), "single_label").names
    assert names == ("-7", "2", "10", "9" * 400, *sorted({"--5", "-", "5-", "+3", "\u0665"}))


def test_a_label_of_its_own_for_each_text_is_refused_with_the_names(tmp_path: Path) -> None:
    labels = [f"name{number:02}" for number in range(30)]
    path = write(tmp_path / "a.jsonl", lines([json.dumps({"text": "a", "label": label}) for label in labels]))
    with pytest.raises(InputError, match=r"label of its own \(name00, name01, .* and 18 more\); check"):
        learn_labels(read_labelled(DATA.source({"text": path, "labels": "label"})), "single_label")
