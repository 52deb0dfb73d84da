"""Sizes that fit the data: more text carries a larger model, and every size is one that training accepts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clearhead.cli.survey import Survey, fitting_sizes, survey


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
