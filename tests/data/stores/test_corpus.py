"""Text as ids: what is kept, what is found again, and that a text cut into parts gives the ids of the whole."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest

import clearhead.data.sources.lines as lines_module
import clearhead.data.stores.corpus as corpus_module
import clearhead.data.tokenize.document_chunks as chunks_module
import clearhead.data.tokenize.tokenizers as tokenizers_module
from clearhead.base.errors import InputError, RunFailure
from clearhead.data.sources.texts import TextChunk, TextFiles, TextTable
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.tokenize.document_chunks import chunk_documents
from clearhead.data.tokenize.tokenizers import load_or_train_text_tokenizer, load_or_train_tokenizer
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer
from tests.text.corpus import make_corpus

SIZE = {"byte-bpe": 401, "byte": 261, "word": 997, "split": 997}
CODE = "def f(x):\n\treturn  [x,\n            'don''t'] # 東京 {}\n\n\nclass  A:\n    pass\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder


def write(folder: Path, lines: list[str], name: str = "text.txt") -> TextFiles:
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return TextFiles(folder / name, "line")


def make_tokenizer(kind: str = "bpe") -> Tokenizer:
    return train_tokenizer(kind, make_corpus(), vocab_size=SIZE.get(kind, 211), mask=True)


def test_a_corpus_holds_what_the_tokenizer_says(tmp_path: Path) -> None:
    lines, tokenizer = make_corpus(), make_tokenizer()
    corpus = prepare_corpus(write(tmp_path, lines), tokenizer)
    assert len(corpus) == len(lines)
    assert [corpus.documents[index].tolist() for index in range(len(lines))] == tokenizer.encode_batch(lines)
    assert corpus.num_tokens == sum(map(len, tokenizer.encode_batch(lines))) == corpus.documents.lengths.sum()
    assert corpus.largest_id == max(map(max, tokenizer.encode_batch(lines)))
    assert corpus.text_bytes == sum(len(line.encode()) for line in lines)
    assert corpus.documents.ids.dtype == np.uint16
    assert not corpus.documents.ids.flags.writeable


def test_a_sequence_has_its_ends(tmp_path: Path) -> None:
    corpus = prepare_corpus(write(tmp_path, make_corpus()), make_tokenizer())
    for document in (0, 7, len(corpus) - 1):
        whole = [2, *corpus.documents[document].tolist(), 3]
        for start in range(len(whole)):
            for stop in range(start + 1, len(whole) + 1):
                assert corpus.sequence(document, start, stop).tolist() == whole[start:stop]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["code", "lines", "single"])
def test_parts_give_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setattr(chunks_module, "_PART", 331)
    monkeypatch.setattr(chunks_module, "_WINDOW", 127)
    monkeypatch.setattr(chunks_module, "_CONTEXT", 61)
    separator = {"code": "\n", "lines": "\n\n", "single": " "}[name]
    lines = make_corpus(101) if name != "code" else [CODE * 3] * 17
    text = separator.join(lines)
    tokenizer = make_tokenizer(kind)
    stretches = [TextChunk(text[start : start + 89], start == 0, "a", 1) for start in range(0, len(text), 89)]
    parts = list(chunk_documents([*stretches, TextChunk("another", True, "b", 1)], tokenizer))
    assert [starts for _, starts in parts] == [True, *[False] * (len(parts) - 3), False, True][: len(parts)]
    assert len(parts) > 5 and max(len(piece) for piece, _ in parts) < 5 * 331
    ids = [
        index for ids_of_piece in tokenizer.encode_batch([piece for piece, _ in parts[:-1]]) for index in ids_of_piece
    ]
    assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["byte", "character"])
def test_a_text_without_white_space_is_parted_too(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(chunks_module, "_PART", 331)
    monkeypatch.setattr(chunks_module, "_WINDOW", 127)
    text = "".join(random.Random(3).choices("acgt東", k=5_003))
    tokenizer = train_tokenizer(kind, [text], vocab_size=261)
    parts = [piece for piece, _ in chunk_documents([TextChunk(text, True, "a", 1)], tokenizer)]
    assert len(parts) > 5 and "".join(parts) == text


def test_work_in_pieces_gives_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    tokenizer = make_tokenizer()
    sources = [
        write(tmp_path, make_corpus()),
        TextFiles(tmp_path / "text.txt"),
        TextFiles(tmp_path / "text.txt", "paragraph"),
    ]
    whole = [prepare_corpus(source, tokenizer) for source in sources]
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache / "other"))
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", 41)
    monkeypatch.setattr(chunks_module, "_PART", 1_009)
    monkeypatch.setattr(chunks_module, "_WINDOW", 127)
    monkeypatch.setattr(chunks_module, "_BATCH_CHARACTERS", 1_511)
    monkeypatch.setattr(chunks_module, "_BATCH_PARTS", 31)
    for source, expected in zip(sources, whole, strict=True):
        corpus = prepare_corpus(source, tokenizer)
        assert corpus.identity == expected.identity
        assert (len(corpus), corpus.text_bytes) == (len(expected), expected.text_bytes)


def test_a_second_preparation_neither_reads_nor_tokenises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, tokenizer = write(tmp_path, make_corpus()), make_tokenizer()
    first = prepare_corpus(source, tokenizer, share=(0.0, 0.9))
    monkeypatch.setattr(corpus_module, "measure", None)
    again = prepare_corpus(source, tokenizer, share=(0.0, 0.9))
    assert (again.folder, again.identity) == (first.folder, first.identity)


def test_every_input_is_part_of_the_key(tmp_path: Path) -> None:
    source, tokenizer = write(tmp_path, make_corpus()), make_tokenizer()
    corpora = [
        prepare_corpus(source, tokenizer),
        prepare_corpus(source, make_tokenizer("unigram")),
        prepare_corpus(source, tokenizer, share=(0.0, 0.9)),
        prepare_corpus(source, tokenizer, share=(0.9, 1.0)),
        prepare_corpus(TextFiles(source.path), tokenizer),
    ]
    corpora.append(prepare_corpus(write(tmp_path, make_corpus(seed=7)), tokenizer))
    assert len({corpus.folder for corpus in corpora}) == len({corpus.identity for corpus in corpora}) == 6
    assert len(corpora[2]) + len(corpora[3]) == len(corpora[0])


@pytest.mark.parametrize("damage", ["document_ids.bin", "document_offsets.bin", "store.json", "delete"])
def test_a_damaged_corpus_is_made_again(tmp_path: Path, damage: str) -> None:
    source, tokenizer = write(tmp_path, make_corpus()), make_tokenizer()
    corpus = prepare_corpus(source, tokenizer)
    victim = corpus.folder / ("document_ids.bin" if damage == "delete" else damage)
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-8])
    with pytest.raises(InputError, match="prepare the data again"):
        Corpus(corpus.folder, tokenizer)
    again = prepare_corpus(source, tokenizer)
    assert (again.identity, len(again)) == (corpus.identity, len(make_corpus()))
    assert [folder.name for folder in corpus.folder.parent.iterdir()] == [corpus.folder.name]


def test_a_mistake_or_a_full_disk_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, tokenizer = write(tmp_path, make_corpus()), make_tokenizer()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module.ArrayWriter, "append", full)
        with pytest.raises(RunFailure, match=r"cannot be written \(No space left on device\)"):
            prepare_corpus(source, tokenizer)
    assert not list((cache / "corpora").iterdir())
    (tmp_path / "bad.txt").write_bytes(b"good line\n" * 101 + b"\xff\n")
    with pytest.raises(InputError, match=r"bad\.txt:102: invalid UTF-8"):
        prepare_corpus(TextFiles(tmp_path / "bad.txt", "line"), tokenizer)
    assert not list((cache / "corpora").iterdir())


def test_documents_without_a_token_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "▁"}\n{"text": "ba"}\n{"text": "▁"}\n', encoding="utf-8")
    tokenizer = make_tokenizer("word")
    corpus = prepare_corpus(TextTable(text=str(tmp_path / "a.jsonl")).as_source(), tokenizer)
    assert (len(corpus), corpus.documents[0].tolist()) == (1, tokenizer.encode("ba"))
    (tmp_path / "b.jsonl").write_text('{"text": "▁"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"b\.jsonl:1: the tokenizer finds no token"):
        prepare_corpus(TextTable(text=str(tmp_path / "b.jsonl")).as_source(), tokenizer)


def test_bytes_are_those_of_the_text(tmp_path: Path) -> None:
    assert prepare_corpus(write(tmp_path, ["東京"] * 13), make_tokenizer("byte")).text_bytes == 6 * 13


@pytest.mark.parametrize("kind", ["bpe", "character"])
def test_a_tokenizer_of_a_text_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    source = write(tmp_path, make_corpus())
    monkeypatch.setattr(tokenizers_module, "_EXCERPT_CHARACTERS", 97)
    first = load_or_train_text_tokenizer(source, kind=kind, vocab_size=97, share=(0.0, 0.5), mask=True, sentinels=2)
    expected = train_tokenizer(kind, make_corpus()[: len(make_corpus()) // 2], vocab_size=97, mask=True, sentinels=2)
    assert first.fingerprint == expected.fingerprint
    other = load_or_train_text_tokenizer(source, kind=kind, vocab_size=97, mask=True, sentinels=2)
    assert other.fingerprint != first.fingerprint
    monkeypatch.setattr(tokenizers_module, "train_tokenizer", None)
    again = load_or_train_text_tokenizer(source, kind=kind, vocab_size=97, share=(0.0, 0.5), mask=True, sentinels=2)
    assert (again.fingerprint, again.mask_id, again.sentinel_ids) == (first.fingerprint, 4, (5, 6))


def test_a_tokenizer_of_a_long_document_sees_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers_module, "_EXCERPT_CHARACTERS", 97)
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", 61)
    lines = write(tmp_path, make_corpus())
    whole = load_or_train_text_tokenizer(TextFiles(lines.path), kind="bpe", vocab_size=211)
    assert whole.fingerprint == train_tokenizer("bpe", make_corpus(), vocab_size=211).fingerprint


def test_texts_of_any_origin_train_a_tokenizer() -> None:
    first = load_or_train_tokenizer(make_corpus(), ["a"], kind="word", vocab_size=97)
    assert load_or_train_tokenizer(["never read"], ["a"], kind="word", vocab_size=97).fingerprint == first.fingerprint
    assert load_or_train_tokenizer(["read now"], ["b"], kind="word", vocab_size=97).fingerprint != first.fingerprint
