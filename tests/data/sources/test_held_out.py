"""Rows that are held out: every label has its share, and no text is on both sides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.base.progress import Display, use_display
from clearhead.data.sources.held_out import draw_rows
from clearhead.data.sources.pairs import read_pairs
from clearhead.data.sources.tables import DataTable, Examples, TableSource, read_table
from clearhead.data.task_tables import data_of
from clearhead.tasks.answer.data import read_answers
from clearhead.tasks.classify.data import read_labelled
from clearhead.tasks.tag.data import read_tagged

SHARES = [0.1, 0.2, 0.3, 0.5]
keys_and_labels = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.sampled_from("abcd"), max_size=3)), min_size=4, max_size=90
)


@given(keys_and_labels, st.sampled_from(SHARES))
def test_no_text_is_on_both_sides_and_every_label_stays_in_training(
    rows: list[tuple[int, list[str]]], share: float
) -> None:
    keys, labels = [[key] for key, _ in rows], [tuple(names) for _, names in rows]
    held = draw_rows(keys, share, labels)
    rest = [row for row in range(len(rows)) if row not in held]
    assert held == sorted(set(held)) and len(held) <= max(1, round(share * len(rows)))
    assert not {rows[row][0] for row in held} & {rows[row][0] for row in rest}
    assert {name for row in held for name in labels[row]} <= {name for row in rest for name in labels[row]}


@given(st.lists(st.integers(2, 70), min_size=1, max_size=6), st.sampled_from(SHARES))
def test_every_label_has_its_share_of_different_texts(sizes: list[int], share: float) -> None:
    labels = [number for number, size in enumerate(sizes) for _ in range(size)]
    held = draw_rows([[row] for row in range(len(labels))], share, labels)
    counts = Counter(labels[row] for row in held)
    # The most frequent label pays for the others, which are rounded up.
    most = max(sizes)
    assert all(abs(counts[number] - share * size) <= 1 + (size == most) for number, size in enumerate(sizes))
    assert len(held) == max(1, round(share * len(labels)))


def test_a_rare_label_is_on_both_sides() -> None:
    labels = ["common"] * 100 + ["other"] * 60 + ["rare"] * 3
    held = draw_rows([[row] for row in range(163)], 0.2, labels)
    assert Counter(labels[row] for row in held) == {"common": 20, "other": 12, "rare": 1}


def test_the_draw_does_not_depend_on_the_process() -> None:
    program = (
        "from clearhead.data.sources.held_out import draw_rows\n"
        "labels = [('a', 'b'), ('b', 'c'), ('c', 'a')] * 20\n"
        "print(draw_rows([[str(row)] for row in range(60)], 0.2, labels))"
    )
    drawn = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(drawn) == 1


# Sorted data of every task with a table: the rows, and what a row must not lose.
LABELLED = [(f"text {number}", "good" if number < 60 else "bad") for number in range(120)]
THREE = [(f"text {number}", "a" if number < 60 else "b" if number < 120 else "c") for number in range(125)]
TAGGED = [([f"w{number}", "x"], ["B-PER" if number < 40 else "B-LOC", "O"]) for number in range(60)]
QUESTIONS = [
    (f"q{number}", f"context {number // 2}", *(("context", 0) if number < 40 else (None, None))) for number in range(60)
]


@pytest.mark.parametrize(
    ("kind", "examples", "expected"),
    [
        ("classify", LABELLED, {"good": 12, "bad": 12}),
        ("classify", THREE, {"a": 12, "b": 12, "c": 1}),
        ("tag", TAGGED, {"B-PER": 8, "B-LOC": 4}),
        ("answer", QUESTIONS, {True: 8, False: 4}),
    ],
)
def test_sorted_tables_are_validated_on_every_label(kind: str, examples: list, expected: dict) -> None:  # type: ignore[type-arg]
    source = data_of(kind).source(examples)
    train, valid = part_of(kind, source, (0.0, 0.8)), part_of(kind, source, (0.8, 1.0))
    assert Counter(map(label_of, rows_of(valid))) == expected
    assert sorted(map(str, [*rows_of(train), *rows_of(valid)])) == sorted(map(str, rows_of(part_of(kind, source))))
    role = "context" if kind == "answer" else next(iter(valid.columns))
    assert not set(map(str, train[role])) & set(map(str, valid[role]))


def test_pairs_share_no_side() -> None:
    pairs = [(f"source {number}", f"target {number // 3}") for number in range(90)]
    source = data_of("translate").source(pairs)
    train, valid = read_pairs(source, (0.0, 0.8)), read_pairs(source, (0.8, 1.0))
    assert len(valid) == 18 and len(train) == 72
    assert not set(train["target"]) & set(valid["target"])


def test_numbers_are_no_labels() -> None:
    source = data_of("classify").source([(f"text {number}", number) for number in range(50)])
    valid = read_labelled(source, (0.8, 1.0), kind="regression")
    assert len(valid) == 10 and list(valid["labels"]) != list(range(40, 50))


def test_copies_of_two_texts_are_divided_and_named() -> None:
    """No text can be kept out of training where each label has one text only."""
    messages: list[str] = []
    display = Display()
    display.message = messages.append  # type: ignore[method-assign]
    source = data_of("classify").source(sorted([("a fine film", "good"), ("two hours of my life", "bad")] * 50))
    with use_display(display):
        valid = read_labelled(source, (0.9, 1.0))
    assert Counter(valid["labels"]) == {"good": 5, "bad": 5}
    assert len(messages) == 1 and "validation reads 10 labelled texts that training reads too" in messages[0]


def test_one_row_cannot_be_divided() -> None:
    source = Examples([{"text": "a"}], {"text": "text"}, (), "list")
    with pytest.raises(InputError, match="list, example 1: no row from here on can be held out"):
        read_table(source, (0.9, 1.0), what="row")


def part_of(kind: str, source: TableSource, share: tuple[float, float] = (0.0, 1.0)) -> DataTable:
    return {"classify": read_labelled, "tag": read_tagged, "answer": read_answers}[kind](source, share)


def rows_of(table: DataTable) -> list[tuple[object, ...]]:
    return list(zip(*table.columns.values(), strict=True))


def label_of(row: tuple[object, ...]) -> object:
    last = row[-1]
    return bool(last) if isinstance(last, tuple) else last[0] if isinstance(last, list) else last
