"""Tagged words: every data format gives the same sentences, and every mistake a message with its location."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.tag.data import DATA, read_tagged, tagged_texts

SENTENCES = [
    (["Anna", "Maria", "visits", "New York", "."], ["B-PER", "I-PER", "O", "B-LOC", "O"]),
    (["héllo", "#"], ["O", "B-LOC"]),
    (["Bern"], ["B-LOC"]),
]


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def columns(sentences: list[tuple[list[str], list[str]]], separator: str = "\t") -> str:
    return "\n".join(
        "".join(f"{word}{separator}{tag}\n" for word, tag in zip(*sentence, strict=True)) for sentence in sentences
    )


def read(path: str) -> list[tuple[list[str], list[str]]]:
    table = read_tagged(DATA.source({"text": path}))
    return [(list(words), list(tags)) for words, tags in zip(table["tokens"], table["tags"], strict=True)]


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


def test_other_spaces_belong_to_a_word(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "10\u00a0000 O\nfr.\u2009\u3000 \tB-A\n")
    assert read(path) == [(["10\u00a0000", "fr.\u2009\u3000"], ["O", "B-A"])]
    path = write(tmp_path / "b.txt", "10 O\n20\u00a0O\n")
    with pytest.raises(InputError, match=r'b.txt:2: expected a word and its tag with a blank .*"20\\u00a0O"'):
        read(path)


def test_a_share_keeps_its_places(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", columns(SENTENCES))
    rows = [([f"{word}{row}" for word in words], tags) for row in range(9) for words, tags in SENTENCES]
    many = write(tmp_path / "b.conll", columns(rows))
    whole, last_rows = read_tagged(DATA.source({"text": many})), read_tagged(DATA.source({"text": many}), (0.7, 1.0))
    places = [whole.location(row, 1) for row in range(len(whole)) if whole["tokens"][row] in last_rows["tokens"]]
    assert [last_rows.location(row, 1) for row in range(len(last_rows))] == places and len(last_rows) > 4
    assert tagged_texts(DATA.source({"text": path}))[0] == "Anna Maria visits New York ."


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tokens": ["a"], "tags": []}, "expected a tag for each of the 1 words, got 0"),
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
        DATA.source(table)
