"""Tokenizers trained on the data of a run, once, and opened from the cache from then on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence

from clearhead.data.sources.pairs import PairSource, read_pairs
from clearhead.data.sources.texts import WHOLE, Share, TextSize, TextSource, measure, read_chunks
from clearhead.data.stores.arrays import atomic_folder, discard_folder
from clearhead.data.stores.cache import cache_folder
from clearhead.errors import InputError
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

_EXCERPT_CHARACTERS = 1 << 14


def cached_tokenizers(source: PairSource, *, kind: str, vocab_size: int, joint: bool) -> TokenizerPair:
    """Train the tokenizers of both sides on a source, or open what an earlier run trained on the same content.

    Args:
        source: the training pairs.
        kind: a kind of `train_tokenizer`.
        vocab_size: rows of each vocabulary.
        joint: one vocabulary for both sides.

    Raises:
        InputError: the source is unusable, or does not support the vocabulary.
        RunFailure: the cache cannot be written.
    """
    library = importlib.metadata.version("tokenizers")
    folder = cache_folder("tokenizers", source.identity(), kind, vocab_size, joint, library)
    if folder.is_dir():
        try:
            return TokenizerPair.load(folder)
        except InputError:
            discard_folder(folder)
    pairs = read_pairs(source)
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if joint:
        one = train_tokenizer(kind, sources + targets, vocab_size=vocab_size)
        trained = TokenizerPair(source=one, target=one, joint=True)
    else:
        trained = TokenizerPair(
            source=_train_side("source", kind, sources, vocab_size),
            target=_train_side("target", kind, targets, vocab_size),
            joint=False,
        )
    with atomic_folder(folder) as temporary:
        trained.save(temporary)
    return trained


def cached_text_tokenizer(
    source: TextSource, *, kind: str, vocab_size: int, share: Share = WHOLE, mask: bool = False, sentinels: int = 0
) -> Tokenizer:
    """Train a tokenizer on a text, or open what an earlier run trained on the same content.

    Args:
        source: where the text comes from; it may be larger than memory.
        kind: a kind of `train_tokenizer`.
        vocab_size: rows of the vocabulary, special tokens included.
        share: where the part to train on begins and ends, as for `read_documents`.
        mask: whether there is a token that stands for a hidden one.
        sentinels: how many tokens stand for hidden stretches of text.

    Raises:
        InputError: the source is unusable, or does not support the vocabulary.
        RunFailure: the cache cannot be written.
    """
    identity = [*source.identity(), list(share)]
    return cached_tokenizer(
        _Excerpt(source, share), identity, kind=kind, vocab_size=vocab_size, mask=mask, sentinels=sentinels
    )


def cached_tokenizer(
    texts: Iterable[str],
    identity: Sequence[object],
    *,
    kind: str,
    vocab_size: int,
    mask: bool = False,
    sentinels: int = 0,
) -> Tokenizer:
    """Train a tokenizer on any texts, or open what an earlier run trained on the same content.

    Args:
        texts: the texts; what can be gone through several times need not fit in memory.
        identity: JSON values that the texts depend on.
        kind: a kind of `train_tokenizer`.
        vocab_size: rows of the vocabulary, special tokens included.
        mask: whether there is a token that stands for a hidden one.
        sentinels: how many tokens stand for hidden stretches of text.

    Raises:
        InputError: the texts are unusable, or do not support the vocabulary.
        RunFailure: the cache cannot be written.
    """
    library = importlib.metadata.version("tokenizers")
    folder = cache_folder("tokenizers", "one", list(identity), kind, vocab_size, mask, sentinels, library)
    if folder.is_dir():
        try:
            return Tokenizer.load(folder)
        except InputError:
            discard_folder(folder)
    trained = train_tokenizer(kind, texts, vocab_size=vocab_size, mask=mask, sentinels=sentinels)
    with atomic_folder(folder) as temporary:
        trained.save(temporary / "tokenizer.json")
    return trained


class _Excerpt:
    """The text of a source for the training of a tokenizer, in parts of some thousand characters, any number of times.

    A long text in one part would need a hundred times its memory, and one core would do all the work.
    """

    def __init__(self, source: TextSource, share: Share) -> None:
        self._source, self._share = source, share
        self._size: TextSize | None = None

    def __iter__(self) -> Iterator[str]:
        if self._size is None:
            self._size = measure(self._source)
        held = ""
        for stretch in read_chunks(self._source, self._share, self._size):
            if stretch.starts and held:
                yield held
                held = ""
            text, start = held + stretch.text, 0
            while stop := text.find("\n", start + _EXCERPT_CHARACTERS) + 1:
                yield text[start:stop]
                start = stop
            held = text[start:]
        if held:
            yield held


def _train_side(side: str, kind: str, texts: Sequence[str], vocab_size: int) -> Tokenizer:
    try:
        return train_tokenizer(kind, texts, vocab_size=vocab_size)
    except InputError as error:
        raise InputError(f"{side} side: {error}") from None
