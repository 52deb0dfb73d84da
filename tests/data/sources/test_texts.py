"""Sources of text: every form gives the same documents, shares leave no gap, and mistakes have a location."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead.data.sources.lines as lines_module
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.data.sources.named import text_table
from clearhead.data.sources.run_file_tables import parse_table
from clearhead.data.sources.tables import Dataset, JsonLinesFile
from clearhead.data.sources.texts import (
    TEXT_FORMS,
    DocumentKind,
    TextFiles,
    TextRows,
    TextSource,
    measure,
    read_chunks,
    text_shards,
)

POEM = "eins\nzwei\n\n \ndrei\u2028vier\n\n\n\tfünf\nsechs\n"
PARAGRAPHS = ["eins\nzwei", "drei\u2028vier", "\tfünf\nsechs"]
LINES = ["eins", "zwei", "drei\u2028vier", "\tfünf", "sechs"]


def write(path: Path, text: str | bytes) -> Path:
    content = text if isinstance(text, bytes) else text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def documents(source: TextSource, share: tuple[float, float] = (0.0, 1.0)) -> list[str]:
    texts: list[str] = []
    for chunk in read_chunks(source, share, measure(source)):
        if chunk.starts:
            texts.append("")
        texts[-1] += chunk.text
    return texts


def json_lines(path: Path, field: str = "text", document: DocumentKind = "file") -> TextRows:
    return TextRows(JsonLinesFile(path, {"text": field}), document)


def dataset(
    name: str, split: str, field: str = "text", config: str | None = None, document: DocumentKind = "file"
) -> TextRows:
    return TextRows(Dataset(name, split, {"text": field}, config), document)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_a_file_is_one_document_or_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, block: int
) -> None:
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", block)
    path = write(tmp_path / f"poem.txt{ending}", POEM.replace("\n", "\r\n"))
    assert documents(TextFiles(path)) == [POEM]
    assert documents(TextFiles(path, "line")) == LINES
    assert documents(TextFiles(path, "paragraph")) == PARAGRAPHS


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.py", "b\n")
    write(tmp_path / "a" / "z.py", "z\n")
    write(tmp_path / "a" / "deep" / "c.py.gz", "c\n")
    write(tmp_path / "a-b.py", "a-b\n")
    write(tmp_path / "empty.py", "")
    write(tmp_path / "note.txt", "note\n")
    write(tmp_path / ".hidden" / "h.py", b"\xff")
    write(tmp_path / ".h.py", b"\xff")
    assert documents(TextFiles(tmp_path)) == ["a-b\n", "c\n", "z\n", "b\n", "note\n"]
    assert documents(TextFiles(tmp_path, pattern="*.py")) == ["a-b\n", "z\n", "b\n"]
    assert documents(TextFiles(tmp_path, pattern="a/*.py")) == ["z\n"]
    assert TextFiles(tmp_path, pattern="*.py").location(1).endswith("z.py:1")
    with pytest.raises(
        InputError, match=r"no file in this folder matches '\*\.md'; its files end in \.gz, \.py, \.txt"
    ):
        documents(TextFiles(tmp_path, pattern="*.md"))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_records_give_texts_whole_or_cut(tmp_path: Path, ending: str) -> None:
    records = [{"page": {"text": POEM}, "n": 1}, {"page": {"text": " "}}, {"page": {"text": "sieben"}}]
    path = write(tmp_path / f"a.jsonl{ending}", "".join(json.dumps(record) + "\n" for record in records))
    assert documents(json_lines(path, "page.text")) == [POEM, "sieben"]
    assert documents(json_lines(path, "page.text", "line")) == [*LINES, "sieben"]
    assert documents(json_lines(path, "page.text", "paragraph")) == [*PARAGRAPHS, "sieben"]
    assert json_lines(path, "page.text").location(1).endswith(f"a.jsonl{ending}:3")


def test_a_place_is_where_the_document_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "poem.txt", POEM)
    assert [TextFiles(path, "line").location(index) for index in range(5)] == [f"{path}:{n}" for n in (1, 2, 5, 8, 9)]
    assert [TextFiles(path, "paragraph").location(index) for index in range(3)] == [f"{path}:{n}" for n in (1, 5, 8)]
    assert TextFiles(path).location(0) == f"{path}:1"


class FakeDataset(list[dict[str, Any]]):
    _fingerprint = "f00d"


def test_a_data_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("datasets")
    rows = FakeDataset([{"text": POEM}, {"text": "sieben"}])
    monkeypatch.setattr(library, "load_dataset", lambda name, config, split: rows, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert documents(dataset("poems", "train")) == [POEM, "sieben"]
    assert documents(dataset("poems", "train", document="line"), (0.5, 1.0)) == [*LINES[3:], "sieben"]
    assert "f00d" in dataset("poems", "train").identity()
    assert dataset("poems", "train").location(1) == "poems[train] row 1"
    with pytest.raises(InputError, match=r"poems\[train\] row 0: there is no field 'txt'.*did you mean 'text'"):
        documents(dataset("poems", "train", "txt"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=re.escape(make_install_command(extra="datasets"))):
        documents(dataset("poems", "train"))


@settings(deadline=None, max_examples=60)
@given(borders=st.lists(st.floats(0.001, 0.999), min_size=1, max_size=3), block=st.sampled_from([5, 1 << 20]))
def test_shares_that_meet_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, borders: list[float], block: int
) -> None:
    path = write(tmp_path_factory.mktemp("share") / "poem.txt", POEM * 7)
    cuts = [0.0, *sorted(set(borders)), 1.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_BLOCK_BYTES", block)
        for document, join in (("file", "".join), ("line", list), ("paragraph", list)):
            source = TextFiles(path, document)
            texts: list[str] = []
            for share in pairwise(cuts):
                try:
                    texts += documents(source, share)
                except InputError as error:
                    assert "no whole" in str(error)
            assert join(texts) == join(documents(source))


def test_the_share_of_one_document_is_by_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "one.txt", "äbcdefghijklm")
    assert documents(TextFiles(path), (0.0, 0.9)) == ["äbcdefghijk"]
    assert documents(TextFiles(path), (0.9, 1.0)) == ["lm"]
    (only,) = read_chunks(TextFiles(path), (0.9, 1.0), measure(TextFiles(path)))
    assert only.starts
    with pytest.raises(InputError, match=r"one\.txt:1: no whole character is in the share 0\.01 to 0\.02 of 13 char"):
        documents(TextFiles(path), (0.01, 0.02))
    with pytest.raises(InputError, match=r"the share of a text is 0\.5 to 0\.5; expected two rising numbers"):
        documents(TextFiles(path), (0.5, 0.5))


def test_shakespeare_is_split_as_others_split_it(data_dir: Path) -> None:
    path = data_dir / "tinyshakespeare" / "input.txt"
    text = path.read_text(encoding="utf-8")
    assert documents(TextFiles(path), (0.0, 1 - 0.1)) == [text[: int(len(text) * 0.9)]]
    assert documents(TextFiles(path), (1 - 0.1, 1.0)) == [text[int(len(text) * 0.9) :]]
    assert measure(TextFiles(path)).characters == 1_115_394


def test_the_identity_follows_content(tmp_path: Path) -> None:
    first, copy = write(tmp_path / "a" / "x.txt", POEM), write(tmp_path / "b" / "y.txt", POEM)
    assert TextFiles(first).identity() == TextFiles(copy).identity() == TextFiles(tmp_path / "a").identity()
    record = write(tmp_path / "c.jsonl", '{"text": "a", "other": "a"}\n')
    every = [
        TextFiles(first),
        TextFiles(first, "line"),
        TextFiles(tmp_path, pattern="*.txt"),
        TextFiles(record),
        json_lines(record),
        json_lines(record, "other"),
        json_lines(record, document="line"),
    ]
    assert len({json.dumps(source.identity()) for source in every}) == len(every)
    before = TextFiles(tmp_path / "a").identity()
    write(first, POEM + "!")
    assert TextFiles(tmp_path / "a").identity() != before


def test_mistakes_have_a_place(tmp_path: Path) -> None:
    cases: list[tuple[TextSource, str]] = [
        (TextFiles(tmp_path / "none.txt"), r"none\.txt: there is no such file"),
        (TextFiles(write(tmp_path / "empty.txt", "")), r"empty\.txt: the file is empty"),
        (
            TextFiles(write(tmp_path / "blank.txt", " \n\n")),
            r"blank\.txt: expected text, found nothing but white space",
        ),
        (TextFiles(write(tmp_path / "latin.txt", b"a\ncaf\xe9")), r"latin\.txt:2: invalid UTF-8.*the file to UTF-8$"),
        (TextFiles(tmp_path / "latin"), r"latin.b\.txt:1: invalid UTF-8.*leave it out: only the texts in the folder"),
        (
            TextFiles(tmp_path / "picture"),
            r"a\.png: expected text in UTF-8, .* bytes of value 0.*; or leave it out: pattern = \"\*\.md\"",
        ),
        (json_lines(write(tmp_path / "e.jsonl", "")), r"e\.jsonl: the file is empty"),
        (json_lines(write(tmp_path / "a.jsonl", '{"text": "a"}\n{"txt": "a"}')), r"a\.jsonl:2: there is no field"),
        (json_lines(write(tmp_path / "b.jsonl", '{"text": "a"}\nx')), r"b\.jsonl:2: expected one JSON object"),
        (json_lines(write(tmp_path / "c.jsonl", '{"text": 3}')), r"c\.jsonl:1: field 'text' is 3; expected a text"),
    ]
    write(tmp_path / "latin" / "b.txt", b"\xe9")
    for name, content in {"a.png": b"\x89PNG\0\0", "b.md": b"b", "c.md": b"c", "d.py": b"d", "e.png": b"e"}.items():
        write(tmp_path / "picture" / name, content)
    for source, message in cases:
        with pytest.raises(InputError, match=message):
            documents(source)
    packed = gzip.compress("".join(f"line {n * n * 7919 % 10007}\n" for n in range(20_011)).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"cut\.gz:\d+: the gzip data is cut off here"):
        documents(TextFiles(tmp_path / "cut.gz", "line"))


def test_a_stream_holds_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", 64)
    source = TextFiles(write(tmp_path / "long.txt", "some words in a line\n" * 997))
    lengths = [len(stretch.text) for stretch in read_chunks(source, (0.0, 1.0), measure(source))]
    assert max(lengths) <= 64 and sum(lengths) == 21 * 997


def test_tables_of_a_run_file(tmp_path: Path) -> None:
    expected: list[tuple[dict[str, Any], TextSource]] = [
        ({"text": "a.txt"}, TextFiles(Path("a.txt"))),
        ({"text": "a", "document": "line", "pattern": "*.py"}, TextFiles(Path("a"), "line", "*.py")),
        ({"text": "a.jsonl"}, json_lines(Path("a.jsonl"))),
        ({"text": "a.jsonl.gz", "field": "b"}, json_lines(Path("a.jsonl.gz"), "b")),
        ({"dataset": "a", "split": "s"}, dataset("a", "s")),
        (
            {"dataset": "a", "split": "s", "field": "f", "config": "c", "document": "paragraph"},
            dataset("a", "s", "f", "c", "paragraph"),
        ),
    ]
    for table, source in expected:
        assert parse_table(table, TEXT_FORMS).as_source() == source


@pytest.mark.parametrize(
    ("table", "messages"),
    [
        ({}, ["exactly one form (text; or dataset)", "got nothing"]),
        ({"txt": "a"}, ["did you mean 'text'"]),
        ({"text": "a", "dataset": "b"}, ["exactly one form"]),
        (
            {"text": "", "document": "lines"},
            ["2 faults", "'text' is ''", "'document' is 'lines'", "did you mean 'line'"],
        ),
        ({"text": "a", "split": "s"}, ["'split' does not belong to data given by 'text'"]),
        ({"dataset": "a"}, ["'split' is missing"]),
        ({"text": "a.txt", "field": "f"}, ["'field' belongs to JSON lines"]),
        ({"text": "a.jsonl", "pattern": "*"}, ["'pattern' chooses files of a folder"]),
        ({"text": __file__, "pattern": "*"}, ["'pattern' chooses files of a folder"]),
    ],
)
def test_wrong_tables_of_a_run_file(table: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_table(table, TEXT_FORMS).as_source()
    for message in messages:
        assert re.search(re.escape(message), str(caught.value))


def source_of(path: Path, **keys: str) -> TextSource:
    source: TextSource = parse_table({"text": str(path), **keys}, TEXT_FORMS).as_source()
    return source


@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_json_lines_in_a_folder_are_read_as_alone(tmp_path: Path, document: DocumentKind) -> None:
    texts = ["ein Hund {x}", POEM, '"zwei": 2']
    lines = "".join(json.dumps({"body": text, "id": 7}) + "\n" for text in texts)
    alone = [write(tmp_path / "alone" / name, lines) for name in ("a.jsonl", "b.jsonl.gz")]
    for path in alone:
        write(tmp_path / "shards" / "deep" / path.name, path.read_bytes() if path.suffix == ".jsonl" else lines)
    write(tmp_path / "shards" / "deep" / "empty.jsonl", "")
    write(tmp_path / "shards" / "z.txt", POEM)
    keys = {"document": document}
    expected = [text for path in alone for text in documents(source_of(path, field="body", **keys))]
    source = source_of(tmp_path / "shards", field="body", **keys)
    assert documents(source) == [*expected, *documents(source_of(tmp_path / "shards" / "z.txt", **keys))]
    streamed = [chunk.text for shard in text_shards(source) for chunk in shard.chunks()]
    assert streamed == [chunk.text for chunk in source.chunks()]
    assert source.location(0) == f"{tmp_path}/shards/deep/a.jsonl:1"
    assert source.identity() != source_of(tmp_path / "shards", field="id", **keys).identity()
    with pytest.raises(InputError, match=r"a.jsonl:1: there is no field 'text'; the fields are 'body', 'id'; choose"):
        documents(source_of(tmp_path / "shards", **keys))


def test_endings_in_capitals_are_those_of_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "shards" / "A.JSONL", json.dumps({"text": POEM}) + "\n")
    assert documents(source_of(tmp_path / "shards")) == [POEM]


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv.gz", "a.parquet", "a.ndjson", "A.CSV"])
def test_other_tables_are_refused_with_the_option_that_reads_them(tmp_path: Path, name: str) -> None:
    """The identity is refused too: the text of an equal file with another name may be in the cache."""
    path = write(tmp_path / "shards" / name, "text\nab\n")
    write(tmp_path / "shards" / "z.txt", POEM)
    for source in (source_of(path), source_of(tmp_path / "shards")):
        with pytest.raises(InputError, match=f"{name} is a table: name the column .* with 'field' .*dataset = "):
            measure(source)
        with pytest.raises(InputError, match=f"{name} is a table"):
            list(text_shards(source)[0].chunks())
        with pytest.raises(InputError, match=f"{name} is a table"):
            source.identity()
    assert documents(source_of(tmp_path / "shards", pattern="*.txt")) == [POEM]
    with pytest.raises(InputError, match=r"'field' belongs to JSON lines, but no file in .* ends in .jsonl"):
        documents(source_of(tmp_path / "shards", pattern="*.txt", field="text"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,body\n1,"ein, Hund"\n2,zwei\n'),
        ("a.tsv", "id\tbody\n1\tein, Hund\n2\tzwei\n"),
        ("a.json", json.dumps([{"id": 1, "body": "ein, Hund"}, {"id": 2, "body": "zwei"}])),
        ("a.csv.gz", 'id,body\n1,"ein, Hund"\n2,zwei\n'),
    ],
)
def test_the_option_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    table = text_table(write(tmp_path / name, content), "body")
    assert table == {"dataset": str(tmp_path / name), "split": "train", "field": "body"}
    assert documents(parse_table(table, TEXT_FORMS).as_source()) == ["ein, Hund", "zwei"]
