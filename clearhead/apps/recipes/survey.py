"""A survey of text: how much there is, how long it is, and which vocabulary fits it."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead.spec.tasks.base import Recipe

Texts = Sequence[tuple[str, ...]]
DocumentKind = Literal["file", "line"]

# Words are counted in the first part of a long text: more of it would change no size.
MOST_COUNTED = 20_000_000
# Up to so many different characters are a vocabulary by themselves.
FEW_CHARACTERS = 256
NUM_BYTES = 256
# Among so many of the longest lines is the one with the most tokens.
NUM_LONGEST = 50
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
        word_counts: how often each run of letters occurs, on both sides together.
        num_characters: distinct characters of both sides.
    """

    num_pairs: int
    num_empty: int
    kind: str
    num_units: int
    longest: int
    num_words: int
    word_counts: Sequence[int]
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
        words.update(" ".join(pair).split())
        letters.update(_LETTERS.findall(" ".join(pair)))
    kind = _kind(filled, words)
    num_units, longest_sides = 0, []
    for pair in filled:
        lengths = [len(side if kind == "character" else side.split()) for side in pair]
        num_units += sum(lengths)
        longest_sides.append(max(lengths))
    longest_sides.sort()
    return Survey(
        num_pairs=len(filled),
        num_empty=len(pairs) - len(filled),
        kind=kind,
        num_units=num_units,
        longest=longest_sides[len(filled) * 999 // 1000] if filled else 0,
        num_words=len(words),
        word_counts=tuple(letters.values()),
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


# --- running text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSurvey:
    """What was counted in running text.

    Attributes:
        num_characters: characters in all.
        num_distinct: distinct characters.
        num_words: distinct words in the part that was counted.
        word_counts: how often each run of letters occurs in it.
        longest_lines: the longest lines of this part.
        document: what one document is: a line where lines are sentences, else a file.
    """

    num_characters: int
    num_distinct: int
    num_words: int
    word_counts: Sequence[int]
    longest_lines: Sequence[str]
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
    longest: list[str] = []
    for text in chunks:
        distinct.update(text)
        if num_characters < MOST_COUNTED:
            words.update(text.split())
            letters.update(_LETTERS.findall(text))
            parts = text.split("\n")
            lines.update(map(_kind_of_line, parts))
            longest = heapq.nlargest(NUM_LONGEST, {*longest, *heapq.nlargest(NUM_LONGEST, parts, key=len)}, key=len)
        num_characters += len(text)
    written = lines.total() - lines["blank"]
    are_sentences = lines["sentence"] > 0.6 * written and max(lines["blank"], lines["indented"]) < 0.05 * written
    return TextSurvey(
        num_characters=num_characters,
        num_distinct=len(distinct),
        num_words=len(words),
        word_counts=tuple(letters.values()),
        longest_lines=longest,
        document="line" if are_sentences and written >= 20 else "file",
    )


def _kind_of_line(line: str) -> str:
    if not line.strip():
        return "blank"
    if line[0].isspace():
        return "indented"
    return "sentence" if _SENTENCE_END.search(line) else "other"


def held_out_share(data: TextSurvey) -> float:
    """Return the share of running text to hold out: a tenth, but no more than can be measured quickly."""
    return 0.1 if data.num_characters <= 10_000_000 else round(max(0.001, 1e6 / data.num_characters), 3)


def tokenizer_kind(recipe: Recipe, data: Survey | TextSurvey) -> str:
    """Return the kind of tokenizer: the recipe's, if the text is neither segmented already nor too varied for it."""
    if isinstance(data, Survey):
        return recipe.tokenizer if data.kind == "bpe" else data.kind
    is_varied = data.num_distinct > FEW_CHARACTERS
    return "byte-bpe" if recipe.tokenizer == "character" and is_varied else recipe.tokenizer


def vocab_size(recipe: Recipe, data: Survey | TextSurvey, *, num_special: int) -> int | None:
    """Return the size of a vocabulary in which every entry is frequent, or None for a kind that takes what it finds.

    An alphabet has a row for each character, and up to a thousand entries more.

    Args:
        recipe: with the largest size.
        data: what was counted.
        num_special: rows for masked text.
    """
    kind = tokenizer_kind(recipe, data)
    if kind in ("character", "split"):
        return None
    distinct = data.num_characters if isinstance(data, Survey) else data.num_distinct
    alphabet = (NUM_BYTES if kind == "byte-bpe" else distinct) + num_special
    # Some frequent words differ only in the character before them, and are one entry.
    frequent = sum(1 for count in data.word_counts if count >= recipe.least_count) * 4 // 5
    return max(alphabet + 8, min(max(recipe.vocab_size, alphabet + 1_000), alphabet + frequent))
