"""Bytes that each token of a vocabulary adds to a text when it follows another token."""

from __future__ import annotations

import random
import re
from typing import Final

from clearhead.base.errors import InputError
from clearhead.text.tokenizer import Tokenizer

_UNFINISHED: Final = "\ufffd"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""The byte that each character of a byte-level entry stands for; Source: GPT-2's encoder, src/encoder.py."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return, in the order of ids, the bytes that each token adds to a text; empty for special and unused ids.

    Args:
        tokenizer: tokenizer of the tokens.

    Raises:
        InputError: the text of a token depends on the tokens around it.
    """
    texts = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)]
    before = next((index for index, text in enumerate(texts) if text.strip() and _UNFINISHED not in text), None)
    if before is None:
        raise InputError(f"no token of this vocabulary ({tokenizer.kind}) decodes to text: restore the tokenizer")
    known, entries = texts[before], tokenizer.entries()
    written = []
    for index, entry in enumerate(entries):
        text = tokenizer.decode([before, index])
        fresh = text[len(known) :] if text.startswith(known) else ""
        written.append(part_of_character(entry) if _UNFINISHED in fresh else fresh.encode())
    _check(tokenizer, before, known, written)
    return written


def part_of_character(entry: str) -> bytes:
    """Return the bytes of a vocabulary entry that is part of a character, such as <0xE2>; empty for other entries."""
    piece = _BYTE_PIECE.fullmatch(entry)
    if piece is not None:
        return bytes([int(piece[1], 16)])
    return bytes(_BYTE_OF[sign] for sign in entry) if _BYTE_OF.keys() >= set(entry) else b""


def _check(tokenizer: Tokenizer, before: int, known: str, written_bytes: list[bytes]) -> None:
    """Check that the decoded text of random token sequences equals the joined bytes of the tokens."""
    whole = [
        index
        for index, written in enumerate(written_bytes)
        if written and _UNFINISHED not in written.decode("utf-8", "replace")
    ]
    draw = random.Random(0)
    for _ in range(100 if whole else 0):
        ids = draw.choices(whole, k=6)
        text = b"".join(written_bytes[index] for index in ids).decode()
        if tokenizer.decode([before, *ids]) != known + text:
            raise InputError(
                f"the text of a token of this vocabulary ({tokenizer.kind}) depends on its neighbours, so schemas "
                f"are not supported: {tokenizer.tokens(ids)} do not decode to {text!r}"
            )
