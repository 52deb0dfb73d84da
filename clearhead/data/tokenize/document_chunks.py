"""Cuts long documents where the tokenizer gives the same ids, so that a document of any length is tokenized in parts.

A tokenizer needs about a hundred times the memory of its text. A text may be cut where both parts alone give the ids
that they give together; which places these are depends on the tokenizer, so they are tried with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clearhead.data.arrays import Ragged, id_dtype, pack
from clearhead.data.sources.texts import TextChunk
from clearhead.text.tokenizer import Tokenizer

# In characters: how much text a tokenizer gets at once, and how much of it on both sides shows what a cut changes.
_PART = 1 << 18
_CONTEXT = 128
# How much text is tokenized at once: enough to keep every core busy.
_BATCH_CHARACTERS = 1 << 20
_BATCH_PARTS = 20_000
# How many places are tried at once, and in how much of the text.
_CANDIDATES = 16
_WINDOW = 1 << 13
# White space between two words; long runs are not tried, because the context might not reach the words.
_BETWEEN = re.compile(r"(?<=\S)\s{1,16}(?=\S)")
# If no white space fits in this many parts, any place is taken whose context agrees.
_PATIENCE = 4


def chunk_documents(chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Join the chunks of each document, and cut them where the tokenizer allows it.

    Args:
        chunks: documents as they were read.
        tokenizer: decides where a cut changes nothing.

    Returns:
        Texts whose ids, one after the other, are those of the whole document; True with the first of each document.
        White space that the tokenizer itself adds between two parts is left out.
    """
    text, starts = "", True
    for chunk in chunks:
        if chunk.starts:
            if text:
                yield text, starts
            text, starts = "", True
        text += chunk.text
        while len(text) > _PART + _WINDOW:
            cut = _find_cut(text, tokenizer)
            if cut is None:
                break
            yield text[: cut[0]], starts
            text, starts = text[cut[1] :], False
    if text:
        yield text, starts


def _find_cut(text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return where the first part of a text may end and the rest may begin, or None where no place was found."""
    cut = cut_before(_PART + _CONTEXT, text, tokenizer)
    if cut is None and len(text) > _PATIENCE * _PART:
        anywhere = [(position, position) for position in range(_PART, _PART + _CANDIDATES)]
        cut = _first_allowed(text, anywhere, tokenizer)
    return cut


def cut_before(limit: int, text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Find a cut at white space near the end of what fits.

    Args:
        limit: characters that the first part may have.
        text: is cut.
        tokenizer: gives the two parts the ids that it gives both together.

    Returns:
        where the first part ends and where the rest begins; None: there is no such place.
    """
    spaces = list(_BETWEEN.finditer(text, max(0, limit - _CONTEXT - _WINDOW), limit))[-_CANDIDATES:]
    return _first_allowed(text, [cut for space in spaces for cut in _cuts_at(space)], tokenizer)


def _cuts_at(space: re.Match[str]) -> list[tuple[int, int]]:
    """Return the ways to cut at some white space: it goes left, right, to both sides, or is dropped."""
    start, stop = space.span()
    cuts = [(stop, stop), (start, start), (start + 1, start + 1), (start, start + 1), (start, stop)]
    return list(dict.fromkeys(cuts))


def _first_allowed(text: str, cuts: list[tuple[int, int]], tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the first cut around which the ids of the two sides are those of both together."""
    samples: list[str] = []
    for stop, start in cuts:
        first, last = max(0, stop - _CONTEXT), start + _CONTEXT
        samples += [text[first:last], text[first:stop], text[start:last]]
    ids = iter(tokenizer.encode_batch(samples))
    agrees = [next(ids) == next(ids) + next(ids) for _ in cuts]
    return next((cut for cut, allowed in zip(cuts, agrees, strict=True) if allowed), None)


def encode_chunks(chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> Iterator[tuple[Ragged, list[bool]]]:
    """Tokenize documents in the order of the text, many parts at a time.

    Returns:
        for many parts together, the ids of each, and whether a document starts with it.
    """
    for texts, starts in _batches(chunk_documents(chunks, tokenizer)):
        yield pack(tokenizer.encode_batch(texts), id_dtype(tokenizer)), starts


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    """Gather texts until there is enough to tokenize at once."""
    texts: list[str] = []
    starts: list[bool] = []
    room = _BATCH_CHARACTERS
    for text, is_new in parts:
        texts.append(text)
        starts.append(is_new)
        room -= len(text)
        if room <= 0 or len(texts) == _BATCH_PARTS:
            yield texts, starts
            texts, starts, room = [], [], _BATCH_CHARACTERS
    if texts:
        yield texts, starts
