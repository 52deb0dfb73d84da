"""Labelled texts with their tokens: labels as targets, truncated pairs, and batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import presets
from clearhead.base.errors import InputError
from clearhead.data.arrays import fitting_lengths
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches, validation_batches
from clearhead.data.stores.store import Store
from clearhead.tasks.classify.data import DATA
from clearhead.tasks.classify.label_set import LabelSet
from clearhead.tasks.classify.store import LABELLED, labels_of, prepare_labelled
from clearhead.tasks.classify.train import collate_labelled
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.tasks.classify.test_data import lines, write

FRAMING = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0, has_segments=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder


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
) -> Store:
    """Rows are text, label, and perhaps a second text."""
    path = write(folder / f"{name}.tsv", lines(["\t".join(row) for row in rows]))
    table: dict[str, Any] = {"text": path, "labels": 2} | ({"pair": 3} if len(rows[0]) == 3 else {})
    tokenizer = tokenizer_of([row[index] for row in rows for index in (0, 2) if index < len(row)])
    return prepare_labelled(DATA.source(table), tokenizer, max_length=max_length, kind=kind, labels=labels)


def labelled_batches(store: Store, *, seed: int) -> EpochBatches[Batch]:
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=60, seed=seed)
    return training_batches(store, plan, lambda rows: collate_labelled(store, rows, FRAMING))


def test_classes_are_in_order_of_number_then_name(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "10"), ("b", "9"), ("c", "x"), ("d", "-1"), ("e", " 9 ")])
    assert labels_of(store) == LabelSet("single_label", ("-1", "9", "10", "x"))
    assert store.arrays["labels"].tolist() == [2, 1, 3, 0, 1]
    assert store.report == "5 labelled texts read, 5 kept; 4 labels: -1 1, 9 2, 10 1, x 1"


def test_several_classes_or_none(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "x, y"), ("b", ""), ("c", "z,x,x,")], kind="multi_label")
    assert labels_of(store).names == ("x", "y", "z")
    assert store.arrays["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]
    batch = collate_labelled(store, np.array([2, 0, 1]), FRAMING)
    assert batch.labels.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert batch.num_labels == 9


def test_numbers_are_learned_in_units_of_the_training_data(tmp_path: Path) -> None:
    store = store_of(tmp_path, [("a", "1"), ("b", " 3.5 "), ("c", "-1e1")], kind="regression")
    values = np.array([1, 3.5, -10])
    assert store.arrays["labels"] * labels_of(store).scale + labels_of(store).mean == pytest.approx(values)
    assert (store.arrays["labels"].mean(), store.arrays["labels"].std()) == (pytest.approx(0), pytest.approx(1))
    held_out = store_of(tmp_path, [("a", "7"), ("b", "7")], kind="regression", labels=labels_of(store), name="valid")
    assert labels_of(held_out) == labels_of(store)
    assert held_out.arrays["labels"].tolist() == [(7 - labels_of(store).mean) / labels_of(store).scale] * 2


def test_empty_texts_are_dropped_and_counted_with_their_place(tmp_path: Path) -> None:
    rows = [("a", "x"), ("", "x"), ("b c", "y"), (" ", "y")]
    store = store_of(tmp_path, rows)
    assert (len(store), store.arrays["rows"].tolist(), store.arrays["labels"].tolist()) == (2, [0, 2], [0, 1])
    assert f"2 empty and dropped (the first at {tmp_path}/t.tsv:2)" in store.report


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{start + number}" for number in range(count))


def test_long_texts_keep_their_front(tmp_path: Path) -> None:
    rows = [(words(length), str(length % 2)) for length in (1, 5, 6, 400)]
    store = store_of(tmp_path, rows, max_length=7)
    tokenizer = tokenizer_of([row[0] for row in rows])
    assert [store.texts[0][row].tolist() for row in range(4)] == [tokenizer.encode(text)[:5] for text, _ in rows]
    assert "2 cut to their first 7 tokens" in store.report
    assert store.input_lengths[0].tolist() == [3, 7, 7, 7]


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
        kept_lengths = fitting_lengths([first, second], room)
        assert list(zip(*map(np.ndarray.tolist, kept_lengths), strict=True)) == [
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
            parts = [text[row].tolist() for text in store.texts]
            expected = [2, *parts[0], 3, *([*parts[1], 3] if paired else [])]
            assert ids == expected + [0] * (len(ids) - len(expected))
            assert len(expected) == store.input_lengths[0][row]
            assert labels_of(store).names[label] == rows[row][1]
        real = store.input_lengths[0][batch.rows]
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
        Store(first.folder, LABELLED, (2,))


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
            "t.tsv:1: each of the 20 texts from here on has a different",
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
        prepare_labelled(DATA.source({"text": path, "labels": 2}), tokenizer_of(["a"]), max_length=9, kind=kind)
    assert "\n" not in str(caught.value)


def test_a_label_that_training_did_not_see(tmp_path: Path) -> None:
    known = labels_of(store_of(tmp_path, [("a", "positive"), ("b", "negative")]))
    message = r"v.tsv:2: the label \"positve\" is not among the 2 labels of the training data \(negative, positive\)"
    with pytest.raises(InputError, match=message):
        store_of(tmp_path, [("a", "positive"), ("b", "positve")], labels=known, name="v")
    held_out = store_of(tmp_path, [("a", "positive"), ("b", "positive")], labels=known, name="w")
    assert held_out.arrays["labels"].tolist() == [1, 1]


def test_max_length_leaves_room_for_a_token(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length is 2; expected at least 3"):
        store_of(tmp_path, ONE, max_length=2)
    with pytest.raises(InputError, match="max_length is 4; expected at least 5"):
        store_of(tmp_path, [("a", "x", "b"), ("c", "y", "d")], max_length=4)
