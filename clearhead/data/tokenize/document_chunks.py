"""Tokenize documents of any length: long ones are cut into parts where the cut does not change the ids.

A tokenizer needs about a hundred times the memory of its text. A text may be cut where the ids of both parts, tokenized
separately, are the ids of the whole text. The allowed positions depend on the tokenizer, so candidates are tested with
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clearhead.data.arrays import Ragged, id_dtype, pack
from clearhead.data.sources.texts import TextChunk
from clearhead.text.tokenizer import Tokenizer

# In characters: the size of a part, and the context on both sides of a cut that is tokenized to test it.
_PART = 1 << 18
_CONTEXT = 128
# The text that is tokenized in one batch: enough to keep every core busy.
_BATCH_CHARACTERS = 1 << 20
_BATCH_PARTS = 20_000
# The number of positions that are tested at once, and the number of characters they are taken from.
_CANDIDATES = 16
_WINDOW = 1 << 13
# White space between two words; longer runs are not tested, because the context might not reach the words.
_BETWEEN = re.compile(r"(?<=\S)\s{1,16}(?=\S)")
# If no white space is allowed within this number of parts, any position with unchanged ids is taken.
_PATIENCE = 4


def chunk_documents(chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Join the chunks of each document, and cut it into parts where the ids do not change.

    Args:
        chunks: the documents, in chunks.
        tokenizer: the tokenizer, which decides where a cut changes no id.

    Returns:
        An iterator over pairs: a part, and True for the first part of a document. The concatenated ids of the parts are
        the ids of the document. White space that the tokenizer itself adds between two parts is left out.
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
    """Return the end of the first part of a text and the start of the rest; None if no cut was found."""
    cut = cut_before(_PART + _CONTEXT, text, tokenizer)
    if cut is None and len(text) > _PATIENCE * _PART:
        anywhere = [(position, position) for position in range(_PART, _PART + _CANDIDATES)]
        cut = _first_allowed(text, anywhere, tokenizer)
    return cut


def cut_before(limit: int, text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Find a cut at white space near a limit that does not change the ids.

    Args:
        limit: the maximum number of characters of the first part.
        text: the text to cut.
        tokenizer: the tokenizer that decides whether a cut changes the ids.

    Returns:
        The end of the first part and the start of the rest; None if there is no such cut.
    """
    spaces = list(_BETWEEN.finditer(text, max(0, limit - _CONTEXT - _WINDOW), limit))[-_CANDIDATES:]
    return _first_allowed(text, [cut for space in spaces for cut in _cuts_at(space)], tokenizer)


def _cuts_at(space: re.Match[str]) -> list[tuple[int, int]]:
    """Return the possible cuts at white space: it stays with the left or the right part, or is split or dropped."""
    start, stop = space.span()
    cuts = [(stop, stop), (start, start), (start + 1, start + 1), (start, start + 1), (start, stop)]
    return list(dict.fromkeys(cuts))


def _first_allowed(text: str, cuts: list[tuple[int, int]], tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the first of several cuts that does not change the ids around it; None if all change them."""
    samples: list[str] = []
    for stop, start in cuts:
        first, last = max(0, stop - _CONTEXT), start + _CONTEXT
        samples += [text[first:last], text[first:stop], text[start:last]]
    ids = iter(tokenizer.encode_batch(samples))
    agrees = [next(ids) == next(ids) + next(ids) for _ in cuts]
    return next((cut for cut, allowed in zip(cuts, agrees, strict=True) if allowed), None)


def encode_chunks(chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> Iterator[tuple[Ragged, list[bool]]]:
    """Tokenize documents in the order of the text, in batches of parts.

    Returns:
        An iterator over batches: the ids of each part, and whether a document starts with the part.
    """
    for texts, starts in _batches(chunk_documents(chunks, tokenizer)):
        yield pack(tokenizer.encode_batch(texts), id_dtype(tokenizer)), starts


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    """Group parts of documents into batches for the tokenizer."""
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
