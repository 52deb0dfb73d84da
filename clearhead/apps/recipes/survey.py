"""Survey text data: its amount, the lengths of texts, and the vocabulary size that fits."""

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

# Characters of a long text in which words are counted: more would not change the chosen sizes.
MOST_COUNTED = 20_000_000
# The most distinct characters that form a character vocabulary.
FEW_CHARACTERS = 256
NUM_BYTES = 256
# The number of longest lines kept, among which is the one with the most tokens.
NUM_LONGEST = 50
_LETTERS = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]]*\s*$")


@dataclass(frozen=True)
class Survey:
    """Counts of single texts or of pairs.

    Attributes:
        num_pairs: the number of texts, or of pairs with text on both sides.
        num_empty: the number of empty texts, or of pairs with an empty side.
        kind: the kind of tokenizer that fits: bpe, split (already segmented) or character.
        num_units: the number of words on both sides, or of characters if the kind is character.
        longest: the length in words (or characters) of the longest side, without the longest 1 in 1,000 pairs.
        num_words: the number of distinct words on both sides.
        word_counts: the number of occurrences of each run of letters on both sides.
        num_characters: the number of distinct characters on both sides.
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
        """The unit of lengths: words or characters."""
        return "characters" if self.kind == "character" else "words"


def survey(pairs: Texts) -> Survey:
    """Count the words and lengths of texts that determine the sizes of a model.

    Args:
        pairs: pairs of texts, or single texts as tuples of length 1.
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
    """Return the kind of tokenizer: split for "@@" marks, character for lines without spaces, otherwise bpe."""
    if not pairs:
        return "bpe"
    if sum(count for word, count in words.items() if word.endswith("@@")) > 0.01 * words.total():
        return "split"
    single = sum(1 for pair in pairs if all(len(side.split()) == 1 for side in pair))
    return "character" if single > 0.9 * len(pairs) else "bpe"


# --- running text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSurvey:
    """Counts of running text; words are counted in its first `MOST_COUNTED` characters.

    Attributes:
        num_characters: the number of characters.
        num_distinct: the number of distinct characters.
        num_words: the number of distinct counted words.
        word_counts: the number of occurrences of each run of letters.
        longest_lines: the longest of the counted lines.
        document: the unit of a document: line if lines are sentences, otherwise file.
    """

    num_characters: int
    num_distinct: int
    num_words: int
    word_counts: Sequence[int]
    longest_lines: Sequence[str]
    document: DocumentKind


def survey_text(chunks: Iterable[str]) -> TextSurvey:
    """Count the words and lines of running text that determine the sizes of a model.

    Args:
        chunks: the text in chunks.
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


def share_to_hold_out(data: TextSurvey) -> float:
    """Return the share of running text to hold out: a tenth, or about a million characters of a long text."""
    return 0.1 if data.num_characters <= 10_000_000 else round(max(0.001, 1e6 / data.num_characters), 3)


def tokenizer_kind(recipe: Recipe, data: Survey | TextSurvey) -> str:
    """Return the kind of tokenizer: that of the recipe, unless the text is segmented or has too many characters."""
    if isinstance(data, Survey):
        return recipe.tokenizer if data.kind == "bpe" else data.kind
    is_varied = data.num_distinct > FEW_CHARACTERS
    return "byte-bpe" if recipe.tokenizer == "character" and is_varied else recipe.tokenizer


def vocab_size(recipe: Recipe, data: Survey | TextSurvey, *, num_special: int) -> int | None:
    """Return a vocabulary size for which every entry is frequent, or None if the kind of tokenizer has no size.

    The size exceeds the alphabet: the distinct characters (or all bytes) and special tokens. Its maximum is that of
    the recipe, or 1,000 entries more than the alphabet if that is larger.

    Args:
        recipe: the recipe, which holds the maximum vocabulary size.
        data: the survey of the text.
        num_special: the number of special tokens for masked text.
    """
    kind = tokenizer_kind(recipe, data)
    if kind in ("character", "split"):
        return None
    distinct = data.num_characters if isinstance(data, Survey) else data.num_distinct
    alphabet = (NUM_BYTES if kind == "byte-bpe" else distinct) + num_special
    # Frequent words that differ only in the preceding character share one entry.
    frequent = sum(1 for count in data.word_counts if count >= recipe.least_count) * 4 // 5
    return max(alphabet + 8, min(max(recipe.vocab_size, alphabet + 1_000), alphabet + frequent))
