"""Splits raw text into words like those that a tagger was trained on."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_RUNS = 200


@dataclass(frozen=True)
class WordSplitter:
    """Splits text at white space and punctuation, except where the training data does not.

    Args:
        inner: punctuation that stays inside a word, as "_" in code and "'" in "n't".
        runs: words of several punctuation characters, as "==" and "...", the longest first.
    """

    inner: str = ""
    runs: tuple[str, ...] = ()

    @classmethod
    def learn(cls, words: Iterable[str]) -> WordSplitter:
        """Return the splitter that fits some words best.

        Args:
            words: the words of a training text; white space inside them is ignored.
        """
        counts = Counter(part for word in words for part in word.split())
        inside: Counter[str] = Counter()
        alone: Counter[str] = Counter()
        runs: Counter[str] = Counter()
        for word, count in counts.items():
            signs = [letter for letter in word if _is_sign(letter)]
            if len(signs) < len(word):
                inside.update(dict.fromkeys(signs, count))
            else:
                alone.update(dict.fromkeys(signs, count))
                if len(word) > 1:
                    runs[word] += count
        kept = sorted(runs, key=lambda run: (-runs[run], run))[:_MOST_RUNS]
        return cls(
            inner="".join(sorted(sign for sign in inside if inside[sign] > alone[sign])),
            runs=tuple(sorted(kept, key=lambda run: (-len(run), run))),
        )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and the end of each word.

        Args:
            text: any text; together the words hold everything but white space.
        """
        spans = []
        start = 0
        while start < len(text):
            if text[start].isspace():
                start += 1
                continue
            end = start
            while end < len(text) and self._is_inside(text[end]):
                end += 1
            if end == start:
                end += next((len(run) for run in self.runs if text.startswith(run, start)), 1)
            spans.append((start, end))
            start = end
        return spans

    def _is_inside(self, letter: str) -> bool:
        return letter in self.inner or not (letter.isspace() or _is_sign(letter))


def _is_sign(letter: str) -> bool:
    """True for what is neither letter, digit nor white space; an accent on its own belongs to its letter."""
    return not (letter.isalnum() or letter.isspace() or unicodedata.category(letter).startswith("M"))
