"""Raw text is split into words, and sentences into chunks that drop nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from clearhead.tasks.tag.splitting import NO_WORD, WordSplitter, chunk_words
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

LETTERS = "abcdefgh"


def random_words(draw: random.Random, count: int, longest: int = 7) -> list[str]:
    return ["".join(draw.choices(LETTERS, k=draw.randint(1, longest))) for _ in range(count)]


def tokenizers() -> list[Tokenizer]:
    draw = random.Random(2)
    texts = [" ".join(random_words(draw, 9)) for _ in range(60)] + ["é . , ( )"]
    sizes = {"bpe": 60, "byte-bpe": 300, "unigram": 40, "wordpiece": 60, "word": 900, "character": 90, "byte": 260}
    return [train_tokenizer(kind, texts, vocab_size=size) for kind, size in sizes.items()]


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.kind)
def test_stretches_hold_every_id_and_every_word_once(tokenizer: Tokenizer) -> None:
    draw = random.Random(3)
    for count, room in itertools.product((1, 5, 23), (8, 13, 400)):
        words = random_words(draw, count)
        chunks, shortened = chunk_words(words, tokenizer, room=room)
        ids = tokenizer.encode(" ".join(words))
        assert all(0 < len(stretch.ids) <= room for stretch in chunks)
        assert [word for stretch in chunks for word in stretch.words if word != NO_WORD] == list(range(count))
        if not shortened:
            assert [index for stretch in chunks for index in stretch.ids] == ids
        if room == 400:
            assert len(chunks) == 1
        # What a stretch begins with is a word, except the very first.
        assert all(stretch.words[0] != NO_WORD for stretch in chunks[1:])


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.kind)
def test_the_first_piece_of_a_word_begins_it(tokenizer: Tokenizer) -> None:
    words = ["abc", "é", "(", "ab", "ab", ")", "hgfedcba"]
    (chunk,), _ = chunk_words(words, tokenizer, room=400)
    places = [index for index, word in enumerate(chunk.words) if word != NO_WORD]
    borders = [*places, len(chunk.ids)]
    for word, (start, end) in zip(words, itertools.pairwise(borders), strict=True):
        text = tokenizer.decode(chunk.ids[start:end]).strip()
        assert text == word or (tokenizer.unk_id in chunk.ids[start:end] and tokenizer.roles.unk is not None)


def test_stretches_are_even() -> None:
    tokenizer = train_tokenizer("split", ["a b"], vocab_size=10)
    chunks, _ = chunk_words(["a"] * 25, tokenizer, room=12)
    assert [len(stretch.ids) for stretch in chunks] == [9, 9, 7]


def test_a_word_longer_than_a_stretch_keeps_its_front() -> None:
    tokenizer = train_tokenizer("character", ["abcdefgh "], vocab_size=20)
    chunks, shortened = chunk_words(["ab", "abcdefgh", "c"], tokenizer, room=5)
    assert [tokenizer.decode(stretch.ids) for stretch in chunks] == ["ab ", "abcde", "c"]
    assert shortened == 1


def deaf_to(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every tokenizer drop a letter without a trace, as published ones drop control characters."""
    plain = Tokenizer.encode_with_spans

    def encode(self: Tokenizer, text: str) -> Any:
        remaining = [
            (index, span) for index, span in zip(*plain(self, text), strict=True) if text[slice(*span)] != letter
        ]
        return [index for index, _ in remaining], [span for _, span in remaining]

    monkeypatch.setattr(Tokenizer, "encode_with_spans", encode)


def test_a_word_without_a_piece_is_in_no_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer("character", ["ab c"], vocab_size=20)
    deaf_to("c", monkeypatch)
    (chunk,), _ = chunk_words(["c", "ab", "cc", "acb", "c"], tokenizer, room=30)
    assert [word for word in chunk.words if word != NO_WORD] == [1, 3]
    assert chunk_words(["c", "cc"], tokenizer, room=30) == ([], 0)
    assert chunk_words(["c"], tokenizer, room=30) == ([], 0)


def split(splitter: WordSplitter, text: str) -> list[str]:
    return [text[start:end] for start, end in splitter.spans(text)]


def test_raw_text_is_split_at_white_space_and_signs() -> None:
    assert split(WordSplitter(), " (Well, café e\u0301 3.5)\n") == [
        "(",
        "Well",
        ",",
        "café",
        "e\u0301",
        "3",
        ".",
        "5",
        ")",
    ]
    assert WordSplitter().spans("") == []


def test_raw_text_is_split_as_the_training_data_is() -> None:
    words = "self . _name == x ... do n't well-known ' - . ... == => and '' '' a .".split()
    splitter = WordSplitter.learn(words * 3)
    assert splitter.inner == "_"
    assert split(splitter, "foo._bar==1...") == ["foo", ".", "_bar", "==", "1", "..."]
    spoken = WordSplitter.learn("the re-make is n't a well-made film - really .".split())
    assert split(spoken, "It isn't so well-made.") == ["It", "isn't", "so", "well-made", "."]


@pytest.mark.parametrize("seed", range(5))
def test_words_hold_everything_but_white_space(seed: int) -> None:
    draw = random.Random(seed)
    splitter = WordSplitter.learn("".join(draw.choices("ab_.=' ", k=300)).split())
    text = "".join(draw.choices("ab_.=' \n\t(", k=200))
    spans = splitter.spans(text)
    assert "".join(text[start:end] for start, end in spans) == "".join(text.split())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert all(start < end and not any(map(str.isspace, text[start:end])) for start, end in spans)
