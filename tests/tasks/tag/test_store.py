"""Stores of tagged words: batches label first tokens, and a second run opens the cached store."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches, validation_batches
from clearhead.data.stores.store import Store
from clearhead.tasks.tag.data import DATA
from clearhead.tasks.tag.splitting import NO_WORD, WordSplitter
from clearhead.tasks.tag.store import names_of, prepare_tagged, splitter_of, tags_of
from clearhead.tasks.tag.train import collate_tagged
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.tasks.tag.test_data import SENTENCES, columns, write
from tests.tasks.tag.test_splitting import deaf_to, random_words
from tests.tasks.tag.test_tag_set import random_iob2

FRAMING = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def make_store(folder: Path, sentences: list[tuple[list[str], list[str]]], **options: Any) -> Store:
    path = write(folder / f"{options.pop('name', 't')}.conll", columns(sentences))
    tokenizer = train_tokenizer("character", [" ".join(words) for words, _ in sentences], vocab_size=90)
    return prepare_tagged(DATA.source({"text": path}), tokenizer, **{"max_length": 30, **options})


def tagged_batches(store: Store) -> EpochBatches[Batch]:
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=90, seed=3)
    return training_batches(store, plan, lambda rows: collate_tagged(store, rows, FRAMING))


def random_sentences(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    draw = random.Random(seed)
    tags = [random_iob2(draw, draw.randint(1, 17)) for _ in range(count)]
    return [(random_words(draw, len(row)), row) for row in tags]


def test_batches_label_first_pieces_and_nothing_else(tmp_path: Path) -> None:
    sentences = random_sentences(31, 4)
    store = make_store(tmp_path, sentences)
    tokenizer = train_tokenizer("character", [" ".join(words) for words, _ in sentences], vocab_size=90)
    assert names_of(store, store.ragged_rows("tag").ids) == [tags for _, tags in sentences]
    tagged_words: dict[int, list[tuple[str, str]]] = {}
    for batch in validation_batches(store, lambda rows: collate_tagged(store, rows, FRAMING), batch_tokens=200):
        assert batch.ids.numel() <= 200
        assert batch.num_labels == int((batch.labels != NO_LABEL).sum())
        for row, ids, labels in zip(batch.rows, batch.ids.tolist(), batch.labels.tolist(), strict=True):
            assert (ids[0], ids[store.input_lengths[0][row] - 1]) == (2, 3)
            tagged_words[row] = [
                (tokenizer.tokens([index])[0], tags_of(store).names[label])
                for index, label in zip(ids, labels, strict=True)
                if label != NO_LABEL
            ]
    flat = [item for row in sorted(tagged_words) for item in tagged_words[row]]
    assert flat == [(word[0], tag) for words, tags in sentences for word, tag in zip(words, tags, strict=True)]
    num_cut = sum(len(" ".join(words)) > 28 for words, _ in sentences)
    assert num_cut > 5 and f", {num_cut} cut into chunks of at most 30 tokens" in store.report


def test_training_batches_can_be_resumed(tmp_path: Path) -> None:
    store = make_store(tmp_path, random_sentences(41, 5))
    batches = tagged_batches(store)
    for _ in range(batches.batches_per_epoch + 2):
        next(batches)
    again = tagged_batches(store)
    again.load_state(batches.state())
    for _ in range(batches.batches_per_epoch):
        assert next(batches).rows.tolist() == next(again).rows.tolist()


def test_a_second_run_opens_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = random_sentences(11, 6)
    first = make_store(tmp_path, sentences)
    monkeypatch.setattr(Tokenizer, "encode_with_spans", lambda *arguments: pytest.fail("tokenised again"))
    again = make_store(tmp_path, sentences, name="moved")
    assert (again.folder, again.identity) == (first.folder, first.identity)
    assert splitter_of(again) == WordSplitter()
    monkeypatch.undo()
    (first.folder / "tag_ids.bin").write_bytes(b"")
    assert make_store(tmp_path, sentences).identity == first.identity


def test_held_out_tags_must_be_known(tmp_path: Path) -> None:
    known = tags_of(make_store(tmp_path, SENTENCES))
    held_out = make_store(tmp_path, [(["a", "b"], ["I-LOC", "O"])], tags=known, name="v")
    assert names_of(held_out, held_out.ragged_rows("tag").ids) == [["B-LOC", "O"]]
    with pytest.raises(InputError, match=r'w.conll:2: the tag "B-ORG" is not among the 5 tags of the training data'):
        make_store(tmp_path, [(["a", "b"], ["B-LOC", "B-ORG"])], tags=known, name="w")


def test_a_word_without_a_piece_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf_to("c", monkeypatch)
    sentences = [(["c"], ["X"]), (["ab", "c", "b"], ["X", "Y", "Z"])]
    store = make_store(tmp_path, sentences)
    assert ", 2 words without a token; 3 tags: X 2, Y 1, Z 1" in store.report
    words = store.arrays["words"]
    assert [tags_of(store).names[tag] for tag in store.ragged_rows("tag").ids[words[words != NO_WORD]]] == ["X", "Z"]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tX\nb\n", ':2: expected a word and its tag with a tab between them, got "b"'),
        ("a X\nb\n", ':2: expected a word and its tag with a blank between them, got "b"'),
        ("a\tX\n\tY\n", ":2: expected a word and its tag"),
        ("a\tX\nb\tX\n", ":1: all 2 words from here on have the tag 'X'; a tagger needs at least two"),
        ("\n\n", "expected at least one tagged sentence"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "t.conll", text)
    with pytest.raises(InputError, match=re.escape(message)):
        prepare_tagged(DATA.source({"text": path}), train_tokenizer("byte", [], vocab_size=260), max_length=9)
