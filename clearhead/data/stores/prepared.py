"""Prepared data kept between runs: tokenizers and tokenised pairs, found again by what they were made from."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from clearhead.data.sources.pairs import Pair, PairSource, read_pairs
from clearhead.data.sources.records import identity_key
from clearhead.data.sources.texts import WHOLE, Share, TextSize, TextSource, measure, read_stretches
from clearhead.data.stores.pairs import (
    PairStore,
    Side,
    SpecialIds,
    discard,
    join,
    keep_pairs,
    pack,
    publishing,
    select,
    write_store,
)
from clearhead.errors import InputError
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

Progress = Callable[[int, int], None]

# Raised whenever what is written, or how it is made, changes: older entries are then no longer found.
_FORMAT = 1
_CHUNK_PAIRS = 20_000
_EXCERPT_CHARACTERS = 1 << 14


def cache_root() -> Path:
    """Return the folder of prepared data: the environment variable CLEARHEAD_CACHE, or a folder in the user's cache."""
    named = os.environ.get("CLEARHEAD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "clearhead"


def cache_folder(what: str, *inputs: object) -> Path:
    """Return where the cache keeps what is made from some inputs.

    Args:
        what: the kind of thing.
        inputs: JSON values, all that it depends on.
    """
    return cache_root() / what / identity_key(_FORMAT, *inputs)


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
            discard(folder)
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
    with publishing(folder) as temporary:
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
            discard(folder)
    trained = train_tokenizer(kind, texts, vocab_size=vocab_size, mask=mask, sentinels=sentinels)
    with publishing(folder) as temporary:
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
        for stretch in read_stretches(self._source, self._share, self._size):
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


def prepare_pairs(
    source: PairSource,
    tokenizers: TokenizerPair,
    *,
    max_length: int,
    max_ratio: float | None,
    training: bool,
    extra: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> PairStore:
    """Tokenise and filter the pairs of a source, or open what an earlier run made of the same content.

    Args:
        source: where the pairs come from.
        tokenizers: what turns them into ids.
        max_length: the longest side kept, in tokens with what stands around it.
        max_ratio: how many times as long as the other a side may be, counted with the end tokens; None: any.
        extra: how many ids stand around a source and around a target; None: as many as in a translation.
        training: False keeps badly matched pairs, because a score on hand-picked pairs flatters.
        progress: called with pairs done and pairs in all, as the work goes on.

    Returns:
        The pairs that were kept; `report` counts the others.

    Raises:
        InputError: the source is unusable, the limits are, or no pair is left.
        RunFailure: the cache cannot be written.
    """
    _check_limits(max_length, max_ratio)
    ratio = max_ratio if training else None
    counted = [] if extra is None else [list(extra)]
    folder = cache_folder("pairs", source.identity(), tokenizers.fingerprint, max_length, ratio, *counted)
    if folder.is_dir():
        try:
            return PairStore(folder)
        except InputError:
            discard(folder)
    sources, targets = _encoded(source, tokenizers, progress)
    special = _special(tokenizers)
    keep, report = keep_pairs(
        sources.lengths,
        targets.lengths,
        max_length=max_length,
        max_ratio=ratio,
        extra=(len(special.read), len(special.said) - 1) if extra is None else extra,
    )
    if not report.kept:
        raise InputError(
            f"{source.place(0)}: no pair is left to use of those from here on ({report}); "
            f"max_length is {max_length} tokens, max_ratio is {'off' if ratio is None else ratio}"
        )
    return write_store(
        folder,
        source=select(sources, keep),
        target=select(targets, keep),
        lines=np.flatnonzero(keep),
        report=report,
        special=special,
    )


def _check_limits(max_length: int, max_ratio: float | None) -> None:
    if max_length < 2:
        raise InputError(f"max_length is {max_length}; expected at least 2, one token and the end token")
    if max_ratio is not None and not max_ratio >= 1:
        raise InputError(f"max_ratio is {max_ratio}; expected a number of at least 1")


def _encoded(source: PairSource, tokenizers: TokenizerPair, progress: Progress | None) -> tuple[Side, Side]:
    """Return the ids of both sides of all pairs."""
    pairs = read_pairs(source)
    chunks = []
    for start in range(0, len(pairs), _CHUNK_PAIRS):
        chunk = pairs[start : start + _CHUNK_PAIRS]
        chunks.append(_encode(chunk, tokenizers))
        if progress is not None:
            progress(start + len(chunk), len(pairs))
    return join([chunk[0] for chunk in chunks]), join([chunk[1] for chunk in chunks])


def _train_side(side: str, kind: str, texts: Sequence[str], vocab_size: int) -> Tokenizer:
    try:
        return train_tokenizer(kind, texts, vocab_size=vocab_size)
    except InputError as error:
        raise InputError(f"{side} side: {error}") from None


def _encode(pairs: Sequence[Pair], tokenizers: TokenizerPair) -> tuple[Side, Side]:
    source, target = tokenizers.source, tokenizers.target
    return (
        pack(source.encode_batch([pair[0] for pair in pairs]), vocab_size=source.vocab_size),
        pack(target.encode_batch([pair[1] for pair in pairs]), vocab_size=target.vocab_size),
    )


def _special(tokenizers: TokenizerPair) -> SpecialIds:
    source, target = tokenizers.source, tokenizers.target
    return SpecialIds(
        source_pad=source.pad_id,
        source_eos=source.eos_id,
        target_pad=target.pad_id,
        target_bos=target.bos_id,
        target_eos=target.eos_id,
        source_frame=source.frame.read if source.is_framed else None,
        target_frame=target.frame.written if target.is_framed else None,
    )
