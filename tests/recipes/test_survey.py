"""Sizes that fit the data: more text carries a larger model, and every size is one that training accepts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clearhead.recipes.survey import (
    Survey,
    TextSurvey,
    fitting_sizes,
    fitting_text_sizes,
    held_out_share,
    survey,
    survey_text,
)


def counted(num_pairs: int, **changes: object) -> Survey:
    values = {
        "num_empty": 0,
        "kind": "bpe",
        "num_units": 23 * num_pairs,
        "longest": 41,
        "num_words": 20_011,
        "num_repeated": 9_001,
        "num_characters": 97,
    }
    return Survey(num_pairs=num_pairs, **{**values, **changes})  # type: ignore[arg-type]


def test_counts() -> None:
    found = survey([("ein Hund läuft", "a dog runs"), ("", "nothing"), ("ein Hund", "a dog  ")])
    assert (found.num_pairs, found.num_empty, found.num_units, found.longest) == (2, 1, 10, 3)
    assert found.num_words == len({"ein", "Hund", "läuft", "a", "dog", "runs"})
    assert found.num_repeated == len({"ein", "Hund", "a", "dog"})
    assert found.num_characters == len(set("einHundläuftadogruns"))


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
    assert survey(pairs).kind == kind


def test_more_text_carries_a_larger_model_and_fewer_epochs() -> None:
    sizes = [fitting_sizes(counted(count)) for count in (200, 30_000, 300_000, 3_000_000)]
    for small, large in pairwise(sizes):
        assert small.width <= large.width and small.layers <= large.layers
        assert small.epochs > large.epochs and small.dropout >= large.dropout
        assert small.warmup <= large.warmup
    assert sizes[0].width < sizes[-1].width


@pytest.mark.parametrize("num_pairs", [20, 29_000, 10**6])
@pytest.mark.parametrize("longest", [1, 47, 10_007])
@pytest.mark.parametrize("kind", ["bpe", "split", "character"])
def test_every_size_is_possible(num_pairs: int, longest: int, kind: str) -> None:
    sizes = fitting_sizes(counted(num_pairs, longest=longest, kind=kind))
    assert sizes.width % sizes.heads == 0
    assert 32 <= sizes.max_length <= 512
    assert (sizes.vocab_size is None) == (kind != "bpe")


def test_vocabulary_stays_below_what_the_words_support() -> None:
    sizes = fitting_sizes(counted(29_000, num_repeated=301))
    assert sizes.vocab_size is not None and sizes.vocab_size <= 97 + 301


def test_single_texts_are_counted_as_pairs_are() -> None:
    found = survey([("ein Hund läuft",), ("",), ("ein Hund",)])
    assert (found.num_pairs, found.num_empty, found.num_units, found.longest) == (2, 1, 5, 3)


# --- running text ---


def test_text_is_counted_whatever_its_chunks() -> None:
    lines = [f"Dogs {word} runs fast." for word in ("a", "ab", "abc")] * 11
    text = "".join(f"{line}\n" for line in lines)
    whole = survey_text([text])
    assert whole.num_characters == len(text) and whole.num_distinct == len(set(text))
    assert whole.num_words == len(set(text.split())) and whole.num_repeated == len(
        set("Dogs a ab abc runs fast".split())
    )
    assert whole.longest == 4
    assert survey_text([f"{line}\n" for line in lines]).num_repeated == whole.num_repeated


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


def text_counted(num_characters: int, **changes: object) -> TextSurvey:
    values = {"num_distinct": 83, "num_words": 20_011, "num_repeated": 9_001, "longest": 11, "document": "file"}
    return TextSurvey(num_characters=num_characters, **{**values, **changes})  # type: ignore[arg-type]


def test_more_text_carries_a_larger_model_and_a_smaller_share_of_validation() -> None:
    surveys = [text_counted(10**power) for power in (5, 6, 8, 9)]
    sizes, shares = [fitting_text_sizes(found, continues=True) for found in surveys], [*map(held_out_share, surveys)]
    for small, large in pairwise(sizes):
        assert small.width <= large.width and small.layers <= large.layers and small.max_length <= large.max_length
        assert small.epochs > large.epochs and small.dropout >= large.dropout
        assert small.warmup <= large.warmup
    assert sizes[0].width < sizes[-1].width and shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_next_tokens_are_learned_from_what_brings_every_character_back() -> None:
    assert fitting_text_sizes(text_counted(10**6), continues=True).tokenizer == "character"
    assert fitting_text_sizes(text_counted(10**6, num_distinct=3_001), continues=True).tokenizer == "byte-bpe"
    assert fitting_text_sizes(text_counted(10**8), continues=True).tokenizer == "byte-bpe"
    assert fitting_text_sizes(text_counted(10**6), continues=False).tokenizer == "bpe"


@pytest.mark.parametrize("continues", [True, False])
def test_the_vocabulary_of_text_stays_below_what_it_supports(continues: bool) -> None:
    sizes = fitting_text_sizes(text_counted(10**8, num_repeated=301), continues=continues)
    assert sizes.vocab_size is not None and sizes.vocab_size <= (256 if continues else 83) + 301


def test_signs_of_hidden_text_have_room_where_there_is_little() -> None:
    for num_repeated, more in ((301, 17), (10**5, 0)):
        plain, with_signs = (
            fitting_text_sizes(text_counted(10**8, num_repeated=num_repeated), continues=False, num_special=signs)
            for signs in (lambda length: 0, lambda length: 17)
        )
        assert plain.vocab_size is not None and with_signs.vocab_size == plain.vocab_size + more


def test_a_block_holds_a_sentence() -> None:
    sizes = fitting_text_sizes(text_counted(10**6, document="line", longest=41), continues=False)
    assert 41 < sizes.max_length <= 512
