"""Held-out examples: drawn by label, and never with a text that training reads."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.apps.recipes.draft import MOST_HELD_OUT, count_overlapping, draw_split, split_passages
from clearhead.base.errors import InputError

numbers = st.integers(0, 40)


@given(st.lists(st.tuples(numbers, numbers), min_size=20, max_size=80))
def test_the_parts_are_complete_and_share_nothing(pairs: list[tuple[int, int]]) -> None:
    keys = [[("source", source), ("target", other)] for source, other in pairs]
    try:
        held = draw_split(keys)
    except InputError:
        return
    assert sorted([*held.train, *held.valid]) == list(range(len(pairs)))
    assert count_overlapping([keys[row] for row in held.train], [keys[row] for row in held.valid]) == 0
    counts = Counter(key for example_keys in keys for key in example_keys)
    assert held.num_shared == sum(any(counts[key] > 1 for key in example_keys) for example_keys in keys)
    assert len(held.valid) <= max(1, round(0.1 * len(pairs)))


def test_each_label_gets_its_share() -> None:
    labels = ["a"] * 700 + ["b"] * 290 + ["c"] * 10
    held = draw_split([[str(row)] for row in range(1_000)], labels)
    assert Counter(labels[row] for row in held.valid) == {"a": 70, "b": 29, "c": 1}
    assert held.valid != sorted(range(9, 1_000, 10))


def test_no_more_is_held_out_than_a_score_needs() -> None:
    assert len(draw_split([[row] for row in range(50_000)]).valid) == MOST_HELD_OUT


def test_an_example_without_text_is_not_held_out() -> None:
    keys: list[list[int]] = [[] if row % 2 else [row] for row in range(200)]
    assert not any(row % 2 for row in draw_split(keys).valid)


def test_examples_that_all_share_a_text() -> None:
    with pytest.raises(InputError, match="give validation data, such as --valid-text"):
        draw_split([["the same"]] * 50)


def test_passages_are_the_text_and_end_with_paragraphs() -> None:
    paragraphs = [[f"{row} " + "word " * 40, "more", ""] for row in range(400)]
    lines = [line for paragraph in paragraphs for line in paragraph]
    texts = split_passages(lines)
    assert "\n".join(texts).split("\n") == lines
    assert all(text.endswith("\n") and 2_000 <= len(text) < 2_500 for text in texts[:-1])
    without = split_passages(["word " * 40] * 400)
    assert all(4_000 <= len(text) < 4_300 for text in without[:-1])
