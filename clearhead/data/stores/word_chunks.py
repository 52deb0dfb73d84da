"""Sentences of words as ids: the first token of each word is known, and long sentences are cut between words."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.text.tokenizer import Tokenizer

NO_WORD = -1


@dataclass(frozen=True)
class WordChunk:
    """A part of a sentence that a model reads at once.

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


def _first_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a sentence, and for each the word whose first token it is."""
    ends = list(itertools.accumulate((len(word) + 1 for word in words), initial=-1))[1:]
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = [NO_WORD] * len(ids)
    next_word = 0
    for place, (start, end) in enumerate(spans):
        # A token may span several words, but counts for one of them: the first that has none yet.
        word = max(next_word, bisect_right(ends, start))
        if word < len(words) and start < end and ends[word] - len(words[word]) < end:
            owners[place] = word
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
