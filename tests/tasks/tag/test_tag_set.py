"""Tagging schemes, and the tags of each."""

from __future__ import annotations

import random

import pytest

from clearhead.base.errors import InputError
from clearhead.data.sources.tables import DataTable
from clearhead.tasks.tag.tag_set import TagSet, find_scheme, to_iob2


def data_of(*sentences: str) -> DataTable:
    return DataTable(
        {"tags": list(map(str.split, sentences))}, range(len(sentences)), lambda row, word: f"f:{row}.{word}"
    )


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-A I-A O B-B B-B", "O O"], "IOB2"),
        (["I-A I-A O I-B B-B", "I-A"], "IOB1"),
        (["I-A I-B I-A"], "IOB1"),
        (["B-A E-A S-B O", "B-B I-B E-B"], "BIOES"),
        (["S-A"], "BIOES"),
        (["NN VB O -LRB-", "B-"], "plain"),
        (["B I O B", "O O"], "IOB2"),
        (["I I O I B", "I"], "IOB1"),
        (["B I E O S"], "BIOES"),
        (["B X O"], "plain"),
        (["E S O"], "plain"),
        (["class-I class-S other"], "plain"),
    ],
)
def test_schemes_are_recognised(sentences: list[str], scheme: str) -> None:
    assert find_scheme(data_of(*sentences)) == scheme


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (["B-A O", "O I-A"], r"^f:1.1: tag 'I-A' cannot follow 'O' where other entities begin with B- \(IOB2\)"),
        (["B-A I-B"], "^f:0.1: tag 'I-B' cannot follow 'B-A'"),
        (["S-A I-A E-A"], "^f:0.1: tag 'I-A' cannot follow 'S-A' in the scheme BIOES"),
        (["S-A B-A", "O"], "^f:0.1: tag 'O' cannot follow 'B-A' in the scheme BIOES"),
        (["B-A I-A E-B"], "^f:0.2: tag 'E-B' cannot follow 'I-A' in the scheme BIOES"),
        (["B-A NN"], '^f:0.1: the tag is "NN", but other tags here begin with B- or I-'),
        (["O PER-B", "PER-I"], '^f:0.1: the tag is "PER-B", expected "B-PER": B-, I-, E- or S- in front of the type'),
        (["B_PER O"], '^f:0.0: the tag is "B_PER", expected "B-PER"'),
        (["b-PER i-PER o"], '^f:0.0: the tag is "b-PER", expected "B-PER"'),
        (["b i o"], '^f:0.0: the tag is "b", expected "B"'),
        (["NN_B NN_I VB_B"], '^f:0.0: the tag is "NN_B", expected "B-NN"'),
        (["I O B", "S"], "^f:0.0: tag 'I' cannot follow 'O' in the scheme BIOES"),
    ],
)
def test_tags_that_follow_no_scheme(sentences: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_scheme(data_of(*sentences))


def to_iob1(tags: list[str]) -> list[str]:
    """The other way: a B- stays only where the entity before is of the same type and ends right here."""
    pairs = zip(["O", *tags], tags, strict=False)
    return [f"I-{tag[2:]}" if tag[0] == "B" and before[2:] != tag[2:] else tag for before, tag in pairs]


def random_iob2(draw: random.Random, length: int) -> list[str]:
    tags: list[str] = []
    while len(tags) < length:
        kind = draw.choice("AB")
        tags += draw.choice([["O"], [f"B-{kind}"], [f"B-{kind}", f"I-{kind}"], [f"B-{kind}"] + [f"I-{kind}"] * 2])
    return tags


def test_iob1_becomes_iob2() -> None:
    draw = random.Random(1)
    for _ in range(200):
        tags = random_iob2(draw, 11)
        assert to_iob2(to_iob1(tags)) == tags
        assert find_scheme(data_of(" ".join(tags))) in ("IOB2", "plain")


def test_tags_without_a_type_become_iob2_alike() -> None:
    draw = random.Random(2)
    for _ in range(200):
        tags = [tag[0] for tag in random_iob2(draw, 11)]
        first = [f"{tag}-A" if tag != "O" else tag for tag in tags]
        assert to_iob2(to_iob1(first)) == first
        assert to_iob2([tag[0] for tag in to_iob1(first)]) == tags


def test_every_type_has_all_tags_of_its_scheme() -> None:
    assert TagSet.of([["B-A", "O"], ["B-B"]], "IOB2").names == ("O", "B-A", "I-A", "B-B", "I-B")
    assert TagSet.of([["S-A"]], "BIOES").names == ("O", "B-A", "I-A", "E-A", "S-A")
    assert TagSet.of([["B", "O"]], "IOB2").names == ("O", "B", "I")
    assert TagSet.of([["NN", "VB", "O"]], "plain").names == ("O", "NN", "VB")
    assert TagSet.of([["VB", "NN"]], "plain").fallback == 0
