"""Words of a tagger: raw text is split into them, and long sentences are cut between them."""

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


@dataclass(frozen=True)
class WordChunk:
    """A chunk of a sentence that a model reads at once.

    Args:
        ids: plain ids.
        words: for each id that is the first token of a word, the number of that word in the sentence; else NO_WORD.
    """

    ids: list[int]
    words: list[int]


def chunk_words(words: Sequence[str], tokenizer: Tokenizer, *, room: int) -> tuple[list[WordChunk], int]:
    """Cut a sentence between words into chunks of similar lengths that fit.

    Args:
        words: at least one; they are encoded together, with a space between them.
        tokenizer: turns the sentence into ids.
        room: the most ids of a chunk; a longer word is truncated.

    Returns:
        The chunks, and how many words were truncated. A word without a token is in no chunk.
    """
    ids, owners = _first_tokens(words, tokenizer)
    starts = [position for position, owner in enumerate(owners) if owner != NO_WORD]
    # Tokens in front of the first word belong to it.
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
    """The chunks of some sentences.

    Args:
        ids: plain ids of each chunk.
        words: of each chunk, as of `WordChunk`, but numbered through all sentences.
        num_cut: sentences in several chunks.
        num_shortened: words that are truncated.
    """

    ids: list[list[int]] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)
    num_cut: int = 0
    num_shortened: int = 0


def chunk_sentences(sentences: Iterable[Sequence[str]], tokenizer: Tokenizer, *, room: int) -> Chunks:
    """Cut sentences, which may have no words, as `chunk_words` does."""
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
    """Return the ids of a sentence, and for each the word whose first token it is."""
    ends = list(itertools.accumulate((len(word) + 1 for word in words), initial=-1))[1:]
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = [NO_WORD] * len(ids)
    next_word = 0
    for position, (start, end) in enumerate(spans):
        # A token may span several words, but counts for one of them: the first that has none yet.
        word = max(next_word, bisect_right(ends, start))
        if word < len(words) and start < end and ends[word] - len(words[word]) < end:
            owners[position] = word
            next_word = word + 1
    return ids, owners


def _even_groups(lengths: Sequence[int], room: int) -> list[range]:
    """Put neighbours into as few groups as possible, of lengths as even as possible."""
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
