"""Streamed text: shown text is final, stop texts are exact, and the whole equals the decoded ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.generate.results import StreamingDecoder, continuation_text
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Größe und Maß: 日本語の文, naïve café — ☃ 😀 twice 😀😀!",
    "a  b\tc\nThe end.  ...",
]


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def grow(growing: StreamingDecoder, ids: list[int]) -> list[str]:
    """Add ids until the text stops, and finish."""
    pieces = []
    for token in ids:
        pieces.append(growing.add(token))
        if growing.is_stopped:
            break
    return [*pieces, growing.finish()]


def cut(text: str, stops: list[str]) -> str:
    """The plain rule: read character by character until a stop text is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - len(max(complete, key=len))]
    return text


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="ab\nÄ😀", max_size=23),
    stops=st.lists(st.text(alphabet="ab\nÄ😀", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 99),
)
def test_stop_texts_are_exact_whatever_the_tokens_are(text: str, stops: list[str], seed: int) -> None:
    """Tokens are random runs of bytes, so stop texts and characters span several tokens."""
    draw, content = random.Random(seed), text.encode()
    runs: list[bytes] = []
    while content:
        size = draw.randint(1, 5)
        runs.append(content[:size])
        content = content[size:]
    growing = StreamingDecoder(lambda ids: b"".join(runs[i] for i in ids).decode("utf-8", errors="replace"), stops)
    shown = grow(growing, list(range(len(runs))))
    assert "".join(shown) == cut(text, stops)
    assert growing.is_stopped == any(stop in text for stop in stops)


def test_nothing_is_shown_that_may_begin_a_stop_text() -> None:
    growing = StreamingDecoder(decode_bytes, ["\n\nQ", "END"])
    assert [growing.add(token) for token in b"a\n\nbEN"] == ["a", "", "", "\n\nb", "", ""]
    assert growing.finish() == "EN"
    growing = StreamingDecoder(decode_bytes, ["\n\nQ", "END"])
    assert [growing.add(token) for token in b"ENEND"] == ["", "", "EN", "", ""]
    assert growing.is_stopped and growing.finish() == ""


def test_characters_are_shown_whole() -> None:
    growing = StreamingDecoder(decode_bytes)
    assert [growing.add(token) for token in "aß😀".encode()] == ["a", "", "ß", "", "", "", "😀"]
    assert [growing.add(token) for token in b"\xf0\x9f"] == ["", ""]
    assert growing.finish() == "\ufffd", "bytes that stay unfinished are shown at the end"


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_decoded_text_for_every_tokenizer(kind: str) -> None:
    """Also after a context, which decides about the space before the first word, and over many windows."""
    texts = TEXTS if kind != "split" else [" ".join(text.split()) + " un@@ seg@@ mented" for text in TEXTS]
    size = {"byte": 260, "byte-bpe": 300, "wordpiece": 120, "unigram": 57}.get(kind, 90)
    tokenizer: Tokenizer = train_tokenizer(kind, texts * 3, vocab_size=size)
    for text in [*texts, " ".join(texts)]:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for split in (0, 1, len(ids) // 2):
            context = [tokenizer.bos_id, *ids[:split]]
            behind = "".join(grow(StreamingDecoder(tokenizer.decode, (), context), ids[split:]))
            assert behind == continuation_text(tokenizer.decode, ids[split:], context)
            if "\ufffd" not in tokenizer.decode(context):
                assert tokenizer.decode(context) + behind == whole


def test_each_step_decodes_a_few_ids_only() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    growing = StreamingDecoder(decode, ["\n"], context=list(b"context " * 40))
    assert "".join(growing.add(token) for token in b"some words " * 40) == "some words " * 40
    assert longest < 40
