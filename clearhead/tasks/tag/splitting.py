"""Splitting of raw text into words, and of long sentences into chunks, for taggers."""

from __future__ import annotations

import itertools
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clearhead.text.tokenizer import Tokenizer

NO_WORD = -1
_MAX_RUNS = 200


@dataclass(frozen=True)
class WordSplitter:
    """Splitter of text at white space and punctuation, with exceptions learned from the training data.

    Args:
        inner: the punctuation that stays inside a word, such as "_" in code and "'" in "n't".
        runs: the words of several punctuation characters, such as "==" and "...", longest first.
    """

    inner: str = ""
    runs: tuple[str, ...] = ()

    @classmethod
    def learn(cls, words: Iterable[str]) -> WordSplitter:
        """Return a splitter that reproduces the words of a training text as well as possible.

        Args:
            words: the words of the training text; white space inside them is ignored.
        """
        counts = Counter(unspaced for word in words for unspaced in word.split())
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
        frequent_runs = sorted(runs, key=lambda run: (-runs[run], run))[:_MAX_RUNS]
        return cls(
            inner="".join(sorted(sign for sign in inside if inside[sign] > alone[sign])),
            runs=tuple(sorted(frequent_runs, key=lambda run: (-len(run), run))),
        )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and the end of each word, as character offsets.

        Args:
            text: any text; its words cover all characters except white space.
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
    """Return whether a character is punctuation: no letter, digit, white space or combining accent."""
    return not (letter.isalnum() or letter.isspace() or unicodedata.category(letter).startswith("M"))


@dataclass(frozen=True)
class WordChunk:
    """Chunk of a sentence that the model reads at once.

    Args:
        ids: the ids of the chunk, without special ids.
        words: the word of each id, as its index in the sentence, if the id is the first token of a word; else NO_WORD.
    """

    ids: list[int]
    words: list[int]


def chunk_words(words: Sequence[str], tokenizer: Tokenizer, *, room: int) -> tuple[list[WordChunk], int]:
    """Cut a sentence between words into chunks of similar lengths, at most `room` ids each.

    Args:
        words: the words of the sentence, at least one; they are encoded together, with a space between them.
        tokenizer: the tokenizer of the model.
        room: the maximum number of ids in a chunk; a longer word is truncated.

    Returns:
        The chunks, and the number of truncated words. A word without a token is in no chunk.
    """
    ids, owners = _first_tokens(words, tokenizer)
    starts = [position for position, owner in enumerate(owners) if owner != NO_WORD]
    # Tokens before the first word are counted to it.
    borders = [0, *starts[1:], len(ids)] if starts else [0]
    lengths, num_shortened = [], 0
    for start, end in itertools.pairwise(borders):
        lengths.append(min(room, end - start))
        num_shortened += end - start > room
    chunks = []
    for group in _even_groups(lengths, room):
        tokens = [index for word in group for index in range(borders[word], borders[word] + lengths[word])]
        chunks.append(WordChunk([ids[index] for index in tokens], [owners[index] for index in tokens]))
    return chunks, num_shortened


@dataclass
class Chunks:
    """Chunks of several sentences, with the words that they cover.

    Args:
        ids: the ids of each chunk, without special ids.
        words: the word of each id in each chunk, as in `WordChunk`; words are counted over all sentences.
        num_cut: the number of sentences in more than one chunk.
        num_shortened: the number of truncated words.
    """

    ids: list[list[int]] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)
    num_cut: int = 0
    num_shortened: int = 0


def chunk_sentences(sentences: Iterable[Sequence[str]], tokenizer: Tokenizer, *, room: int) -> Chunks:
    """Cut sentences between words into chunks of at most `room` ids, see `chunk_words`; sentences may be empty."""
    chunks, first_word = Chunks(), 0
    for sentence in sentences:
        of_sentence, num_shortened = chunk_words(sentence, tokenizer, room=room) if sentence else ([], 0)
        for chunk in of_sentence:
            chunks.ids.append(chunk.ids)
            chunks.words.append([word if word == NO_WORD else word + first_word for word in chunk.words])
        chunks.num_cut += len(of_sentence) > 1
        chunks.num_shortened += num_shortened
        first_word += len(sentence)
    return chunks


def _first_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a sentence, and for each id the index of the word that begins there, or NO_WORD."""
    ends = list(itertools.accumulate((len(word) + 1 for word in words), initial=-1))[1:]
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = [NO_WORD] * len(ids)
    next_word = 0
    for position, (start, end) in enumerate(spans):
        # A token may span several words; it counts for the first of them that has no token yet.
        word = max(next_word, bisect_right(ends, start))
        if word < len(words) and start < end and ends[word] - len(words[word]) < end:
            owners[position] = word
            next_word = word + 1
    return ids, owners


def _even_groups(lengths: Sequence[int], room: int) -> list[range]:
    """Split items into the fewest runs of neighbours with a total length of at most `room`, as even as possible."""
    groups = _groups(lengths, room)
    if len(groups) < 2:
        return groups
    limits = range(max(max(lengths), -(-sum(lengths) // len(groups))), room + 1)
    # A larger limit never takes more groups.
    least = bisect_left(limits, -len(groups), key=lambda limit: -len(_groups(lengths, limit)))
    return _groups(lengths, limits[least])


def _groups(lengths: Sequence[int], limit: int) -> list[range]:
    groups, start, total = [], 0, 0
    for index, length in enumerate(lengths):
        if total + length > limit:
            groups.append(range(start, index))
            start, total = index, 0
        total += length
    return [*groups, range(start, len(lengths))] if lengths else []
