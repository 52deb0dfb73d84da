"""A small text with several scripts, digits and signs, the same on every machine."""

from __future__ import annotations

import random

_SYLLABLES = (
    *("ba", "de", "fi", "go", "lu", "mer", "nach", "ost", "pra", "quä", "ßen", "stro", "tür", "wal", "xi", "yo"),
    *("zent", "é", "ña", "łó", "ον", "κα", "ша", "ми", "東", "京"),
)
_ENDINGS = ("", "s", "en", "ung", "heit", "ed", "er", "ές", "ами")
_SIGNS = (".", "!", "?", " (sic).", ", don't.", " – 1998.", ' "#7".', " a#b ##c")


def make_corpus(num_lines: int = 241, seed: int = 5) -> list[str]:
    """Return lines of words, some frequent and many rare, that share stems and endings: subwords are worth learning."""
    stems = random.Random(3)
    words = ["".join(stems.choices(_SYLLABLES, k=stems.randint(1, 4))) for _ in range(601)]
    draw = random.Random(seed)
    return [
        " ".join(
            words[int(len(words) * draw.random() ** 2)] + draw.choice(_ENDINGS) for _ in range(draw.randint(1, 11))
        )
        + draw.choice(_SIGNS)
        for _ in range(num_lines)
    ]
