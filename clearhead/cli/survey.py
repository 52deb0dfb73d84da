"""A look at parallel text: how much there is, how long it is, and which sizes of a model fit it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Pairs = Sequence[tuple[str, str]]

BATCH_TOKENS = 4096
# Subword tokens in a word, roughly, for a vocabulary of a few thousand: what lengths and epochs are estimated with.
TOKENS_PER_WORD = 1.4
_LETTERS = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Survey:
    """What was counted in parallel text.

    Attributes:
        num_pairs: pairs in which both sides have text.
        num_empty: pairs with an empty side.
        kind: the kind of tokenizer that suits it: bpe, split (already segmented) or character.
        num_units: words on both sides together, or characters where the kind is character.
        longest: length of the longest side of a pair, in words (or characters), the longest 1 in 1,000 pairs left out.
        num_words: distinct words of both sides.
        num_repeated: distinct runs of letters that occur at least twice, on both sides together.
        num_characters: distinct characters of both sides.
    """

    num_pairs: int
    num_empty: int
    kind: str
    num_units: int
    longest: int
    num_words: int
    num_repeated: int
    num_characters: int


def survey(pairs: Pairs) -> Survey:
    """Count what decides the sizes of a model."""
    filled = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    words: Counter[str] = Counter()
    letters: Counter[str] = Counter()
    for source, target in filled:
        words.update(source.split())
        words.update(target.split())
        letters.update(_LETTERS.findall(f"{source} {target}"))
    kind = _kind(filled, words)
    units = [[len(side) if kind == "character" else len(side.split()) for side in pair] for pair in filled]
    lengths = sorted(max(pair) for pair in units)
    return Survey(
        num_pairs=len(filled),
        num_empty=len(pairs) - len(filled),
        kind=kind,
        num_units=sum(map(sum, units)),
        longest=lengths[min(len(lengths) - 1, len(lengths) * 999 // 1000)] if lengths else 0,
        num_words=len(words),
        num_repeated=sum(1 for count in letters.values() if count > 1),
        num_characters=len(set("".join(words))),
    )


def _kind(pairs: Pairs, words: Counter[str]) -> str:
    """Tell segmented text by its "@@" marks, and text without words by lines without spaces."""
    if not pairs:
        return "bpe"
    if sum(count for word, count in words.items() if word.endswith("@@")) > 0.01 * words.total():
        return "split"
    single = sum(1 for source, target in pairs if len(source.split()) == len(target.split()) == 1)
    return "character" if single > 0.9 * len(pairs) else "bpe"


@dataclass(frozen=True)
class Sizes:
    """The values of a run file that follow from a survey."""

    vocab_size: int | None
    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float
    max_length: int
    epochs: int
    validate_every: int
    warmup: int
    patience: int


def fitting_sizes(data: Survey) -> Sizes:
    """Return sizes that fit the amount of text: less text, a smaller model, more dropout and more epochs."""
    rows = [
        (3_000, 1_000, 2, 64, 4, 0.3, 100),
        (50_000, 8_000, 4, 128, 4, 0.3, 40),
        (500_000, 16_000, 4, 256, 8, 0.2, 20),
    ]
    largest = (0, 32_000, 6, 512, 8, 0.1, 10)
    row = next((row for row in rows if data.num_pairs <= row[0]), largest)
    _, vocab_size, layers, width, heads, dropout, epochs = row
    is_trained = data.kind == "bpe"
    num_tokens = data.num_units * (TOKENS_PER_WORD if is_trained else 1.0)
    steps_per_epoch = max(1, round(num_tokens / BATCH_TOKENS))
    longest = data.longest * (2 if is_trained else 1) + 2
    return Sizes(
        vocab_size=_vocab_size(data, vocab_size) if is_trained else None,
        layers=layers,
        width=width,
        heads=heads,
        feedforward=4 * width,
        dropout=dropout,
        max_length=min(512, max(32, -(-longest // 8) * 8)),
        epochs=epochs,
        validate_every=min(2_000, max(50, steps_per_epoch)),
        warmup=min(4_000, max(10, epochs * steps_per_epoch // 8)),
        patience=10,
    )


def _vocab_size(data: Survey, wanted: int) -> int:
    """Return a vocabulary that the text supports: pieces are joined where they occur twice; each character has a row.

    A fifth of the repeated words is left out, because some of them differ only in what stands before them.
    """
    supported = data.num_characters + data.num_repeated * 4 // 5
    return max(data.num_characters + 8, min(max(wanted, data.num_characters + 1_000), supported))
