"""Stores of tokenized sentences, cut into chunks, with a tag for each word."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from jaxtyping import Integer
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, id_dtype, pack
from clearhead.data.sources.tables import WHOLE, DataTable, Share, TableSource
from clearhead.data.stores.store import Arrays, Encoded, Store, StoreKind, format_counts, joint_lengths, prepare_store
from clearhead.tasks.tag.data import read_tagged
from clearhead.tasks.tag.splitting import NO_WORD, WordSplitter, chunk_sentences
from clearhead.tasks.tag.tag_set import TagSet, find_scheme, learn_tags, to_iob2
from clearhead.text.tokenizer import Tokenizer

_MAX_SHOWN = 12


def _report(store: Store) -> str:
    counts = store.facts["report"]
    words = {
        "cut": f"cut into chunks of at most {counts['max_length']:,} tokens",
        "shortened": "words longer than a chunk",
        "unread": "words without a token",
    }
    read = f"{counts['sentences']:,} sentences of {counts['words']:,} words read, all kept"
    return ", ".join([read, *format_counts(counts, words)]) + f"; {counts['tags']}"


TAGGED = StoreKind("tagged", "tagged words", ("chunk",), _report, joint_lengths)
"""Kind of store for tagged words; its texts are chunks of sentences.

- "words": for each id, the word whose first token it is, as an index over all sentences, or NO_WORD.
- "tag": the tags of the words of each sentence.
"""


def tags_of(store: Store) -> TagSet:
    """Return the tag set of a store."""
    return TagSet(tuple(store.facts["names"]))


def splitter_of(store: Store) -> WordSplitter:
    """Return the splitter of raw text into words that was learned from the data."""
    splitter = store.facts["splitter"]
    return WordSplitter(splitter["inner"], tuple(splitter["runs"]))


def names_of(store: Store, word_tags: Integer[ndarray, " words"]) -> list[list[str]]:
    """Return the names of the tags of all words, one list per sentence.

    Args:
        store: the store of the sentences.
        word_tags: the tag index of each word of the store.
    """
    names, sentences = tags_of(store).names, itertools.pairwise(store.ragged_rows("tag").offsets)
    return [[names[tag] for tag in word_tags[start:end].tolist()] for start, end in sentences]


def prepare_tagged(
    source: TableSource, tokenizer: Tokenizer, *, max_length: int, tags: TagSet | None = None, share: Share = WHOLE
) -> Store:
    """Tokenize tagged sentences, or open the cached store of the same content.

    Args:
        source: the source of the data.
        tokenizer: the tokenizer of the run.
        max_length: the longest chunk in tokens, special ids included; longer sentences are cut between words.
        tags: the tags of the training data; None means that this is the training data.
        share: the share of the sentences to read, see `read_table`.

    Raises:
        InputError: the source or a tag is unusable, or no word has a token.
        RunFailure: the cache cannot be written.
    """
    num_special = tokenizer.special_tokens.num_added()
    if max_length < num_special + 1:
        raise InputError(
            f"max_length is {max_length}; expected at least {num_special + 1}, for the special ids and one token"
        )

    def encode() -> Encoded:
        data = read_tagged(source, share)
        scheme = find_scheme(data)
        if scheme == "IOB1":
            # From here on the tags follow IOB2 or BIOES.
            data = replace(data, columns={**data.columns, "tags": [to_iob2(sentence) for sentence in data["tags"]]})
        return _encode(data, tags or learn_tags(data, scheme), tokenizer, max_length)

    inputs = [source.identity(), tokenizer.fingerprint, max_length, None if tags is None else tags.names, share]
    return prepare_store(TAGGED, inputs, encode, special=(num_special,))


def _encode(data: DataTable, tags: TagSet, tokenizer: Tokenizer, max_length: int) -> Encoded:
    sentences: Sequence[list[str]] = data["tokens"]
    num_words = np.array([len(words) for words in sentences])
    word_tags = Ragged.of(np.array(list(itertools.chain.from_iterable(tags.encode(data))), dtype=np.int32), num_words)
    room = max_length - tokenizer.special_tokens.num_added()
    chunks = chunk_sentences(sentences, tokenizer, room=room)
    words = np.array(list(itertools.chain.from_iterable(chunks.words)), dtype=np.int64)
    num_read = int((words != NO_WORD).sum())
    if not num_read:
        raise InputError(
            f"{data.location(0, 0)}: the tokenizer produces no token for any word from here on; check the tokenizer "
            "and the data"
        )
    report = {
        "sentences": len(data),
        "words": int(num_words.sum()),
        "cut": chunks.num_cut,
        "shortened": chunks.num_shortened,
        "unread": int(num_words.sum()) - num_read,
        "max_length": max_length,
        "tags": _counts(data["tags"]),
    }
    arrays: Arrays = {
        "chunk": pack(chunks.ids, id_dtype(tokenizer)),
        "words": words,
        "tag": word_tags,
    }
    splitter = WordSplitter.learn(itertools.chain.from_iterable(sentences))
    return arrays, {"report": report, "names": tags.names, "splitter": asdict(splitter)}


def _counts(tags: Sequence[Sequence[str]]) -> str:
    """Return a text with the counts of the most frequent tags."""
    counts = Counter(tag for sentence in tags for tag in sentence)
    shown_tags = [f"{tag} {count:,}" for tag, count in counts.most_common(_MAX_SHOWN)]
    more = f" and {len(counts) - _MAX_SHOWN} more" if len(counts) > _MAX_SHOWN else ""
    return f"{len(counts)} tags: {', '.join(shown_tags)}{more}"
