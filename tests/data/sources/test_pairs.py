"""Sources of pairs: every form gives the same pairs, and every mistake a message with its location."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.data.sources.pairs import PAIR_FORMS, parallel_files
from clearhead.data.sources.pairs import read_pairs as read_table
from clearhead.data.sources.run_file_tables import parse_table
from clearhead.data.sources.tables import Dataset, DelimitedFile, JsonLinesFile, TableSource

PAIRS = [("ein Haus", "a house"), ("", "empty"), ("zwei\u2028Häuser", "two houses"), ('"a', 'b"')]


def read_pairs(source: TableSource) -> list[tuple[str, str]]:
    table = read_table(source)
    return list(zip(table["source"], table["target"], strict=True))


def tsv(path: Path, source: int | str = 1, target: int | str = 2) -> DelimitedFile:
    return DelimitedFile(path, {"source": source, "target": target})


def jsonl(path: Path, source: str, target: str) -> JsonLinesFile:
    return JsonLinesFile(path, {"source": source, "target": target})


def dataset(name: str, split: str, source: str, target: str, config: str | None = None) -> Dataset:
    return Dataset(name, split, {"source": source, "target": target}, config)


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def lines(texts: list[str]) -> str:
    return "".join(text + "\n" for text in texts)


def every_form(folder: Path, ending: str) -> list[TableSource]:
    records = [{"translation": {"de": source, "en": target}, "n": 1} for source, target in PAIRS]
    flat = [{"de": source, "en": target} for source, target in PAIRS]
    rows = [f"{target}\tx\t{source}" for source, target in PAIRS]
    return [
        parallel_files(
            write(folder / f"a.de{ending}", lines([pair[0] for pair in PAIRS])),
            write(folder / f"a.en{ending}", lines([pair[1] for pair in PAIRS])),
        ),
        tsv(write(folder / f"a.tsv{ending}", lines(rows)), 3, 1),
        tsv(write(folder / f"b.tsv{ending}", lines(["en\tnote\tde", *rows])), "de", "en"),
        jsonl(
            write(folder / f"a.jsonl{ending}", lines([json.dumps(record) for record in records])),
            "translation.de",
            "translation.en",
        ),
        jsonl(write(folder / f"b.jsonl{ending}", lines([json.dumps(row) for row in flat])), "de", "en"),
    ]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_form_gives_the_same_pairs(tmp_path: Path, ending: str) -> None:
    for source in every_form(tmp_path, ending):
        assert read_pairs(source) == PAIRS


def test_a_place_is_where_the_pair_stands(tmp_path: Path) -> None:
    ends = ["a.de:3", "a.tsv:3", "b.tsv:4", "a.jsonl:3", "b.jsonl:3"]
    for source, end in zip(every_form(tmp_path, ""), ends, strict=True):
        assert read_table(source).location(2).endswith(end)


def test_the_identity_follows_content_not_name(tmp_path: Path) -> None:
    first = every_form(tmp_path, "")
    (tmp_path / "copy").mkdir()
    copies = every_form(tmp_path / "copy", "")
    assert [source.identity() for source in first] == [source.identity() for source in copies]
    assert len({json.dumps(source.identity()) for source in first}) == len(first)
    before = first[0].identity()
    write(tmp_path / "a.en", "changed\n" * len(PAIRS))
    assert first[0].identity() != before


@pytest.mark.parametrize("side", ["de", "en"])
@pytest.mark.parametrize("gap", [0, 7, 401, 1012])
def test_unequal_files_name_the_line_that_lost_its_partner(tmp_path: Path, side: str, gap: int) -> None:
    draw = random.Random(gap)
    lengths = [draw.randint(3, 120) for _ in range(1013)]
    texts = {
        "de": ["ä" * round(length * draw.uniform(1.05, 1.35)) for length in lengths],
        "en": ["e" * length for length in lengths],
    }
    del texts["en" if side == "de" else "de"][gap]
    source = parallel_files(*(write(tmp_path / f"a.{name}", lines(texts[name])) for name in ("de", "en")))
    with pytest.raises(InputError, match=r"a\.de has 101\d lines, but .*a\.en has 101\d") as caught:
        read_pairs(source)
    location = re.search(rf"a\.{side}:(\d+)", str(caught.value))
    assert location is not None
    assert abs(int(location[1]) - (gap + 1)) <= 2


def test_surplus_lines_at_the_end_are_said_to_be_there(tmp_path: Path) -> None:
    texts = [" ".join(["word"] * (n * 37 % 19 + 1)) for n in range(97)]
    source = parallel_files(
        write(tmp_path / "a.de", lines([*texts, *["surplus"] * 5])), write(tmp_path / "a.en", lines(texts))
    )
    with pytest.raises(InputError, match=r"102 lines, but .* has 97; .*a\.de:98 and the lines after it have no"):
        read_pairs(source)


def test_unequal_real_translations(data_dir: Path, tmp_path: Path) -> None:
    german = (data_dir / "multi30k" / "val.de").read_text(encoding="utf-8").split("\n")
    english = (data_dir / "multi30k" / "val.en").read_text(encoding="utf-8")
    source = parallel_files(
        write(tmp_path / "a.de", "\n".join(german[:500] + german[501:])), write(tmp_path / "a.en", english)
    )
    with pytest.raises(InputError) as caught:
        read_pairs(source)
    location = re.search(r"a\.en:(\d+)", str(caught.value))
    assert location is not None and abs(int(location[1]) - 501) <= 12


def test_tsv_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "german\tenglish\na\tb\nonly\n")
    with pytest.raises(
        InputError, match=r"a\.tsv:3: expected 2 columns, separated by tabs, as in the first line, got 1: 1 "
    ):
        read_pairs(tsv(path))
    with pytest.raises(InputError, match=r"a\.tsv:1: there is no column 'germn'.*\(did you mean 'german'\?\)"):
        read_pairs(tsv(path, "germn", "english"))
    write(tmp_path / "a.tsv", "german\tenglish\n")
    with pytest.raises(InputError, match="expected at least one pair, found none"):
        read_pairs(tsv(path, "german", "english"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"de": "x", "en": ', r"a\.jsonl:2: expected one JSON object in the line, but at character \d+"),
        ('["x"]', r"a\.jsonl:2: expected an object with the field 'de'"),
        (
            '{"de": "x", "eng": "y"}',
            r"a\.jsonl:2: there is no field 'en'; the fields are 'de', 'eng' \(did you mean 'eng'",
        ),
        ('{"de": 3, "en": "y"}', r"a\.jsonl:2: field 'de' is 3; expected a text"),
        ('{"de": null, "en": "y"}', r"a\.jsonl:2: field 'de' is null; expected a text"),
        ('{"de": "\\ud800", "en": "y"}', r"a\.jsonl:2: field 'de' holds a lone surrogate"),
    ],
)
def test_json_lines_mistakes(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"de": "x", "en": "y"}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_pairs(jsonl(path, "de", "en"))


class FakeDataset(list[dict[str, Any]]):
    _fingerprint = "f00d"


def fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None, split: str) -> FakeDataset:
        if name != "wmt":
            raise FileNotFoundError(f"no dataset {name}\nlong trace")
        return FakeDataset({"translation": {"de": source, "en": target}} for source, target in PAIRS)

    library = types.ModuleType("datasets")
    monkeypatch.setattr(library, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_a_data_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(monkeypatch)
    source = dataset("wmt", "train", "translation.de", "translation.en", config="de-en")
    assert read_pairs(source) == PAIRS
    assert "f00d" in source.identity()
    with pytest.raises(InputError, match=r"wmt\[train\] row 0: there is no field 'fr'"):
        read_pairs(dataset("wmt", "train", "translation.fr", "translation.en"))
    with pytest.raises(InputError, match=r"dataset 'wnt', split 'train', cannot be loaded: no dataset wnt$"):
        read_pairs(dataset("wnt", "train", "de", "en"))


def test_a_data_set_without_the_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=re.escape(make_install_command(extra="datasets"))):
        read_pairs(dataset("wmt", "train", "de", "en"))


def test_tables_of_a_run_file() -> None:
    de, en = {"source_field": "de"}, {"target_field": "en"}
    expected: list[tuple[dict[str, Any], TableSource]] = [
        ({"source": "a", "target": "b"}, parallel_files(Path("a"), Path("b"))),
        ({"tsv": "a"}, tsv(Path("a"))),
        ({"tsv": "a", "source_column": "x", "target_column": "y"}, tsv(Path("a"), "x", "y")),
        ({"tsv": "a", "target_column": 4}, tsv(Path("a"), 1, 4)),
        ({"jsonl": "a", **de, **en}, jsonl(Path("a"), "de", "en")),
        ({"dataset": "a", "split": "s", **de, **en}, dataset("a", "s", "de", "en")),
        ({"dataset": "a", "split": "s", **de, **en, "config": "c"}, dataset("a", "s", "de", "en", "c")),
    ]
    for table, source in expected:
        assert parse_table(table, PAIR_FORMS).as_source() == source


@pytest.mark.parametrize(
    ("table", "messages"),
    [
        ({}, ["exactly one form", "got nothing"]),
        ({"sauce": "a"}, ["exactly one form", "did you mean 'source'"]),
        ({"source": "a", "target": "b", "tsv": "c"}, ["exactly one form", "'tsv'"]),
        ({"source": "a"}, ["'target' is missing"]),
        ({"target": "a"}, ["'source' is missing"]),
        ({"source": 3, "target": ""}, ["2 faults", "'source' is 3", "'target' is ''"]),
        ({"jsonl": "a", "source_feld": "x"}, ["'source_feld' does not belong", "did you mean 'source_field'"]),
        (
            {"tsv": "a", "source_column": 0, "target_column": True},
            ["'source_column' is 0", "'target_column' is True"],
        ),
        ({"source": "a", "target": "b", "source_column": 1}, ["'source_column' does not belong to data given by"]),
    ],
)
def test_wrong_tables_of_a_run_file(table: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_table(table, PAIR_FORMS).as_source()
    for message in messages:
        assert message in str(caught.value)
