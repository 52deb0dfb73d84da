"""Spans and word numbers are right for every kind of tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from clearhead.base.errors import InputError
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer
from tests.text.corpus import make_corpus

SIZE = {"byte-bpe": 401, "byte": 260, "word": 997, "split": 997}
LETTERS = sorted(set("".join(make_corpus()))) + list(" \t\n\u00a0\u2028👩")


@functools.cache
def train(kind: str) -> Tokenizer:
    return train_tokenizer(kind, make_corpus(), vocab_size=SIZE.get(kind, 211))


def word_of(text: str, index: int) -> int:
    """Return the word number of a character (for white space, of the next word), computed with `str.split`."""
    count = len(text.split())
    before = len(text[:index].split())
    inside = index > 0 and not text[index - 1].isspace() and not text[index].isspace()
    return max(0, min(before - inside, count - 1))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet=LETTERS) | st.sampled_from(make_corpus()))
def test_spans_and_words_of_any_text(kind: str, text: str) -> None:
    tokenizer = train(kind)
    ids, spans = tokenizer.encode_with_spans(text)
    again, words = tokenizer.words(text)
    assert ids == again == tokenizer.encode(text)
    assert len(ids) == len(spans) == len(words)
    assert spans == sorted(spans) and [stop for _, stop in spans] == sorted(stop for _, stop in spans)
    covered = {index for start, stop in spans for index in range(start, stop)}
    assert covered >= {index for index, sign in enumerate(text) if not sign.isspace() and sign != "▁"}
    for (start, stop), word in zip(spans, words, strict=True):
        piece = text[start:stop]
        assert 0 <= start < stop <= len(text)
        assert piece.isspace() or piece == piece.strip()
        assert word == word_of(text, start)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_a_span_holds_what_its_piece_says(kind: str) -> None:
    tokenizer = train(kind)
    for text in make_corpus():
        ids, spans = tokenizer.encode_with_spans(text)
        for index, token, (start, stop) in zip(ids, tokenizer.tokens(ids), spans, strict=True):
            shown = token.replace("▁", "").removeprefix("##" if len(token) > 2 else "")
            if index != tokenizer.unk_id and shown:
                assert text[start:stop] == shown


def test_pieces_of_a_character_have_all_of_it() -> None:
    text = "x 👩 é"
    assert train("byte").encode_with_spans(text)[1] == [(0, 1), (1, 2), *[(2, 3)] * 4, (3, 4), *[(4, 5)] * 2]
    assert train("byte").words(text)[1].tolist() == [0, 1, 1, 1, 1, 1, 2, 2, 2]


def test_segmented_words_are_joined() -> None:
    tokenizer = train_tokenizer("split", ["ein an@@ trie@@ b x"], vocab_size=97)
    ids, words = tokenizer.words("ein  an@@ trie@@ b unseen x@@")
    assert words.tolist() == [0, 1, 1, 1, 2, 3]
    assert tokenizer.tokens(ids)[1:4] == ["an@@", "trie@@", "b"]


def test_words_of_signs_and_digits_stay_whole() -> None:
    text = "don't,  stop(17)"
    for kind in KINDS:
        words = train(kind).words(text)[1]
        assert sorted(set(words.tolist())) == [0, 1], kind
        assert words.tolist() == sorted(words)


def bert_like(folder: Path) -> Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cafe", "nai", "##ve", "##s", "'", "s", "the", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(names[:5])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_a_tokenizer_that_changes_the_text(tmp_path: Path) -> None:
    tokenizer = bert_like(tmp_path)
    text = " The CAFÉ's  nai\u0308ves."
    ids, spans = tokenizer.encode_with_spans(text)
    assert tokenizer.tokens(ids) == ["the", "cafe", "'", "s", "nai", "##ve", "##s", "."]
    assert [text[start:stop] for start, stop in spans][:4] == ["The", "CAFÉ", "'", "s"]
    assert tokenizer.words(text)[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 2]


def test_gpt2_spans(data_dir: Path) -> None:
    tokenizer = Tokenizer.load(data_dir / "gpt2-tokenizer")
    text = "It's\n\n  naïve 👩‍👧 <|endoftext|>"
    ids, spans = tokenizer.encode_with_spans(text)
    assert ids == tokenizer.encode(text)
    assert {index for start, stop in spans for index in range(start, stop)} >= {
        index for index, sign in enumerate(text) if not sign.isspace()
    }
    words = tokenizer.words(text)[1].tolist()
    assert words == [word_of(text, start) for start, _ in spans]
    assert words[-1] == 3


def test_a_reserved_entry_in_a_text_keeps_ids_and_spans_together(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.roles.unk is None
    assert tokenizer.encode_with_spans("b </s> a") == ([2, 0], [(0, 1), (7, 8)])


def test_what_is_no_text_is_named() -> None:
    with pytest.raises(InputError, match=r"has the lone surrogate '\\ud800' at character 2"):
        train("bpe").encode_with_spans("a\ud800")
