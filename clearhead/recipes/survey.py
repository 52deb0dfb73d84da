"""A survey of text: how much there is, how long it is, and which model sizes fit it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Texts = Sequence[tuple[str, ...]]
DocumentKind = Literal["file", "line"]

BATCH_TOKENS = 4096
# Subword tokens in a word, roughly, for a vocabulary of a few thousand: what lengths and epochs are estimated with.
TOKENS_PER_WORD = 1.4
CHARACTERS_PER_TOKEN = 3.5
# Words are counted in the first part of a long text: more of it would change no size.
MOST_COUNTED = 20_000_000
# Up to this many, characters are a vocabulary by themselves; beyond this much text, words are worth learning.
FEW_CHARACTERS, LITTLE_TEXT = 256, 5_000_000
NUM_BYTES = 256
_LETTERS = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]]*\s*$")


@dataclass(frozen=True)
class Survey:
    """What was counted in single texts or in pairs.

    Attributes:
        num_pairs: texts, or pairs in which both sides have text.
        num_empty: texts that are empty, or pairs with an empty side.
        kind: the kind of tokenizer that fits: bpe, split (already segmented) or character.
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

    @property
    def unit(self) -> str:
        """What lengths are counted in."""
        return "characters" if self.kind == "character" else "words"


def survey(pairs: Texts) -> Survey:
    """Count what decides the sizes of a model.

    Args:
        pairs: pairs of texts, or texts as tuples of one.
    """
    filled = [pair for pair in pairs if all(side.strip() for side in pair)]
    words: Counter[str] = Counter()
    letters: Counter[str] = Counter()
    for pair in filled:
        for side in pair:
            words.update(side.split())
        letters.update(_LETTERS.findall(" ".join(pair)))
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


def _kind(pairs: Texts, words: Counter[str]) -> str:
    """Recognise segmented text by its "@@" marks, and text without words by lines without spaces."""
    if not pairs:
        return "bpe"
    if sum(count for word, count in words.items() if word.endswith("@@")) > 0.01 * words.total():
        return "split"
    single = sum(1 for pair in pairs if all(len(side.split()) == 1 for side in pair))
    return "character" if single > 0.9 * len(pairs) else "bpe"


@dataclass(frozen=True)
class Sizes:
    """The values of a run file that follow from a survey."""

    tokenizer: str
    vocab_size: int | None
    layers: int
    width: int
    heads: int
    dropout: float
    max_length: int
    epochs: int
    validate_every: int
    warmup: int


def fitting_sizes(data: Survey, *, epochs: Sequence[int] = (100, 40, 20, 10)) -> Sizes:
    """Return sizes that fit the amount of text: less text, a smaller model, more dropout and more epochs.

    Args:
        data: what was counted.
        epochs: for up to 3,000 texts, up to 50,000, up to 500,000, and more.
    """
    # Up to how many texts; vocabulary; layers, width, heads and dropout.
    rows = [
        (3_000, 1_000, (2, 64, 4, 0.3)),
        (50_000, 8_000, (4, 128, 4, 0.3)),
        (500_000, 16_000, (4, 256, 8, 0.2)),
        (None, 32_000, (6, 512, 8, 0.1)),
    ]
    place = next(index for index, row in enumerate(rows) if row[0] is None or data.num_pairs <= row[0])
    _, vocab_size, model = rows[place]
    is_trained = data.kind == "bpe"
    num_tokens = data.num_units * (TOKENS_PER_WORD if is_trained else 1.0)
    steps_per_epoch = max(1, round(num_tokens / BATCH_TOKENS))
    longest = data.longest * (2 if is_trained else 1) + 2
    return Sizes(
        data.kind,
        _vocab_size(data.num_characters, data.num_repeated, vocab_size) if is_trained else None,
        *model,
        max_length=_block(longest),
        epochs=epochs[place],
        validate_every=min(2_000, max(50, steps_per_epoch)),
        warmup=min(4_000, max(10, epochs[place] * steps_per_epoch // 8)),
    )


def _block(longest: int) -> int:
    """Return a multiple of 8 that holds the longest sequence, from 32 to 512."""
    return min(512, max(32, -(-longest // 8) * 8))


def _vocab_size(num_characters: int, num_repeated: int, wanted: int) -> int:
    """Return a vocabulary size that the text supports: tokens are merged if they occur twice; each character has a row.

    Special tokens that have a row, such as sentinels, count as characters. A fifth of the repeated words is left out,
    because some of them differ only in the character before them.
    """
    supported = num_characters + num_repeated * 4 // 5
    return max(num_characters + 8, min(max(wanted, num_characters + 1_000), supported))


# --- running text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSurvey:
    """What was counted in running text.

    Attributes:
        num_characters: characters in all.
        num_distinct: distinct characters.
        num_words: distinct words in the part that was counted.
        num_repeated: distinct runs of letters that occur in it at least twice.
        longest: words in the longest line of this part, the longest 1 in 1,000 lines left out.
        document: what one document is: a line where lines are sentences, else a file.
    """

    num_characters: int
    num_distinct: int
    num_words: int
    num_repeated: int
    longest: int
    document: DocumentKind


def survey_text(chunks: Iterable[str]) -> TextSurvey:
    """Count what decides the sizes of a model of running text.

    Args:
        chunks: the text, in parts.
    """
    num_characters = 0
    distinct: set[str] = set()
    words: Counter[str] = Counter()
    letters: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for text in chunks:
        distinct.update(text)
        if num_characters < MOST_COUNTED:
            words.update(text.split())
            letters.update(_LETTERS.findall(text))
            for line in text.split("\n"):
                lines[_kind_of_line(line)] += 1
                lengths[len(line.split())] += 1
        num_characters += len(text)
    written = lines.total() - lines["blank"]
    are_sentences = lines["sentence"] > 0.6 * written and max(lines["blank"], lines["indented"]) < 0.05 * written
    return TextSurvey(
        num_characters=num_characters,
        num_distinct=len(distinct),
        num_words=len(words),
        num_repeated=sum(1 for count in letters.values() if count > 1),
        longest=_quantile(lengths, 0.999),
        document="line" if are_sentences and written >= 20 else "file",
    )


def _kind_of_line(line: str) -> str:
    if not line.strip():
        return "blank"
    if line[0].isspace():
        return "indented"
    return "sentence" if _SENTENCE_END.search(line) else "other"


def _quantile(counts: Counter[int], share: float) -> int:
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * counts.total():
            return value
    return 0


def held_out_share(data: TextSurvey) -> float:
    """Return the share of running text to hold out: a tenth, but no more than can be measured quickly."""
    return 0.1 if data.num_characters <= 10_000_000 else round(max(0.001, 1e6 / data.num_characters), 3)


def fitting_text_sizes(
    data: TextSurvey, *, continues: bool, num_special: Callable[[int], int] = lambda length: 0
) -> Sizes:
    """Return sizes that fit the amount of running text.

    Args:
        data: what was counted.
        continues: whether the model predicts next tokens, so that every character must be decoded as it was.
        num_special: entries of the vocabulary for masked text, given the length of a block.
    """
    # Up to how many characters; vocabulary; block; epochs; layers, width, heads and dropout.
    rows = [
        (200_000, 1_000, 64, 30, (2, 64, 4, 0.2)),
        (LITTLE_TEXT, 4_000, 128, 10, (4, 128, 4, 0.1)),
        (100_000_000, 8_000, 256, 4, (6, 256, 8, 0.1)),
        (None, 32_000, 512, 1, (8, 512, 8, 0.0)),
    ]
    row = next(row for row in rows if row[0] is None or data.num_characters <= row[0])
    _, wanted, block, epochs, model = row
    tokenizer = "byte-bpe" if continues else "bpe"
    if continues and data.num_distinct <= FEW_CHARACTERS and data.num_characters <= LITTLE_TEXT:
        tokenizer = "character"
    if data.document == "line":
        longest = data.longest * (6 if tokenizer == "character" else 2) + 2
        block = _block(longest)
    alphabet = (NUM_BYTES if tokenizer == "byte-bpe" else data.num_distinct) + num_special(block)
    num_tokens = data.num_characters / (1 if tokenizer == "character" else CHARACTERS_PER_TOKEN)
    steps_per_epoch = max(1, round(num_tokens / BATCH_TOKENS))
    return Sizes(
        tokenizer,
        None if tokenizer == "character" else _vocab_size(alphabet, data.num_repeated, wanted),
        *model,
        max_length=block,
        epochs=epochs,
        validate_every=min(2_000, max(50, steps_per_epoch)),
        warmup=min(2_000, max(10, epochs * steps_per_epoch // 10)),
    )
