"""Word boundaries from ids are right for every kind of vocabulary, trained here or published."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.text.token_roles import TokenRoles
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import WordBoundaries, special_ids
from tests.data.objectives.noisy import SIZES, SPACED, lines, tokenizer

PUBLISHED = ("wordpiece", "bytes", "marked")
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]


ROLES = TokenRoles(pad=0, unk=1, bos=2, eos=3)


@cache
def make_published(style: str) -> Tokenizer:
    """Return a tokenizer like a published one, without information about its kind."""
    return Tokenizer(make_document(style), kind="pretrained", roles=ROLES)


def make_document(style: str) -> dict[str, Any]:
    options = {"vocab_size": 400, "special_tokens": NAMES, "show_progress": False}
    if style == "wordpiece":
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    elif style == "bytes":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="[UNK]")
    backend.train_from_iterator(lines("bpe"), trainer)
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


@cache
def table(tokenizer: Tokenizer) -> WordBoundaries:
    return WordBoundaries(tokenizer)


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the decoded text of each word."""
    ids = np.array(tokenizer.encode(text), dtype=np.int64)
    numbers = table(tokenizer).word_ids(ids)
    assert (np.diff(numbers) >= 0).all() and (np.diff(numbers) <= 1).all()
    return [tokenizer.decode(ids[numbers == number].tolist()) for number in range(int(numbers[-1]) + 1)]


def same_class(left: str, right: str) -> bool:
    """Return whether two characters belong to one class, so that no tokenizer may cut between them."""
    return unicodedata.category(left)[0] in "LM" and unicodedata.category(right)[0] in "LM"


@pytest.mark.parametrize("kind", SPACED)
def test_a_word_is_what_white_space_separates(kind: str) -> None:
    for text in lines(kind)[:53]:
        assert [word.strip() for word in words_of(tokenizer(kind), text) if word.strip()] == text.split()


@pytest.mark.parametrize("kind", ["wordpiece", "word"])
def test_finer_words_still_cut_no_run_of_letters(kind: str) -> None:
    for text in lines(kind)[:53]:
        cut_words = [word.strip() for word in words_of(tokenizer(kind), text)]
        expected = [
            run
            for chunk in text.split()
            for run in "".join(
                sign + ("" if same_class(sign, after) else "\n")
                for sign, after in zip(chunk, [*chunk[1:], " "], strict=True)
            ).split()
        ]
        # Runs of other signs may stay together; letters always do.
        assert "".join(cut_words) == "".join(expected)
        assert [run for run in cut_words if run[0].isalpha()] == [run for run in expected if run[0].isalpha()]


def test_segmented_text_joins_what_its_marks_join() -> None:
    for text in lines("split")[:53]:
        assert words_of(tokenizer("split"), text) == text.replace("@@ ", "").split()


@pytest.mark.parametrize("style", PUBLISHED)
def test_published_vocabularies_are_understood(style: str) -> None:
    loaded = make_published(style)
    for text in lines("bpe")[:31]:
        text = text.replace("東", "").replace("京", "")  # signs that the first of them cuts from any other
        words = [word.strip() for word in words_of(loaded, text)]
        if style == "wordpiece":  # this one lowercases, strips accents and sets signs apart
            signs = [sign for sign in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(sign) != "Mn"]
            runs = "".join(sign if sign.isalnum() else " " for sign in signs).split()
            assert [word for word in words if word.isalnum()] == runs
        else:
            assert words == text.split()


@pytest.mark.parametrize("style", PUBLISHED)
def test_every_special_entry_of_a_published_vocabulary_is_known(style: str) -> None:
    loaded = make_published(style)
    named = {number for number in range(loaded.vocab_size) if loaded.tokens([number])[0] in NAMES}
    assert special_ids(loaded) == named
    assert set(np.flatnonzero(~WordBoundaries(loaded).ordinary)) == named


@pytest.mark.parametrize("kind", SIZES)
def test_special_ids_stand_alone_and_are_not_ordinary(kind: str) -> None:
    trained = tokenizer(kind)
    words = WordBoundaries(trained)
    special = [trained.pad_id, trained.bos_id, trained.eos_id, trained.mask_id, *trained.sentinel_ids[:2]]
    inside = trained.encode(lines(kind)[0])
    for number in special:
        numbers = words.word_ids(np.array([inside[0], number, number, inside[-1]]))
        assert numbers.tolist() == [0, 1, 2, 3]
    assert not words.ordinary[[*special, *trained.sentinel_ids]].any()
    assert not words.ordinary[trained.unk_id]
    assert words.ordinary.sum() == trained.vocab_size - 5 - len(trained.sentinel_ids)


@pytest.mark.parametrize("kind", SIZES)
def test_entries_write_what_decoding_gives(kind: str) -> None:
    trained = tokenizer(kind)
    words = WordBoundaries(trained)
    for text in lines(kind)[:31]:
        ids = trained.encode(text)
        written = "".join(words.texts[number] for number in ids)
        if kind in ("byte", "byte-bpe"):  # a sign can be cut in several entries, of which none can be written
            assert written.strip() == text or "\ufffd" in written
        else:
            assert written.strip() == text
    assert words.carries_space == (kind not in ("character", "byte"))


@settings(deadline=None, max_examples=40)
@given(text=st.text(st.sampled_from("ab .\n\t,é"), min_size=1, max_size=40))
@pytest.mark.parametrize("kind", ["byte", "byte-bpe"])
def test_any_white_space_separates(kind: str, text: str) -> None:
    trained = tokenizer(kind)
    ids = trained.encode(text)
    if ids:
        numbers = WordBoundaries(trained).word_ids(np.array(ids))
        groups = [trained.decode(np.array(ids)[numbers == number].tolist()) for number in range(int(numbers[-1]) + 1)]
        assert [word for group in groups for word in group.split()] == text.split()
        assert all(len(group.split()) <= 1 for group in groups)


@pytest.mark.parametrize("kind", sorted(set(SIZES) - {"split"}))
def test_sentences_end_at_a_stop_before_white_space(kind: str) -> None:
    trained = tokenizer(kind)
    first, second, third, fourth = [line.split()[0] for line in lines(kind) if line.split()[0].isalpha()][:4]
    text = f"{first} {second}. {second} {third}! {third} {fourth}? {fourth} 1998.7 {first}.{second} {first}"
    ids = np.array(trained.encode(text))
    cuts = np.flatnonzero(WordBoundaries(trained).ends_sentence(ids)) + 1
    parts = [trained.decode(segment.tolist()).strip() for segment in np.split(ids, cuts)[:-1]]
    assert parts[:3] == [f"{first} {second}.", f"{second} {third}!", f"{third} {fourth}?"]
    if kind not in ("wordpiece", "word"):  # their signs stand alone, so white space cannot be told from none
        assert parts[3:] == [f"{fourth} 1998.7 {first}.{second} {first}"]


@pytest.mark.parametrize("kind", ["byte-bpe", "byte"])
def test_an_empty_line_ends_a_sentence_and_a_line_does_not(kind: str) -> None:
    trained = tokenizer(kind)
    ids = np.array(trained.encode("ba de\n\nfi go\nlu mer"))
    cuts = np.flatnonzero(WordBoundaries(trained).ends_sentence(ids)) + 1
    assert [trained.decode(segment.tolist()).strip() for segment in np.split(ids, cuts)[:-1]] == [
        "ba de",
        "fi go\nlu mer",
    ]


def test_bytes_of_a_published_vocabulary_are_white_space_where_they_write_it() -> None:
    loaded = make_published("marked")
    document = make_document("marked")
    document["model"]["byte_fallback"] = True
    document["model"]["vocab"] += [["<0x20>", -9.0], ["<0x0A>", -9.0], ["<0xE6>", -9.0]]
    document["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    with_bytes = Tokenizer(document, kind="pretrained", roles=ROLES)
    words = WordBoundaries(with_bytes)
    space, line, partial = range(with_bytes.vocab_size - 3, with_bytes.vocab_size)
    assert (words.texts[space], words.texts[line], words.texts[partial]) == (" ", "\n", "\ufffd")
    assert words.ordinary[[space, line, partial]].all() and special_ids(with_bytes) == special_ids(loaded)
    assert words.word_ids(np.array([partial, line, partial, partial])).tolist() == [0, 1, 2, 2]
