"""Tokenizers trained on the data of a run: trained once, then loaded from the cache."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from clearhead.base.errors import within
from clearhead.data.cache import load_or_make
from clearhead.data.sources.pairs import read_pairs
from clearhead.data.sources.tables import WHOLE, Share, TableSource
from clearhead.data.sources.texts import TextChunk, TextSource, measure, read_chunks
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

_EXCERPT_CHARACTERS = 1 << 14


def load_or_train_tokenizers(
    source: TableSource, share: Share = WHOLE, *, kind: str, vocab_size: int, joint: bool
) -> TokenizerPair:
    """Train the tokenizers of both sides of a source of pairs, or load the cached ones of the same content.

    Args:
        source: the source of the training pairs.
        share: the share of the pairs to read, as in `read_table`.
        kind: the kind of tokenizer, as in `train_tokenizer`.
        vocab_size: the size of each vocabulary, special tokens included.
        joint: True if both sides share one tokenizer.

    Raises:
        InputError: the source cannot be read, or has too little text for the vocabulary.
        RunFailure: the cache cannot be written.
    """

    def train() -> TokenizerPair:
        data = read_pairs(source, share)
        if joint:
            tokenizer = train_tokenizer(kind, [*data["source"], *data["target"]], vocab_size=vocab_size)
            return TokenizerPair(tokenizer, tokenizer, joint=True)
        trained = []
        for side in ("source", "target"):
            with within(f"{side} side"):
                trained.append(train_tokenizer(kind, data[side], vocab_size=vocab_size))
        return TokenizerPair(trained[0], trained[1], joint=False)

    inputs = [source.identity(), share, kind, vocab_size, joint, importlib.metadata.version("tokenizers")]
    return load_or_make("tokenizers", inputs, TokenizerPair.load, lambda folder: train().save(folder))


def load_or_train_text_tokenizer(
    source: TextSource, *, kind: str, vocab_size: int, share: Share = WHOLE, mask: bool = False, sentinels: int = 0
) -> Tokenizer:
    """Train a tokenizer on a running text, or load the cached one of the same content.

    Args:
        source: the source of the text, which may be larger than memory.
        kind: the kind of tokenizer, as in `train_tokenizer`.
        vocab_size: the size of the vocabulary, special tokens included.
        share: the start and the end of the share to train on, as in `read_chunks`.
        mask: True if the tokenizer has a mask token.
        sentinels: the number of sentinel tokens.

    Raises:
        InputError: the source cannot be read, or has too little text for the vocabulary.
        RunFailure: the cache cannot be written.
    """
    identity = [*source.identity(), list(share)]
    size = cache(lambda: measure(source))

    def read() -> Iterator[str]:
        return excerpts(read_chunks(source, share, size()))

    return load_or_train_tokenizer(
        LazyTexts(read), identity, kind=kind, vocab_size=vocab_size, mask=mask, sentinels=sentinels
    )


def load_or_train_tokenizer(
    texts: Iterable[str],
    identity: Sequence[object],
    *,
    kind: str,
    vocab_size: int,
    mask: bool = False,
    sentinels: int = 0,
) -> Tokenizer:
    """Train a tokenizer on any texts, or load the cached one of the same content.

    Args:
        texts: the texts; an iterable that can be read several times need not fit in memory.
        identity: JSON values that identify the texts.
        kind: the kind of tokenizer, as in `train_tokenizer`.
        vocab_size: the size of the vocabulary, special tokens included.
        mask: True if the tokenizer has a mask token.
        sentinels: the number of sentinel tokens.

    Raises:
        InputError: the texts cannot be read, or are too little text for the vocabulary.
        RunFailure: the cache cannot be written.
    """
    library = importlib.metadata.version("tokenizers")
    return load_or_make(
        "tokenizers",
        ["one", list(identity), kind, vocab_size, mask, sentinels, library],
        Tokenizer.load,
        lambda folder: train_tokenizer(kind, texts, vocab_size=vocab_size, mask=mask, sentinels=sentinels).save(
            folder / "tokenizer.json"
        ),
    )


@dataclass(frozen=True)
class LazyTexts(Iterable[str]):
    """Texts that are read on every iteration, and not before.

    Args:
        read: a function that reads the texts.
    """

    read: Callable[[], Iterable[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())


def excerpts(chunks: Iterable[TextChunk]) -> Iterator[str]:
    """Cut documents into excerpts of some thousand characters, for training a tokenizer.

    A long text in one piece would need a hundred times its memory, and only one core would be used.
    """
    rest = ""
    for chunk in chunks:
        if chunk.starts and rest:
            yield rest
            rest = ""
        text, start = rest + chunk.text, 0
        while stop := text.find("\n", start + _EXCERPT_CHARACTERS) + 1:
            yield text[start:stop]
            start = stop
        rest = text[start:]
    if rest:
        yield rest
