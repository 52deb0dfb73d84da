"""Tokenized words with tags: stored once and memory-mapped from then on."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Integer
from numpy import ndarray

from clearhead.data.sources.tables import WHOLE, Share
from clearhead.data.sources.tagged import TaggedSource, TaggedTexts, read_tagged
from clearhead.data.stores.arrays import Arrays, ArrayStore, Ragged, Rows, id_dtype, pack, write_arrays
from clearhead.data.stores.cache import load_or_make
from clearhead.data.stores.tag_set import Scheme, TagSet, find_scheme, learn_tags, to_iob2
from clearhead.data.stores.word_chunks import NO_WORD, WordChunk, chunk_words
from clearhead.data.stores.word_splitter import WordSplitter
from clearhead.errors import InputError
from clearhead.text.tokenizer import Tokenizer

_MOST_SHOWN = 12


@dataclass(frozen=True)
class TagReport:
    """What became of the sentences of a source.

    Args:
        sentences: all of them.
        words: all of them.
        cut: sentences in several chunks, because they are too long for one.
        shortened: words that are truncated, because they alone are too long.
        unread: words that have no token.
        max_length: the longest chunk that was allowed, special ids included.
        tags: how often each tag occurs.
    """

    sentences: int
    words: int
    cut: int
    shortened: int
    unread: int
    max_length: int
    tags: str

    def __str__(self) -> str:
        parts = [f"{self.sentences:,} sentences of {self.words:,} words read, all kept"]
        if self.cut:
            parts.append(f"{self.cut:,} cut into chunks of at most {self.max_length:,} tokens")
        if self.shortened:
            parts.append(f"{self.shortened:,} words longer than a chunk")
        if self.unread:
            parts.append(f"{self.unread:,} words without a token")
        return f"{', '.join(parts)}; {self.tags}"


class TagStore(ArrayStore):
    """Tokenized sentences with a tag for each word.

    Args:
        folder: the store's folder.
        tokenizer: what the sentences were tokenized with.

    Attributes:
        report: what became of the sentences.
        tags: the tags that a model can give.
        splitter: splits raw text into words like those of the data.
        chunks: the ids of each chunk of a sentence, without special ids.
        words: for each of these ids the word whose first token it is, numbered through all sentences, or NO_WORD.
        word_tags: the tag of each word.
    """

    contents: ClassVar[str] = "tagged words"

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(folder)
        self.report: TagReport = TagReport(**self.record["report"])
        self.tags = TagSet(tuple(self.record["names"]))
        self.splitter = WordSplitter(self.record["splitter"]["inner"], tuple(self.record["splitter"]["runs"]))
        self.chunks, self.words = self.ragged("chunk"), self.arrays["words"]
        self.texts = (self.chunks,)
        self.word_tags, self._sentences = self.ragged("tag").ids, self.ragged("tag").offsets
        self._num_special = tokenizer.special_tokens.num_added()

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def lengths(self) -> Rows:
        """The length of each chunk, special ids included."""
        return self.chunks.lengths + self._num_special

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The lengths of what the model reads of each chunk."""
        return (self.lengths,)

    def names_of(self, word_tags: Integer[ndarray, " words"]) -> list[list[str]]:
        """Return tags of all words as names, sentence by sentence.

        Args:
            word_tags: a tag of each word, such as the attribute of this name.
        """
        sentences = itertools.pairwise(self._sentences)
        return [[self.tags.names[tag] for tag in word_tags[start:end].tolist()] for start, end in sentences]


def prepare_tagged(
    source: TaggedSource, tokenizer: Tokenizer, *, max_length: int, tags: TagSet | None = None, share: Share = WHOLE
) -> TagStore:
    """Tokenize tagged sentences, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest chunk in tokens, special ids included; longer sentences are cut between words.
        tags: the tags of the training data; None: this is the training data.
        share: which part of the source, from one share of its sentences to another.

    Raises:
        InputError: the source or a tag is unusable, or no word has a token.
        RunFailure: the cache cannot be written.
    """
    shortest = tokenizer.special_tokens.num_added() + 1
    if max_length < shortest:
        raise InputError(f"max_length is {max_length}; expected at least {shortest}, the special ids and one token")

    def make(folder: Path) -> None:
        data, scheme = _read(source, share)
        _write(folder, data, tags or learn_tags(data, scheme), tokenizer, max_length)

    inputs = [source.identity(), tokenizer.fingerprint, max_length, None if tags is None else tags.names, share]
    return load_or_make("tagged", inputs, lambda folder: TagStore(folder, tokenizer), make)


def _write(folder: Path, data: TaggedTexts, tags: TagSet, tokenizer: Tokenizer, max_length: int) -> None:
    lengths = np.array([len(words) for words in data.words])
    word_tags = Ragged.of(np.array(list(itertools.chain.from_iterable(tags.encode(data))), dtype=np.int32), lengths)
    room = max_length - tokenizer.special_tokens.num_added()
    chunks: list[WordChunk] = []
    words: list[int] = []
    num_cut = num_shortened = 0
    for sentence, first_word in zip(data.words, word_tags.offsets.tolist(), strict=False):
        found, shortened = chunk_words(sentence, tokenizer, room=room)
        chunks += found
        words += [word if word == NO_WORD else word + first_word for chunk in found for word in chunk.words]
        num_cut += len(found) > 1
        num_shortened += shortened
    num_read = sum(word != NO_WORD for word in words)
    if not num_read:
        raise InputError(f"{data.where(0, 0)}: the tokenizer has no token for any of the words from here on")
    report = TagReport(
        sentences=len(data),
        words=int(lengths.sum()),
        cut=num_cut,
        shortened=num_shortened,
        unread=int(lengths.sum()) - num_read,
        max_length=max_length,
        tags=_describe(data),
    )
    arrays: Arrays = {
        "chunk": pack([chunk.ids for chunk in chunks], id_dtype(tokenizer)),
        "words": np.array(words, dtype=np.int64),
        "tag": word_tags,
    }
    splitter = WordSplitter.learn(itertools.chain.from_iterable(data.words))
    write_arrays(folder, arrays, {"report": asdict(report), "names": tags.names, "splitter": asdict(splitter)})


def _read(source: TaggedSource, share: Share) -> tuple[TaggedTexts, Scheme]:
    """Return the sentences, with borders of entities as in IOB2 or BIOES, and the scheme that they had."""
    data = read_tagged(source, share)
    scheme = find_scheme(data)
    if scheme == "IOB1":
        data = TaggedTexts(data.words, [to_iob2(sentence) for sentence in data.tags], data.where)
    return data, scheme


def _describe(data: TaggedTexts) -> str:
    counts = Counter(tag for tags in data.tags for tag in tags)
    shown_tags = [f"{tag} {count:,}" for tag, count in counts.most_common(_MOST_SHOWN)]
    more = f" and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
    return f"{len(counts)} tags: {', '.join(shown_tags)}{more}"
