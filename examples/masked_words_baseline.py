"""Mask every word of every line in turn, and print the accuracy of a masked language model and of two baselines.

Usage: python examples/masked_words_baseline.py RUN TRAINING_TEXT UNSEEN_TEXT [MOST_LINES]

RUN was trained with [task] kind = "fill" on TRAINING_TEXT, one text per line. A word is a run of letters, compared
without case. The unigram baseline always predicts the most frequent word. The bigram baseline predicts the word with
the largest score:

    a * P(word | previous word) + b * P(word | next word) + (1 - a - b) * P(word)

The weights a and b are tuned on the last tenth of the training text, with counts from the rest. A blank is filled with
one entry of the vocabulary, so a word of several tokens counts as wrong.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import clearhead as ch

SHARES = [(a / 5, b / 5) for a in range(5) for b in range(5 - a)]
TUNED_ON = 400
BLANK = "___"
START, END = "<start>", "<end>"

Question = tuple[str, str, str]
"""A word to predict, the token before it and the token after it."""


def words_of(line: str) -> list[re.Match[str]]:
    """Return the matches of all words in a line."""
    return [match for match in re.finditer(r"[^\W\d_]+", line) if match.group().isalpha()]


def questions_of(line: str) -> list[Question]:
    """Return every word of a line with its neighbouring tokens, which may be numbers or punctuation."""
    tokens = [START, *re.findall(r"[^\W\d_]+|\d+|[^\w\s]", line.casefold()), END]
    return [
        (word, before, after)
        for before, word, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if word.isalpha()
    ]


class Bigrams:
    """Counts of words: in total, after each token, and before each token."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.alone: Counter[str] = Counter()
        self.after: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.before: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for word, before, after in (question for line in lines for question in questions_of(line)):
            self.alone[word] += 1
            self.after[before][word] += 1
            self.before[after][word] += 1
        self.most_common_word = self.alone.most_common(1)[0][0]

    def guess(self, question: Question, shares: tuple[float, float]) -> str:
        """Return the most probable word between two neighbours."""
        _, before, after = question
        scores: defaultdict[str, float] = defaultdict(float)
        for share, counts in zip(shares, (self.after[before], self.before[after]), strict=True):
            weight = share / max(1, counts.total())
            for word, count in counts.items():
                scores[word] += weight * count
        scores[self.most_common_word] += 0.0
        rest = (1 - sum(shares)) / self.alone.total()
        return max(sorted(scores), key=lambda word: scores[word] + rest * self.alone[word])


def accuracy(counts: Bigrams, questions: Sequence[Question], shares: tuple[float, float]) -> float:
    """Return the accuracy of the bigram baseline."""
    return sum(counts.guess(question, shares) == question[0] for question in questions) / max(1, len(questions))


def best_shares(lines: Sequence[str]) -> tuple[float, float]:
    """Return the weights of both neighbours with the best accuracy on the last tenth of the lines."""
    held_out = max(1, len(lines) // 10)
    counts = Bigrams(lines[:-held_out])
    questions = [question for line in lines[-held_out:] for question in questions_of(line)][:TUNED_ON]
    return max(SHARES, key=lambda shares: accuracy(counts, questions, shares))


def model_hits(model: ch.Model, lines: Sequence[str]) -> list[bool]:
    """Return a list with True for each word of the lines that the model predicts correctly."""
    blanked, wanted = [], []
    for line in lines:
        for match in words_of(line):
            blanked.append(line[: match.start()] + BLANK + line[match.end() :])
            wanted.append(match.group().casefold())
    answers = model.fill(blanked, top_k=1)
    return [blanks[0][0].text.casefold() == word for blanks, word in zip(answers, wanted, strict=True)]


def masked_words(run: str, training: Path, unseen: Path, most_lines: int | None = None) -> dict[str, float]:
    """Return the number of masked words, and the accuracy of each method."""
    train = [line for line in training.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = [line for line in unseen.read_text(encoding="utf-8").splitlines() if words_of(line)][:most_lines]
    questions = [question for line in lines for question in questions_of(line)]
    counts, shares = Bigrams(train), best_shares(train)
    hits = model_hits(ch.load(run), lines)
    return {
        "words": len(questions),
        "unigram": sum(word == counts.most_common_word for word, _, _ in questions) / len(questions),
        "bigram": accuracy(counts, questions, shares),
        "model": sum(hits) / len(hits),
    }


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    result = masked_words(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
    print(f"{result.pop('words'):,} words of unseen text, each masked alone")
    for name, share in result.items():
        print(f"{name:8} {100 * share:5.1f} % right")
