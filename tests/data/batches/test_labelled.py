"""Labelled texts: every form gives the same examples, every mistake has one sentence with its place, and batches."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import presets
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.labelled import labelled_texts, read_labelled
from clearhead.data.stores.label_set import LabelSet, learn_labels
from clearhead.data.stores.labelled import LabelStore, prepare_labelled, truncate_pair
from clearhead.errors import InputError
from clearhead.tasks.classify.data import parse_labelled_source
from clearhead.tasks.classify.train import collate_labelled
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

EXAMPLES = [('a, "b"', "c", "yes"), ("d\u2028e", "", "no"), ("", "f g", "yes"), ("h", "i", "10"), ("j", "k", "9")]
FRAMING = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0, has_segments=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder


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
        data = read_labelled(parse_labelled_source(table))
        assert list(zip(data["text"], data["pair"], data["labels"], strict=True)) == EXAMPLES, table
        single = read_labelled(parse_labelled_source({key: table[key] for key in table if key != "pair"}))
        assert "pair" not in single
        assert list(single["labels"]) == [label for _, _, label in EXAMPLES]


def test_a_tokenizer_is_trained_on_both_texts_of_a_pair(tmp_path: Path) -> None:
    source = parse_labelled_source(every_form(tmp_path, "")[0])
    assert sorted(labelled_texts(source)) == sorted(text for a, b, _ in EXAMPLES for text in (a, b))


def test_a_text_with_line_ends_keeps_the_places_right(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"a\nb\n",x\n\nc,y\nd,\n')
    data = read_labelled(parse_labelled_source({"text": path, "labels": "label"}))
    assert list(data["text"]) == ["a\nb\n", "c", "d"]
    assert [data.place(row) for row in range(3)] == [f"{path}:{line}" for line in (2, 6, 7)]
    with pytest.raises(InputError, match=re.escape(f"{path}:7: the label is missing")):
        learn_labels(data, "single_label")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_and_the_rest_are_the_whole(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "a.tsv", lines([f"{number}\t{number % 2}" for number in range(97)]))
    source = parse_labelled_source({"text": path, "labels": 2})
    front, back = read_labelled(source, (0.0, 1 - share)), read_labelled(source, (1 - share, 1.0))
    assert [*front["text"], *back["text"]] == [str(number) for number in range(97)]
    assert len(back) == pytest.approx(97 * share, abs=0.5)
    assert back.place(0) == f"{path}:{len(front) + 1}"


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
    class Rows(list[dict[str, Any]]):
        _fingerprint = "abc"

    found = Rows(rows)
    found.features = features  # type: ignore[attr-defined]
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, config, split: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_data_set_names_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = types.SimpleNamespace(names=["bad", "good"])
    rows = [{"sentence": "a", "label": 1, "all": [0, 1]}, {"sentence": "b", "label": 0, "all": []}]
    features = {"label": classes, "all": types.SimpleNamespace(feature=classes)}
    fake_datasets(monkeypatch, rows, features)
    table = {"dataset": "d", "split": "train", "field": "sentence"}
    data = read_labelled(parse_labelled_source({**table, "labels": "label"}))
    assert (list(data["text"]), list(data["labels"])) == (["a", "b"], ["good", "bad"])
    assert list(read_labelled(parse_labelled_source({**table, "labels": "all"}))["labels"]) == [["bad", "good"], []]
    fake_datasets(monkeypatch, [{"sentence": "a", "label": -1}], features)
    with pytest.raises(InputError, match=r"^d\[train\] row 0: class -1 has no name among the 2"):
        read_labelled(parse_labelled_source({**table, "labels": "label"}))


def tokenizer_of(texts: list[str]) -> Tokenizer:
    return train_tokenizer("split", [text for text in texts if text], vocab_size=500)


def store_of(
    folder: Path,
    rows: list[tuple[str, ...]],
    *,
    kind: Any = "single_label",
    labels: LabelSet | None = None,
    max_length: int = 50,
    name: str = "t",
) -> LabelStore:
    """Rows are text, label, and perhaps a second text."""
    path = write(folder / f"{name}.tsv", lines(["\t".join(row) for row in rows]))
    table: dict[str, Any] = {"text": path, "labels": 2} | ({"pair": 3} if len(rows[0]) == 3 else {})
    tokenizer = tokenizer_of([row[index] for row in rows for index in (0, 2) if index < len(row)])
    return prepare_labelled(parse_labelled_source(table), tokenizer, max_length=max_length, kind=kind, labels=labels)


def labelled_batches(store: LabelStore, *, seed: int) -> EpochBatches[Batch]:
    plan = LengthSortedPlan(store.lengths, batch_tokens=60, seed=seed)
    return training_batches(store, plan, lambda rows: collate_labelled(store, rows, FRAMING))


def test_classes_are_in_order_of_number_then_name(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "10"), ("b", "9"), ("c", "x"), ("d", "-1"), ("e", " 9 ")])
    assert store.labels == LabelSet("single_label", ("-1", "9", "10", "x"))
    assert store.values.tolist() == [2, 1, 3, 0, 1]
    assert str(store.report) == "5 labelled texts read, 5 kept; 4 labels: -1 1, 9 2, 10 1, x 1"


def test_several_classes_or_none(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "x, y"), ("b", ""), ("c", "z,x,x,")], kind="multi_label")
    assert store.labels.names == ("x", "y", "z")
    assert store.values.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]
    batch = collate_labelled(store, np.array([2, 0, 1]), FRAMING)
    assert batch.labels.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert batch.num_labels == 9


def test_numbers_are_learned_in_units_of_the_training_data(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "1"), ("b", " 3.5 "), ("c", "-1e1")], kind="regression")
    values = np.array([1, 3.5, -10])
    assert store.values * store.labels.scale + store.labels.mean == pytest.approx(values)
    assert (store.values.mean(), store.values.std()) == (pytest.approx(0), pytest.approx(1))
    held_out = store_of(tmp_path, [("a", "7"), ("b", "7")], kind="regression", labels=store.labels, name="valid")
    assert held_out.labels == store.labels
    assert held_out.values.tolist() == [(7 - store.labels.mean) / store.labels.scale] * 2


def test_empty_texts_are_dropped_and_counted_with_their_place(tmp_path: Path) -> None:
    rows = [("a", "x"), ("", "x"), ("b c", "y"), (" ", "y")]
    store = store_of(tmp_path, rows)
    assert (len(store), store.rows.tolist(), store.values.tolist()) == (2, [0, 2], [0, 1])
    assert f"2 empty and dropped (the first at {tmp_path}/t.tsv:2)" in str(store.report)


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{start + number}" for number in range(count))


def test_long_texts_keep_their_front(tmp_path: Path) -> None:
    rows = [(words(length), str(length % 2)) for length in (1, 5, 6, 400)]
    store = store_of(tmp_path, rows, max_length=7)
    tokenizer = tokenizer_of([row[0] for row in rows])
    assert [store.ids(row)[0].tolist() for row in range(4)] == [tokenizer.encode(text)[:5] for text, _ in rows]
    assert store.report.cut == 2
    assert "2 cut to their first 7 tokens" in str(store.report)
    assert store.lengths.tolist() == [3, 7, 7, 7]


def cut_one_by_one(first: int, second: int, room: int) -> tuple[int, int]:
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_of_a_pair_the_longer_text_is_cut_first() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.integers(1, 30, 500), draw.integers(1, 30, 500)
    for room in (2, 7, 20):
        kept = truncate_pair(first, second, room)
        assert list(zip(*map(np.ndarray.tolist, kept), strict=True)) == [
            cut_one_by_one(int(a), int(b), room) for a, b in zip(first, second, strict=True)
        ]


@pytest.mark.parametrize("paired", [False, True])
def test_batches_hold_framed_texts(tmp_path: Path, paired: bool) -> None:
    draw = random.Random(5)
    rows = [
        (words(draw.randint(1, 13)), draw.choice("xyz")) + ((words(draw.randint(1, 11), 7),) if paired else ())
        for _ in range(61)
    ]
    store = store_of(tmp_path, rows, max_length=19)
    seen = []
    for batch in validation_batches(store, lambda rows: collate_labelled(store, rows, FRAMING), batch_tokens=150):
        assert batch.ids.numel() <= 150
        for row, ids, label in zip(batch.rows, batch.ids.tolist(), batch.labels.tolist(), strict=True):
            parts = [part.tolist() for part in store.ids(row)]
            expected = [2, *parts[0], 3, *([*parts[1], 3] if paired else [])]
            assert ids == expected + [0] * (len(ids) - len(expected))
            assert len(expected) == store.lengths[row]
            assert store.labels.names[label] == rows[row][1]
        real = store.lengths[batch.rows]
        mask = np.arange(batch.ids.shape[1]) < real[:, None]
        assert mask.all() if batch.mask is None else (batch.mask.numpy() == mask).all()
        assert batch.num_tokens == real.sum()
        assert batch.num_labels == len(batch.rows)
        if paired:
            assert batch.segments is not None
            ends = np.cumsum(batch.ids.numpy() == 3, axis=1) - (batch.ids.numpy() == 3)
            assert (batch.segments.numpy() == (ends == 1) * mask).all()
        else:
            assert batch.segments is None
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(61))


def test_training_batches_can_be_resumed(tmp_path: Path) -> None:
    store = store_of(tmp_path, [(words(1 + number % 7), str(number % 3)) for number in range(53)])
    batches = labelled_batches(store, seed=3)
    for _ in range(batches.batches_per_epoch + 2):
        next(batches)
    again = labelled_batches(store, seed=3)
    again.load_state(batches.state())
    for _ in range(2 * batches.batches_per_epoch):
        assert next(batches).rows.tolist() == next(again).rows.tolist()
    with pytest.raises(InputError, match="seed was 3, now 4"):
        labelled_batches(store, seed=4).load_state(batches.state())


def test_a_second_run_opens_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a b", "x"), ("c", "y")]
    first = store_of(tmp_path, rows)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *arguments: pytest.fail("tokenised again"))
    again = store_of(tmp_path, rows, name="moved")
    assert (again.folder, again.identity) == (first.folder, first.identity)
    (first.folder / "labels.bin").unlink()
    monkeypatch.undo()
    with pytest.raises(InputError, match="prepare the data again"):
        LabelStore(first.folder, tokenizer_of(["a b", "c"]))


@pytest.mark.parametrize(
    ("make", "segments", "start"),
    [(presets.bert_base, True, False), (presets.gpt2, False, False), (presets.transformer_base, False, True)],
)
def test_the_collator_follows_the_model(make: Any, segments: bool, start: bool) -> None:
    collator = InputCollator.of(make(vocab_size=97), tokenizer_of(["a"]))
    assert (collator.has_segments, collator.start is not None) == (segments, start)
    rectangle = collator.collate([[5], [6, 7]], [[8, 9], [10]])
    assert (rectangle.segments is not None, rectangle.target_ids is not None) == (segments, start)
    assert rectangle.num_tokens == 12 + 2 * start
    assert rectangle.mask is None


ONE = [("a", "x"), ("b", "y")]


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (
            [("a", "x"), ("b", "x")],
            "single_label",
            r"t.tsv:1: all 2 texts from here on have the label \"x\"; a classifier needs",
        ),
        ([("a", "x"), ("b", " ")], "single_label", "t.tsv:2: the label is missing; expected the name of a class"),
        (
            [(str(n), f"l{n}") for n in range(20)],
            "single_label",
            "t.tsv:1: each of the 20 texts from here on has a label of its",
        ),
        ([("a", ""), ("b", "")], "multi_label", "t.tsv:1: none of the 2 texts from here on has a label"),
        ([("a", "1"), ("b", "two")], "regression", r"t.tsv:2: the label is \"two\"; expected a finite number"),
        ([("a", "1"), ("b", "inf")], "regression", r"t.tsv:2: the label is \"inf\"; expected a finite number"),
        ([("a", "3"), ("b", "3.0")], "regression", "t.tsv:1: all 2 labels from here on are the number 3"),
        ([("", "x"), (" ", "y")], "single_label", "t.tsv:1: all 2 texts from here on are empty"),
        ([("a", "x"), ("b",)], "single_label", "t.tsv:2: expected 2 columns, separated by tabs"),
    ],
)
def test_labels_that_cannot_be_learned(tmp_path: Path, rows: list[Any], kind: str, message: str) -> None:
    path = write(tmp_path / "t.tsv", lines(["\t".join(row) for row in rows]))
    with pytest.raises(InputError, match=message) as caught:
        prepare_labelled(
            parse_labelled_source({"text": path, "labels": 2}), tokenizer_of(["a"]), max_length=9, kind=kind
        )
    assert "\n" not in str(caught.value)


def test_a_label_that_training_did_not_see(tmp_path: Path) -> None:
    known = store_of(tmp_path, [("a", "positive"), ("b", "negative")]).labels
    message = (
        r"v.tsv:2: the label \"positve\" is not among the 2 of the training data \(negative, positive\) \(did you mean"
    )
    with pytest.raises(InputError, match=message):
        store_of(tmp_path, [("a", "positive"), ("b", "positve")], labels=known, name="v")
    held_out = store_of(tmp_path, [("a", "positive"), ("b", "positive")], labels=known, name="w")
    assert held_out.values.tolist() == [1, 1]


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
    path = write(tmp_path / "a.jsonl", lines([json.dumps(part) for part in ({"text": "a", "label": "1"}, record)]))
    with pytest.raises(InputError, match=rf"^{re.escape(path)}:2: .*{message}"):
        learn_labels(read_labelled(parse_labelled_source({"text": path, "labels": "label"})), kind)


def test_json_labels_of_other_types(tmp_path: Path) -> None:
    labels = [1, True, "x", 2]
    path = write(tmp_path / "a.jsonl", lines([json.dumps({"text": "a", "label": label}) for label in labels]))
    data = read_labelled(parse_labelled_source({"text": path, "labels": "label"}))
    assert learn_labels(data, "single_label").names == ("1", "2", "true", "x")


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
            read_labelled(parse_labelled_source({"text": path, **table}))


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    texts = write(tmp_path / "a.txt", "a\nb\nc\n")
    short = write(tmp_path / "a.labels", "x\ny\n")
    with pytest.raises(
        InputError, match=r"a.txt has 3 lines, but .*a.labels has 2; expected one for each line of text"
    ):
        read_labelled(parse_labelled_source({"text": texts, "labels": short}))
    with pytest.raises(InputError, match=r"^label: there is no such file: .* has no 'label'; .* or a column where"):
        read_labelled(parse_labelled_source({"text": texts, "labels": "label"}))


@pytest.mark.parametrize("text", ['a,"b\n', 'a,"b"c\n'])
def test_quotes_that_do_not_close(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", "x,y\n" + text)
    with pytest.raises(InputError, match=rf"^{re.escape(path)}:2: expected columns separated by commas"):
        read_labelled(parse_labelled_source({"text": path, "labels": 2}))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"text": "a.tsv"}, "'labels' is missing"),
        ({"text": "a.tsv", "labels": 0}, "'labels' is 0; expected a column by its number, counted from 1"),
        ({"text": "a.jsonl", "labels": 1}, "'labels' is 1; expected a text that is not empty"),
        ({"text": "a.tsv", "labels": "l", "pare": "p"}, r"'pare' does not belong .* \(did you mean 'pair'\?\)"),
        ({"text": "a.txt", "labels": "l", "text_column": "t"}, "'text_column' is for a table, but the text is 'a.txt'"),
        ({"txt": "a.tsv", "labels": "l"}, "'text' is missing|did you mean 'text'"),
        ({"dataset": "d", "labels": "l", "text_column": "t"}, "'text_column' does not belong"),
    ],
)
def test_tables_that_cannot_be_meant(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_labelled_source(table)


def test_max_length_leaves_room_for_a_token(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length is 2; expected at least 3"):
        store_of(tmp_path, ONE, max_length=2)
    with pytest.raises(InputError, match="max_length is 4; expected at least 5"):
        store_of(tmp_path, [("a", "x", "b"), ("c", "y", "d")], max_length=4)
