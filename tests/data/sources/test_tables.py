"""Tables: the same rows from every form, and the location of faults in a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.sources.tables import DelimitedFile, JsonLinesFile

COLUMNS = {"text": 1, "label": 2}


def csv_rows(path: Path) -> list[tuple[str, ...]]:
    return [values for _, values in DelimitedFile(path, COLUMNS, ",").rows()]


def test_a_long_text_is_read_as_from_tabs(tmp_path: Path) -> None:
    text = "word " * 40_000
    (tmp_path / "a.csv").write_text(f"{text},x\n", encoding="utf-8")
    (tmp_path / "a.tsv").write_text(f"{text}\tx\n", encoding="utf-8")
    assert csv_rows(tmp_path / "a.csv") == [(text, "x")]
    assert [values for _, values in DelimitedFile(tmp_path / "a.tsv", COLUMNS).rows()] == [(text, "x")]


cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=9)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=5))
def test_rows_that_a_program_writes_are_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("a", "b"), *rows])
    assert csv_rows(path) == [("a", "b"), *rows]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('a,b\na, "b"\n', "2: .* at character 4: a quote inside a text that does not begin with a quote"),
        ('a,b"c\n', "1: .* at character 4: a quote"),
        ('a,b\n"c\nd",e"\n', "3: .* at character 5: a quote"),
        ('a,b\n"a" ,b\n', "2: .* at character 4: ',' expected after '\"'"),
        ('a,b\n\nc,"d\ne\n', "3: .* at character 3: unexpected end of data"),
    ],
)
def test_a_wrong_quote_has_a_line_and_a_column(tmp_path: Path, text: str, position: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"a\.csv:{position}"):
        csv_rows(tmp_path / "a.csv")


def test_blank_lines_of_json_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n \t\n{"text": "b"}\n\n', encoding="utf-8")
    assert list(JsonLinesFile(path, {"text": "text"}).rows()) == [(1, ("a",)), (4, ("b",))]


@pytest.mark.parametrize("field", ["text", "other"])
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("[" * 100_000 + "]" * 100_000, "its values are nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "its values are nested too deeply"),
        ("1" * 5_000, "a number has too many digits"),
        ("[1, ]", "at character "),
    ],
)
def test_json_that_no_text_is_in_is_refused_with_its_line(tmp_path: Path, value: str, fault: str, field: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{{"text": "b", "{field}": {value}}}\n', encoding="utf-8")
    with pytest.raises(InputError, match=rf"a\.jsonl:2: expected one JSON object in the line, but {fault}"):
        list(JsonLinesFile(path, {"text": "text"}).rows())


@pytest.mark.parametrize("depth", range(300, 1_100, 100))
def test_a_deep_value_is_refused_at_every_depth(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": 1})[:-2] + "[" * depth + "]" * depth + "}", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.jsonl:1: (field 'text' is|expected one JSON object)"):
        list(JsonLinesFile(path, {"text": "text"}).rows())
