"""The baselines of filling blanks: their counts, their guesses, and the table that compares them with a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.examples.test_run_files import script
from tests.tasks.text_run import run_file

LINES = ["a dog runs.", "a cat runs.", "a dog sleeps!", "A dog eats 3 hats"]


def test_questions_are_all_words_with_what_stands_beside_them() -> None:
    module = script("masked_words_baseline")
    assert module.questions_of("A dog's 3 hats.") == [
        ("a", module.START, "dog"), ("dog", "a", "'"), ("s", "'", "3"), ("hats", "3", "."),
    ]  # fmt: skip
    assert [match.group() for match in module.words_of("A dog's 3 hats.")] == ["A", "dog", "s", "hats"]


def test_guesses_are_the_most_probable_words() -> None:
    module = script("masked_words_baseline")
    counts = module.Bigrams(LINES)
    assert counts.most_common_word == "a" and counts.alone["dog"] == 3
    assert counts.guess(("?", "a", "eats"), (0.9, 0.0)) == "dog"
    assert counts.guess(("?", "cat", "!"), (0.9, 0.0)) == "runs"
    assert counts.guess(("?", "cat", "!"), (0.0, 0.9)) == "sleeps"
    assert counts.guess(("?", "never", "seen"), (0.4, 0.4)) == "a"
    by_hand = {
        word: 0.3 * (counts.after["a"][word] / 4) + 0.5 * (counts.before["runs"][word] / 2) + 0.2 * share / 12
        for word, share in counts.alone.items()
    }
    assert counts.guess(("?", "a", "runs"), (0.3, 0.5)) == max(by_hand, key=lambda word: by_hand[word])


@pytest.mark.usefixtures("quick_trainings")
def test_it_compares_a_run_with_both_baselines(tmp_path: Path) -> None:
    path = run_file(tmp_path, 'kind = "fill"', "encoder", steps=2)
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    module = script("masked_words_baseline")
    score = module.masked_words(str(tmp_path / "run"), tmp_path / "train.txt", tmp_path / "valid.txt", 31)
    assert score["words"] == sum(len(line.split()) for line in (tmp_path / "valid.txt").read_text().splitlines()[:31])
    assert score["bigram"] > 0.8, "every word follows from its neighbours"
    assert score["unigram"] == pytest.approx(1 / 23, abs=0.05)
    assert 0.0 <= score["model"] <= 1.0
