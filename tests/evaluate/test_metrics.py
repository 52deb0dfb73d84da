"""Scores against independent computations: counted by hand, by another algorithm, or by fractions."""

from __future__ import annotations

import math
import random
import string
from fractions import Fraction

import numpy as np
import pytest

from clearhead.evaluate.metrics import (
    accuracy,
    confusion_matrix,
    f1_by_label,
    macro_f1,
    mean_squared_error,
    multi_label_scores,
    pearson,
    spearman,
)
from clearhead.tasks.answer.use import answer_scores
from clearhead.tasks.tag.use import entity_f1, entity_spans


def classes(count: int, num_labels: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, num_labels, count)


@pytest.mark.parametrize("num_labels", [2, 5, 11])
def test_classes_against_plain_counting(num_labels: int) -> None:
    predicted, expected = classes(97, num_labels, 1), classes(97, num_labels, 2)
    pairs = list(zip(expected.tolist(), predicted.tolist(), strict=True))
    matrix = confusion_matrix(predicted, expected, num_labels=num_labels)
    assert matrix.tolist() == [
        [pairs.count((row, column)) for column in range(num_labels)] for row in range(num_labels)
    ]
    assert accuracy(predicted, expected) == pytest.approx(sum(one == other for one, other in pairs) / 97)
    by_label = []
    for label in range(num_labels):
        hits = pairs.count((label, label))
        precision = Fraction(hits, max(1, sum(guess == label for _, guess in pairs)))
        recall = Fraction(hits, max(1, sum(true == label for true, _ in pairs)))
        by_label.append(float(2 * precision * recall / (precision + recall)) if hits else 0.0)
    assert f1_by_label(matrix) == pytest.approx(by_label)
    assert macro_f1(matrix) == pytest.approx(sum(by_label) / num_labels)


def test_a_class_that_never_occurs_does_not_count() -> None:
    matrix = confusion_matrix(np.array([0, 0, 2]), np.array([0, 2, 2]), num_labels=4)
    assert [math.isnan(value) for value in f1_by_label(matrix)] == [False, True, False, True]
    assert macro_f1(matrix) == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_a_class_that_is_never_met_counts_as_zero() -> None:
    matrix = confusion_matrix(np.array([0, 0, 0]), np.array([0, 0, 1]), num_labels=2)
    assert macro_f1(matrix) == pytest.approx((0.8 + 0) / 2)


def test_several_labels_against_plain_counting() -> None:
    draw = np.random.default_rng(3)
    predicted, expected = draw.random((31, 7)) < 0.3, draw.random((31, 7)) < 0.4
    predicted[:, 4] = expected[:, 4] = False
    cells = [(bool(p), bool(e), label) for p_row, e_row in zip(predicted, expected, strict=True)
             for label, (p, e) in enumerate(zip(p_row, e_row, strict=True))]  # fmt: skip

    def f1(labels: set[int]) -> float:
        true_positive = sum(p and e for p, e, label in cells if label in labels)
        wrong = sum(p != e for p, e, label in cells if label in labels)
        return 2 * true_positive / (2 * true_positive + wrong)

    scores = multi_label_scores(predicted, expected)
    assert scores.micro_f1 == pytest.approx(f1(set(range(7))))
    assert scores.macro_f1 == pytest.approx(sum(f1({label}) for label in (0, 1, 2, 3, 5, 6)) / 6)
    assert scores.exact == pytest.approx(sum(list(p) == list(e) for p, e in zip(predicted, expected, strict=True)) / 31)


def test_no_label_anywhere_is_met() -> None:
    nothing = np.zeros((3, 2), dtype=bool)
    scores = multi_label_scores(nothing, nothing)
    assert (scores.micro_f1, scores.macro_f1, scores.exact) == (1.0, 1.0, 1.0)
    assert multi_label_scores(~nothing, nothing).micro_f1 == 0.0


def ranks(values: list[float]) -> list[Fraction]:
    """The mean place of a value among all orders of the equal ones: half a place for each equal other."""
    return [
        1 + sum(other < value for other in values) + Fraction(sum(other == value for other in values) - 1, 2)
        for value in values
    ]


def correlation(first: list[Fraction], second: list[Fraction]) -> float:
    """From the sums over all pairs of examples: no mean is ever subtracted."""
    pairs = [(one, other) for one in range(len(first)) for other in range(one)]
    product = sum((first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs)
    squares = [sum((side[i] - side[j]) ** 2 for i, j in pairs) for side in (first, second)]
    return float(product) / math.sqrt(squares[0] * squares[1])


@pytest.mark.parametrize("levels", [3, 7, 1000])
def test_correlations_against_sums_over_pairs(levels: int) -> None:
    draw = random.Random(levels)
    first = [draw.randrange(levels) / 8 for _ in range(29)]
    second = [value + draw.randrange(levels) / 16 for value in first]
    exact = [[Fraction(value) for value in side] for side in (first, second)]
    assert pearson(np.array(first), np.array(second)) == pytest.approx(correlation(*exact), abs=1e-12)
    ranked = correlation(ranks(first), ranks(second))
    assert spearman(np.array(first), np.array(second)) == pytest.approx(ranked, abs=1e-12)


def test_spearman_sees_the_order_only() -> None:
    values = np.random.default_rng(5).normal(size=41)
    others = values + np.random.default_rng(6).normal(size=41)
    assert spearman(np.exp(values), others) == pytest.approx(spearman(values, others))
    assert spearman(values, np.exp(values)) == pytest.approx(1.0)
    assert spearman(values, -values) == pytest.approx(-1.0)


def test_what_does_not_vary_correlates_with_nothing() -> None:
    values = np.arange(5.0)
    assert spearman(np.ones(5), values) == pearson(values, np.full(5, 0.1)) == pearson(values[:1], values[:1]) == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_correlation_of_extreme_numbers(scale: float) -> None:
    values = np.array([0.0, 1.0, 3.0, 2.0])
    assert pearson(values * scale, values) == pytest.approx(1.0)


def test_mean_squared_error_by_hand() -> None:
    assert mean_squared_error(np.array([1.0, 2.0, 4.0], np.float32), np.array([1, 0, 1])) == pytest.approx((4 + 9) / 3)


def end_of_chunk(before: str, now: str, type_before: str, type_now: str) -> bool:
    """The table of conlleval, case by case."""
    listed = {("B", "B"), ("B", "O"), ("I", "B"), ("I", "O"), ("B", "S"), ("I", "S"), ("E", "B"), ("E", "I"),
              ("E", "E"), ("E", "S"), ("E", "O"), ("S", "B"), ("S", "I"), ("S", "E"), ("S", "S"),
              ("S", "O")}  # fmt: skip
    return (before, now) in listed or (before != "O" and type_before != type_now)


def start_of_chunk(before: str, now: str, type_before: str, type_now: str) -> bool:
    """The table of conlleval, case by case."""
    listed = {("B", "B"), ("I", "B"), ("O", "B"), ("O", "I"), ("O", "E"), ("O", "S"), ("E", "B"), ("E", "E"),
              ("E", "I"), ("E", "S"), ("S", "B"), ("S", "E"), ("S", "I"), ("S", "S"), ("B", "S"),
              ("I", "S")}  # fmt: skip
    return (before, now) in listed or (now != "O" and type_before != type_now)


def conlleval(predicted: list[list[str]], expected: list[list[str]]) -> tuple[int, int, int]:
    """The counts of conlleval the way it makes them: one pass over the words, both sides open at once."""
    num_expected = num_predicted = num_correct = 0
    words = [pair for guessed, true in zip(predicted, expected, strict=True)
             for pair in [*zip(guessed, true, strict=True), ("O", "O")]]  # fmt: skip
    guess_before, guess_type_before, true_before, true_type_before, both_open = "O", "", "O", "", False
    for guess_tag, true_tag in words:
        guess, _, guess_type = guess_tag.partition("-")
        true, _, true_type = true_tag.partition("-")
        true_side = (true_before, true, true_type_before, true_type)
        guess_side = (guess_before, guess, guess_type_before, guess_type)
        if both_open:
            if end_of_chunk(*true_side) and end_of_chunk(*guess_side) and guess_type_before == true_type_before:
                both_open = False
                num_correct += 1
            elif end_of_chunk(*true_side) != end_of_chunk(*guess_side) or guess_type != true_type:
                both_open = False
        if start_of_chunk(*true_side) and start_of_chunk(*guess_side) and guess_type == true_type:
            both_open = True
        num_expected += start_of_chunk(*true_side)
        num_predicted += start_of_chunk(*guess_side)
        guess_before, guess_type_before, true_before, true_type_before = guess, guess_type, true, true_type
    return num_expected, num_predicted, num_correct


@pytest.mark.parametrize("prefixes", ["BI", "I", "BIES"])
def test_entities_are_counted_as_conlleval_does(prefixes: str) -> None:
    draw = random.Random(len(prefixes))
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("PER", "LOC-x"))]
    expected = [draw.choices(tags, k=draw.randint(0, 13)) for _ in range(401)]
    predicted = [[tag if draw.random() < 0.7 else draw.choice(tags) for tag in sentence] for sentence in expected]
    found = entity_f1(predicted, expected)
    assert (found.all.expected, found.all.predicted, found.all.correct) == conlleval(predicted, expected)
    assert found.all.correct > 50
    for name in ("expected", "predicted", "correct"):
        assert sum(getattr(counts, name) for counts in found.by_type.values()) == getattr(found.all, name)
    words = [pair for one, other in zip(predicted, expected, strict=True) for pair in zip(one, other, strict=True)]
    assert found.num_words == len(words)
    assert found.tag_accuracy == pytest.approx(sum(one == other for one, other in words) / len(words))


def test_scores_by_hand() -> None:
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "B-PER"]]
    found = entity_f1(predicted, expected)
    assert (found.all.precision, found.all.recall) == (2 / 4, 2 / 3)
    assert found.all.f1 == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert found.by_type["PER"].precision == pytest.approx(2 / 3)
    assert found.by_type["LOC"].f1 == 0.0
    assert list(found.by_type) == ["LOC", "PER"]


def test_spans_where_tags_do_not_follow_the_scheme() -> None:
    assert entity_spans(["O", "I-A", "I-A", "I-B", "B-B", "O"]) == [(1, 3, "A"), (3, 4, "B"), (4, 5, "B")]
    assert entity_spans(["B-A", "E-A", "I-A", "S-A"]) == [(0, 2, "A"), (2, 3, "A"), (3, 4, "A")]
    assert entity_spans([]) == entity_spans(["O"]) == []


def test_plain_classes_are_one_entity_for_each_word() -> None:
    assert entity_spans(["NN", "NN", "O", "-LRB-"]) == [(0, 1, "NN"), (1, 2, "NN"), (3, 4, "-LRB-")]
    found = entity_f1([["NN", "VB", "NN"]], [["NN", "NN", "NN"]])
    assert found.all.f1 == found.tag_accuracy == pytest.approx(2 / 3)


def test_sentences_do_not_run_into_each_other() -> None:
    assert entity_f1([["B-A"], ["I-A"]], [["B-A"], ["I-A"]]).all.expected == 2


def test_nothing_to_find_gives_zero() -> None:
    assert entity_f1([["O"]], [["O"]]).all.f1 == 0.0


def plain_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def plain_answer_f1(guess: str, gold: str) -> Fraction:
    """Take the words that both have off one list, one by one."""
    first, second = plain_words(guess), plain_words(gold)
    if not first or not second:
        return Fraction(first == second)
    left, common = list(second), 0
    for word in first:
        if word in left:
            left.remove(word)
            common += 1
    return Fraction(2 * common, len(first) + len(second))


def test_answers_against_plain_counting() -> None:
    draw = random.Random(9)
    pieces = ["the", "The", "A", "an", "cat", "Cat!", "(dog)", "-", "x.y", "théâtre", ""]
    texts = [" ".join(draw.choices(pieces, k=draw.randint(0, 5))) for _ in range(700)]
    golds = [draw.choices([text for text in texts if plain_words(text)], k=draw.randint(0, 3)) for _ in texts]
    scores = answer_scores(texts, golds)
    right = sum(
        any(plain_words(a) == plain_words(b) for b in gold or [""]) for a, gold in zip(texts, golds, strict=True)
    )
    best = sum(max(plain_answer_f1(a, b) for b in gold or [""]) for a, gold in zip(texts, golds, strict=True))
    assert scores.exact_match == pytest.approx(right / 700, rel=1e-12) and scores.num_questions == 700
    assert scores.f1 == pytest.approx(float(best / 700), rel=1e-12)
    assert 0.1 < scores.exact_match < scores.f1 < 1


@pytest.mark.parametrize(
    ("guess", "golds", "exact", "f1"),
    [
        ("The Normans.", ["normans"], 1, 1),
        ("an apple-pie", ["applepie"], 1, 1),
        ("in the 10th century", ["10th century"], 0, 0.8),
        ("10th 10th", ["10th century", "10th"], 0, 2 / 3),
        ("theatre", ["atre"], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("", ["cat", "the"], 0, 0),  # a right answer without a word is none, if there is another
        ("", ["The"], 1, 1),
    ],
)
def test_answers_counted_by_hand(guess: str, golds: list[str], exact: float, f1: float) -> None:
    found = answer_scores([guess, "x"], [golds, ["x"]])
    assert (found.exact_match, found.num_questions) == ((exact + 1) / 2, 2)
    assert found.f1 == pytest.approx((f1 + 1) / 2)
