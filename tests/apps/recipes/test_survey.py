"""Surveys of text, and the vocabulary size that follows from them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clearhead.apps.recipes.survey import (
    Survey,
    TextSurvey,
    share_to_hold_out,
    survey,
    survey_text,
    tokenizer_kind,
    vocab_size,
)
from clearhead.spec.tasks.base import Architecture, Recipe, Size, Task
from clearhead.spec.tasks.registry import list_tasks


def recipe(tokenizer: str = "bpe", size: int = 8_000, least_count: int = 2) -> Recipe:
    return Recipe(
        None, tokenizer, size, 128, (Size(1, 16, 2, 32, 0.1),), Architecture({}), {}, 10, least_count=least_count
    )


def make_survey(word_counts: list[int], **changes: object) -> Survey:
    values = {
        "num_pairs": 29_000, "num_empty": 0, "kind": "bpe", "num_units": 667_000, "longest": 41, "num_words": 20_011,
        "num_characters": 97,
    }  # fmt: skip
    return Survey(word_counts=word_counts, **{**values, **changes})  # type: ignore[arg-type]


def make_text_survey(num_characters: int, **changes: object) -> TextSurvey:
    values = {
        "num_distinct": 83, "num_words": 20_011, "word_counts": [3] * 9_001, "longest_lines": [], "document": "file",
    }  # fmt: skip
    return TextSurvey(num_characters=num_characters, **{**values, **changes})  # type: ignore[arg-type]


def test_counts() -> None:
    result = survey([("ein Hund läuft", "a dog runs"), ("", "nothing"), ("ein Hund", "a dog  ")])
    assert (result.num_pairs, result.num_empty, result.num_units, result.longest) == (2, 1, 10, 3)
    assert result.num_words == len({"ein", "Hund", "läuft", "a", "dog", "runs"})
    assert sorted(result.word_counts) == [1, 1, 2, 2, 2, 2]
    assert result.num_characters == len(set("einHundläuftadogruns"))


@pytest.mark.parametrize(
    ("pairs", "kind"),
    [
        ([("ein Hund läuft", "a dog runs")] * 3, "bpe"),
        ([("ein Hu@@ nd läuft", "a do@@ g runs")] * 3, "split"),
        ([("abc", "cba"), ("defg", "gfed")], "character"),
        ([("21. Mai", "1998-05-21"), ("3. Mai", "1998-05-03")], "bpe"),
    ],
)
def test_kind_follows_from_the_text(pairs: list[tuple[str, str]], kind: str) -> None:
    result = survey(pairs)
    assert result.kind == kind and tokenizer_kind(recipe("word"), result) == ("word" if kind == "bpe" else kind)


def test_vocabulary_stays_below_what_frequent_words_support() -> None:
    result = make_survey([5] * 301 + [2] * 1_009 + [1] * 10_007)
    assert vocab_size(recipe(least_count=5), result, num_special=0) == 97 + 301 * 4 // 5
    assert vocab_size(recipe(least_count=2), result, num_special=0) == 97 + (301 + 1_009) * 4 // 5
    assert vocab_size(recipe(size=200), make_survey([5] * 10_007), num_special=0) == 97 + 1_000
    assert vocab_size(recipe(), make_survey([5] * 301, kind="character"), num_special=0) is None


def test_single_texts_are_counted_as_pairs_are() -> None:
    result = survey([("ein Hund läuft",), ("",), ("ein Hund",)])
    assert (result.num_pairs, result.num_empty, result.num_units, result.longest) == (2, 1, 5, 3)


# --- running text ---


def test_text_is_counted_whatever_its_chunks() -> None:
    lines = [f"Dogs {word} runs fast." for word in ("a", "ab", "abc")] * 11
    text = "".join(f"{line}\n" for line in lines)
    whole = survey_text([text])
    assert whole.num_characters == len(text) and whole.num_distinct == len(set(text))
    assert whole.num_words == len(set(text.split()))
    assert sorted(whole.word_counts) == [11, 11, 11, 33, 33, 33]
    assert whole.longest_lines[0] == "Dogs abc runs fast."
    parts = survey_text([f"{line}\n" for line in lines])
    assert parts.word_counts == whole.word_counts and parts.longest_lines[0] == whole.longest_lines[0]


@pytest.mark.parametrize(
    ("line", "document"),
    [
        ("A dog runs.\n", "line"),
        ("Why not?\n", "line"),
        ("狗跑。\n", "line"),
        ("a line of a longer\n", "file"),
        ("    return x.\n", "file"),
        ("A dog runs.\n\n", "file"),
    ],
)
def test_sentences_are_documents(line: str, document: str) -> None:
    assert survey_text([line * 23]).document == document
    assert survey_text([line * 7]).document == "file"


def test_more_text_needs_a_smaller_share_of_validation() -> None:
    shares = [share_to_hold_out(make_text_survey(10**power)) for power in (5, 6, 8, 9)]
    assert shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_characters_are_tokens_where_there_are_few() -> None:
    character_recipe = recipe("character")
    assert tokenizer_kind(character_recipe, make_text_survey(10**6)) == "character"
    assert tokenizer_kind(character_recipe, make_text_survey(10**6, num_distinct=3_001)) == "byte-bpe"


def test_signs_of_masked_text_have_room_where_there_is_little() -> None:
    for counts, more in (([3] * 301, 17), ([3] * 100_000, 0)):
        sizes = [
            vocab_size(recipe(), make_text_survey(10**6, word_counts=counts), num_special=signs) for signs in (0, 17)
        ]
        assert sizes[0] is not None and sizes[1] == sizes[0] + more


# --- the table ---


@pytest.mark.parametrize("task", list_tasks(), ids=lambda task: task.kind)
def test_rows_and_sizes_of_a_task_rise(task: Task) -> None:
    rows = task.recipes
    assert rows[-1].up_to is None
    for small, large in pairwise(rows):
        assert small.up_to is not None and (large.up_to is None or small.up_to < large.up_to)
    for row in rows:
        assert row.sizes[0].least_tokens == 0
        for smaller, other in pairwise(row.sizes):
            assert smaller.least_tokens < other.least_tokens
            assert smaller.layers * smaller.width**2 <= other.layers * other.width**2
        assert all(size.width % size.heads == 0 for size in row.sizes)
