"""Tagged words: schemes, first pieces, stretches that drop nothing, and one sentence for every mistake."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.tagged import TaggedTexts, read_tagged, tagged_texts
from clearhead.data.stores.tag_set import TagSet, find_scheme, to_iob2
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.data.stores.word_chunks import NO_WORD, chunk_words
from clearhead.data.stores.word_splitter import WordSplitter
from clearhead.errors import InputError
from clearhead.tasks.tag.data import parse_tagged_source
from clearhead.tasks.tag.train import collate_tagged
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

FRAMING = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0)
SENTENCES = [
    (["Anna", "Maria", "visits", "New York", "."], ["B-PER", "I-PER", "O", "B-LOC", "O"]),
    (["héllo", "#"], ["O", "B-LOC"]),
    (["Bern"], ["B-LOC"]),
]
LETTERS = "abcdefgh"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def columns(sentences: list[tuple[list[str], list[str]]], separator: str = "\t") -> str:
    return "\n".join(
        "".join(f"{word}{separator}{tag}\n" for word, tag in zip(*sentence, strict=True)) for sentence in sentences
    )


def read(path: str) -> list[tuple[list[str], list[str]]]:
    found = read_tagged(parse_tagged_source({"text": path}))
    return [(list(words), list(tags)) for words, tags in zip(found.words, found.tags, strict=True)]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_form_gives_the_same_sentences(tmp_path: Path, ending: str) -> None:
    records = [json.dumps({"id": 1, "tokens": words, "tags": tags}) for words, tags in SENTENCES]
    assert read(write(tmp_path / f"a.conll{ending}", columns(SENTENCES))) == SENTENCES
    assert read(write(tmp_path / f"b.conll{ending}", f"\n\n{columns(SENTENCES)}\n \n\n")) == SENTENCES
    assert read(write(tmp_path / f"c.jsonl{ending}", "".join(f"{record}\n" for record in records))) == SENTENCES
    spaced = [([word.replace(" ", "_") for word in words], tags) for words, tags in SENTENCES]
    assert read(write(tmp_path / f"d.txt{ending}", columns(spaced, " "))) == spaced
    between = [([f"{word} NN" for word in words], tags) for words, tags in spaced]
    marked = f"-DOCSTART- -X- O\n\n{columns(between, ' ')}"
    assert read(write(tmp_path / f"e.txt{ending}", marked)) == spaced


def test_a_share_keeps_its_places(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", columns(SENTENCES))
    found = read_tagged(parse_tagged_source({"text": path}), (0.3, 1.0))
    assert [list(words) for words in found.words] == [words for words, _ in SENTENCES[1:]]
    assert found.where(0, 1) == f"{path}:8"
    assert tagged_texts(parse_tagged_source({"text": path}))[0] == "Anna Maria visits New York ."


def data_of(*sentences: str) -> TaggedTexts:
    tags = [sentence.split() for sentence in sentences]
    return TaggedTexts([["w"] * len(row) for row in tags], tags, lambda row, word: f"f:{row}.{word}")


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-A I-A O B-B B-B", "O O"], "IOB2"),
        (["I-A I-A O I-B B-B", "I-A"], "IOB1"),
        (["I-A I-B I-A"], "IOB1"),
        (["B-A E-A S-B O", "B-B I-B E-B"], "BIOES"),
        (["S-A"], "BIOES"),
        (["NN VB O -LRB-", "B-"], "plain"),
    ],
)
def test_schemes_are_recognised(sentences: list[str], scheme: str) -> None:
    assert find_scheme(data_of(*sentences)) == scheme


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (["B-A O", "O I-A"], r"^f:1.1: tag 'I-A' cannot follow 'O' where other entities begin with B- \(IOB2\)"),
        (["B-A I-B"], "^f:0.1: tag 'I-B' cannot follow 'B-A'"),
        (["S-A I-A E-A"], "^f:0.1: tag 'I-A' cannot follow 'S-A' in the scheme BIOES"),
        (["S-A B-A", "O"], "^f:0.1: tag 'O' cannot follow 'B-A' in the scheme BIOES"),
        (["B-A I-A E-B"], "^f:0.2: tag 'E-B' cannot follow 'I-A' in the scheme BIOES"),
        (["B-A NN"], '^f:0.1: the tag is "NN", but other tags here begin with B- or I-'),
    ],
)
def test_tags_that_follow_no_scheme(sentences: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_scheme(data_of(*sentences))


def to_iob1(tags: list[str]) -> list[str]:
    """The other way: a B- stays only where the entity before is of the same type and ends right here."""
    pairs = zip(["O", *tags], tags, strict=False)
    return [f"I-{tag[2:]}" if tag[0] == "B" and before[2:] != tag[2:] else tag for before, tag in pairs]


def random_iob2(draw: random.Random, length: int) -> list[str]:
    tags: list[str] = []
    while len(tags) < length:
        kind = draw.choice("AB")
        tags += draw.choice([["O"], [f"B-{kind}"], [f"B-{kind}", f"I-{kind}"], [f"B-{kind}"] + [f"I-{kind}"] * 2])
    return tags


def test_iob1_becomes_iob2() -> None:
    draw = random.Random(1)
    for _ in range(200):
        tags = random_iob2(draw, 11)
        assert to_iob2(to_iob1(tags)) == tags
        assert find_scheme(TaggedTexts([["w"] * len(tags)], [tags], lambda row, word: "")) in ("IOB2", "plain")


def test_every_type_has_all_tags_of_its_scheme() -> None:
    assert TagSet.of([["B-A", "O"], ["B-B"]], "IOB2").names == ("O", "B-A", "I-A", "B-B", "I-B")
    assert TagSet.of([["S-A"]], "BIOES").names == ("O", "B-A", "I-A", "E-A", "S-A")
    assert TagSet.of([["NN", "VB", "O"]], "plain").names == ("O", "NN", "VB")
    assert TagSet.of([["VB", "NN"]], "plain").fallback == 0


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
        found, shortened = chunk_words(words, tokenizer, room=room)
        ids = tokenizer.encode(" ".join(words))
        assert all(0 < len(stretch.ids) <= room for stretch in found)
        assert [word for stretch in found for word in stretch.words if word != NO_WORD] == list(range(count))
        if not shortened:
            assert [index for stretch in found for index in stretch.ids] == ids
        if room == 400:
            assert len(found) == 1
        # What a stretch begins with is a word, except the very first.
        assert all(stretch.words[0] != NO_WORD for stretch in found[1:])


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.kind)
def test_the_first_piece_of_a_word_begins_it(tokenizer: Tokenizer) -> None:
    words = ["abc", "é", "(", "ab", "ab", ")", "hgfedcba"]
    (found,), _ = chunk_words(words, tokenizer, room=400)
    places = [place for place, word in enumerate(found.words) if word != NO_WORD]
    borders = [*places, len(found.ids)]
    for word, (start, end) in zip(words, itertools.pairwise(borders), strict=True):
        text = tokenizer.decode(found.ids[start:end]).strip()
        assert text == word or (tokenizer.unk_id in found.ids[start:end] and tokenizer.roles.unk is not None)


def test_stretches_are_even() -> None:
    tokenizer = train_tokenizer("split", ["a b"], vocab_size=10)
    found, _ = chunk_words(["a"] * 25, tokenizer, room=12)
    assert [len(stretch.ids) for stretch in found] == [9, 9, 7]


def test_a_word_longer_than_a_stretch_keeps_its_front() -> None:
    tokenizer = train_tokenizer("character", ["abcdefgh "], vocab_size=20)
    found, shortened = chunk_words(["ab", "abcdefgh", "c"], tokenizer, room=5)
    assert [tokenizer.decode(stretch.ids) for stretch in found] == ["ab ", "abcde", "c"]
    assert shortened == 1


def deaf_to(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every tokenizer drop a letter without a trace, as published ones drop control characters."""
    plain = Tokenizer.encode_with_spans

    def encode(self: Tokenizer, text: str) -> Any:
        kept = [(index, span) for index, span in zip(*plain(self, text), strict=True) if text[slice(*span)] != letter]
        return [index for index, _ in kept], [span for _, span in kept]

    monkeypatch.setattr(Tokenizer, "encode_with_spans", encode)


def test_a_word_without_a_piece_is_in_no_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer("character", ["ab c"], vocab_size=20)
    deaf_to("c", monkeypatch)
    (found,), _ = chunk_words(["c", "ab", "cc", "acb", "c"], tokenizer, room=30)
    assert [word for word in found.words if word != NO_WORD] == [1, 3]
    assert chunk_words(["c", "cc"], tokenizer, room=30) == ([], 0)
    assert chunk_words(["c"], tokenizer, room=30) == ([], 0)


def make_store(folder: Path, sentences: list[tuple[list[str], list[str]]], **options: Any) -> TagStore:
    path = write(folder / f"{options.pop('name', 't')}.conll", columns(sentences))
    tokenizer = train_tokenizer("character", [" ".join(words) for words, _ in sentences], vocab_size=90)
    return prepare_tagged(parse_tagged_source({"text": path}), tokenizer, **{"max_length": 30, **options})


def tagged_batches(store: TagStore) -> EpochBatches[Batch]:
    plan = LengthSortedPlan(store.lengths, batch_tokens=90, seed=3)
    return training_batches(store, plan, lambda rows: collate_tagged(store, rows, FRAMING))


def random_sentences(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    draw = random.Random(seed)
    tags = [random_iob2(draw, draw.randint(1, 17)) for _ in range(count)]
    return [(random_words(draw, len(row)), row) for row in tags]


def test_batches_label_first_pieces_and_nothing_else(tmp_path: Path) -> None:
    sentences = random_sentences(31, 4)
    store = make_store(tmp_path, sentences)
    tokenizer = train_tokenizer("character", [" ".join(words) for words, _ in sentences], vocab_size=90)
    assert store.names_of(store.word_tags) == [tags for _, tags in sentences]
    said: dict[int, list[tuple[str, str]]] = {}
    for batch in validation_batches(store, lambda rows: collate_tagged(store, rows, FRAMING), batch_tokens=200):
        assert batch.ids.numel() <= 200
        assert batch.num_labels == int((batch.labels != NO_LABEL).sum())
        for row, ids, labels in zip(batch.rows, batch.ids.tolist(), batch.labels.tolist(), strict=True):
            assert (ids[0], ids[store.lengths[row] - 1]) == (2, 3)
            said[row] = [
                (tokenizer.tokens([index])[0], store.tags.names[label])
                for index, label in zip(ids, labels, strict=True)
                if label != NO_LABEL
            ]
    flat = [item for row in sorted(said) for item in said[row]]
    assert flat == [(word[0], tag) for words, tags in sentences for word, tag in zip(words, tags, strict=True)]
    assert f"{store.report.cut} cut into chunks of at most 30 tokens" in str(store.report)
    assert store.report.cut == sum(len(" ".join(words)) > 28 for words, _ in sentences) > 5


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
    assert again.splitter == WordSplitter()
    monkeypatch.undo()
    (first.folder / "tag_ids.bin").write_bytes(b"")
    assert make_store(tmp_path, sentences).identity == first.identity


def test_held_out_tags_must_be_known(tmp_path: Path) -> None:
    known = make_store(tmp_path, SENTENCES).tags
    held_out = make_store(tmp_path, [(["a", "b"], ["I-LOC", "O"])], tags=known, name="v")
    assert held_out.names_of(held_out.word_tags) == [["B-LOC", "O"]]
    with pytest.raises(InputError, match=r'w.conll:2: the tag "B-ORG" is not among the 5 of the training data'):
        make_store(tmp_path, [(["a", "b"], ["B-LOC", "B-ORG"])], tags=known, name="w")


def test_a_word_without_a_piece_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf_to("c", monkeypatch)
    sentences = [(["c"], ["X"]), (["ab", "c", "b"], ["X", "Y", "Z"])]
    store = make_store(tmp_path, sentences)
    assert store.report.unread == 2
    assert "2 words without a token" in str(store.report)
    assert [store.tags.names[tag] for tag in store.word_tags[store.words[store.words != NO_WORD]]] == ["X", "Z"]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tX\nb\n", ':2: expected a word and its tag with a tab between them, received "b"'),
        ("a X\nb\n", ':2: expected a word and its tag with white space between them, received "b"'),
        ("a\tX\n\tY\n", ":2: expected a word and its tag"),
        ("a\tX\nb\tX\n", ":1: all 2 words from here on have the tag 'X'; a tagger needs at least two"),
        ("\n\n", "expected at least one tagged sentence"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "t.conll", text)
    with pytest.raises(InputError, match=re.escape(message)):
        prepare_tagged(parse_tagged_source({"text": path}), train_tokenizer("byte", [], vocab_size=260), max_length=9)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tokens": ["a"], "tags": []}, "expected a tag for each of 1 words, got 0"),
        ({"token": ["a"], "tags": []}, "there is no field 'tokens'; the fields are 'token', 'tags' (did you mean"),
        ({"tokens": "a", "tags": ["X"]}, "field 'tokens' is \"a\"; expected a list of texts"),
        ({"tokens": ["a", " "], "tags": ["X", "X"]}, "item 2 of field 'tokens' is \" \"; expected a text"),
        ({"tokens": ["a"], "tags": [3]}, "item 1 of field 'tags' is 3; expected a text"),
    ],
)
def test_faulty_records(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"tokens": [], "tags": []}}\n{json.dumps(record)}\n')
    with pytest.raises(InputError, match=re.escape(f"{path}:2: {message}")):
        read(path)


@pytest.mark.parametrize("table", [{"text": 3}, {"text": "a", "labels": "b"}, {"txt": "a"}])
def test_tables_that_cannot_be_meant(table: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        parse_tagged_source(table)


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
