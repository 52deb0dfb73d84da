"""Labelled texts: every data format gives the same examples, and every mistake a message with its location."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.classify.data import DATA, labelled_texts, read_labelled
from clearhead.tasks.classify.label_set import learn_labels

EXAMPLES = [('a, "b"', "c", "yes"), ("d\u2028e", "", "no"), ("", "f g", "yes"), ("h", "i", "10"), ("j", "k", "9")]


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def lines(texts: list[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def comma_rows(rows: list[tuple[str, ...]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def every_form(folder: Path, ending: str) -> list[dict[str, Any]]:
    texts, others, labels = (list(column) for column in zip(*EXAMPLES, strict=True))
    records = [{"text": a, "b": {"c": b}, "label": c} for a, b, c in EXAMPLES]
    tabs = [f"{label}\t{a}\t{b}" for a, b, label in EXAMPLES]
    commas = [(b, label, a) for a, b, label in EXAMPLES]
    return [
        {"text": write(folder / f"a.tsv{ending}", lines(tabs)), "labels": 1, "pair": 3},
        {"text": write(folder / f"b.tsv{ending}", lines(["class\ttext\tother", *tabs])), "labels": "class", "pair": 3},
        {"text": write(folder / f"a.csv{ending}", comma_rows(commas)), "labels": 2, "text_column": 3, "pair": 1},
        {
            "text": write(folder / f"b.csv{ending}", comma_rows([("b", "label", "text"), *commas])),
            "labels": "label",
            "pair": "b",
        },
        {
            "text": write(folder / f"a.jsonl{ending}", lines([json.dumps(record) for record in records])),
            "labels": "label",
            "pair": "b.c",
        },
        {
            "text": write(folder / f"a.txt{ending}", lines(texts)),
            "labels": write(folder / f"a.labels{ending}", lines(labels)),
            "pair": write(folder / f"a.other{ending}", lines(others)),
        },
    ]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_form_gives_the_same_examples(tmp_path: Path, ending: str) -> None:
    for table in every_form(tmp_path, ending):
        data = read_labelled(DATA.source(table))
        assert list(zip(data["text"], data["pair"], data["labels"], strict=True)) == EXAMPLES, table
        single = read_labelled(DATA.source({key: table[key] for key in table if key != "pair"}))
        assert "pair" not in single
        assert list(single["labels"]) == [label for _, _, label in EXAMPLES]


def test_a_tokenizer_is_trained_on_both_texts_of_a_pair(tmp_path: Path) -> None:
    source = DATA.source(every_form(tmp_path, "")[0])
    assert sorted(labelled_texts(source)) == sorted(text for a, b, _ in EXAMPLES for text in (a, b))


def test_a_text_with_line_ends_keeps_the_places_right(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"a\nb\n",x\n\nc,y\nd,\n')
    data = read_labelled(DATA.source({"text": path, "labels": "label"}))
    assert list(data["text"]) == ["a\nb\n", "c", "d"]
    assert [data.location(row) for row in range(3)] == [f"{path}:{line}" for line in (2, 6, 7)]
    with pytest.raises(InputError, match=re.escape(f"{path}:7: the label is missing")):
        learn_labels(data, "single_label")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_and_the_rest_are_the_whole(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "a.tsv", lines([f"{number}\t{number % 2}" for number in range(97)]))
    source = DATA.source({"text": path, "labels": 2})
    front, back = read_labelled(source, (0.0, 1 - share)), read_labelled(source, (1 - share, 1.0))
    assert sorted(map(int, [*front["text"], *back["text"]])) == list(range(97))
    assert len(back) == pytest.approx(97 * share, abs=0.5)
    assert back.location(0) == f"{path}:{int(back['text'][0]) + 1}"


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
    class Rows(list[dict[str, Any]]):
        _fingerprint = "abc"

    data_set = Rows(rows)
    data_set.features = features  # type: ignore[attr-defined]
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, config, split: data_set  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_data_set_names_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = types.SimpleNamespace(names=["bad", "good"])
    rows = [{"sentence": "a", "label": 1, "all": [0, 1]}, {"sentence": "b", "label": 0, "all": []}]
    features = {"label": classes, "all": types.SimpleNamespace(feature=classes)}
    fake_datasets(monkeypatch, rows, features)
    table = {"dataset": "d", "split": "train", "field": "sentence"}
    data = read_labelled(DATA.source({**table, "labels": "label"}))
    assert (list(data["text"]), list(data["labels"])) == (["a", "b"], ["good", "bad"])
    assert list(read_labelled(DATA.source({**table, "labels": "all"}))["labels"]) == [["bad", "good"], []]
    fake_datasets(monkeypatch, [{"sentence": "a", "label": -1}], features)
    with pytest.raises(InputError, match=r"^d\[train\] row 0: class -1 has no name among the 2"):
        read_labelled(DATA.source({**table, "labels": "label"}))


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "sentence\tlabel\na\tx\n")
    for table, message in [
        (
            {"labels": "lable"},
            r"a.tsv:1: there is no column 'lable' \(did you mean 'label'\?\); .* choose one with 'labels'",
        ),
        (
            {"labels": "label"},
            r'a.tsv:1: there is no column .text.; its columns, .* 1 "sentence", 2 "label"; choose one with .text_col',
        ),
        ({"labels": "label", "text_column": "sentense"}, r"no column 'sentense' \(did you mean 'sentence'\?\)"),
        ({"labels": "label", "text_column": "label"}, "a.tsv:1: 'labels' and 'text_column' name the same column, 2"),
        ({"labels": 4}, "a.tsv:1: there is no column 4; .* 1 .sentence., 2 .label.; choose one with 'labels'.* from 1"),
    ]:
        with pytest.raises(InputError, match=message):
            read_labelled(DATA.source({"text": path, **table}))


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    texts = write(tmp_path / "a.txt", "a\nb\nc\n")
    short = write(tmp_path / "a.labels", "x\ny\n")
    with pytest.raises(
        InputError, match=r"a.txt has 3 lines, but .*a.labels has 2; expected one for each line of text"
    ):
        read_labelled(DATA.source({"text": texts, "labels": short}))
    with pytest.raises(
        InputError, match=r"^label: there is no such file: .* has no 'label'; .* is a table, its name must end"
    ):
        read_labelled(DATA.source({"text": texts, "labels": "label"}))


@pytest.mark.parametrize("text", ['a,"b\n', 'a,"b"c\n'])
def test_quotes_that_do_not_close(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", "x,y\n" + text)
    with pytest.raises(InputError, match=rf"^{re.escape(path)}:2: expected columns separated by commas"):
        read_labelled(DATA.source({"text": path, "labels": 2}))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"text": "a.tsv"}, "'labels' is missing"),
        ({"text": "a.tsv", "labels": 0}, "'labels' is 0; expected a column by its number, counted from 1"),
        ({"text": "a.jsonl", "labels": 1}, "'labels' is 1; expected the name of a field or a file"),
        ({"text": "a.tsv", "labels": "l", "pare": "p"}, r"'pare' does not belong .* \(did you mean 'pair'\?\)"),
        ({"text": "a.txt", "labels": "l", "text_column": "t"}, "'text_column' needs a table, but the text is 'a.txt'"),
        ({"txt": "a.tsv", "labels": "l"}, "'text' is missing|did you mean 'text'"),
        ({"dataset": "d", "labels": "l", "text_column": "t"}, "'text_column' does not belong"),
    ],
)
def test_tables_that_cannot_be_meant(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DATA.source(table)
