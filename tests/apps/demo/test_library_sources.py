"""Source files of the library: only code, split by name, within the sizes, and always the same."""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path

import pytest

from clearhead.apps.demo.common import SourceFile, library_sources, write_sources
from clearhead.base.errors import InputError

MANY = 10**9


def library(folder: Path, count: int = 211) -> Path:
    """Write a library of `count` modules in three packages, and files that must be left out."""
    for number in range(count):
        path = folder / ("", "json", "email/mime")[number % 3] / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{number}():\n    return '{'é' * (number % 7)}'\n", encoding="utf-8")
    for name in ("site-packages/a.py", "test/b.py", "unittest/test/c.py", "idlelib/idle_test/d.py", "encodings/e.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left = 'out'\n", encoding="utf-8")
    (folder / "_sysconfigdata_linux.py").write_text("built = 1\n", encoding="utf-8")
    (folder / "empty.py").write_text(" \n", encoding="utf-8")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (folder / "notes.txt").write_text("no code\n", encoding="utf-8")
    return folder


def names(files: list[SourceFile]) -> list[str]:
    return [file.name for file in files]


def test_this_python_has_enough() -> None:
    sources = library_sources(max_bytes=MANY, max_valid_bytes=MANY)
    assert sources.folder == Path(sysconfig.get_paths()["stdlib"])
    everything = sources.train + sources.valid
    assert sum(file.num_bytes for file in everything) > 3_000_000
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names(everything))
    assert not [name for name in names(everything) if {"test", "tests", "site-packages"} & set(name.split("/"))]
    for file in everything[:: len(everything) // 29]:
        ast.parse(file.text)


def test_parts_are_whole_and_apart(tmp_path: Path) -> None:
    sources = library_sources(max_bytes=MANY, max_valid_bytes=MANY, valid_share=0.2, folder=library(tmp_path))
    train, valid = names(sources.train), names(sources.valid)
    assert train == sorted(train) and valid == sorted(valid)
    assert not set(train) & set(valid)
    expected = [f"{('', 'json/', 'email/mime/')[n % 3]}module{n}.py" for n in range(211)]
    assert sorted(train + valid) == sorted(expected)
    assert 0.1 < len(valid) / 211 < 0.3
    for file in sources.train + sources.valid:
        assert file.text == (tmp_path / file.name).read_text(encoding="utf-8")


def test_a_file_keeps_its_part_when_others_come_and_go(tmp_path: Path) -> None:
    few = library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=library(tmp_path / "few", 101))
    many = library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=library(tmp_path / "many", 307))
    assert set(names(few.train)) < set(names(many.train))
    assert set(names(few.valid)) < set(names(many.valid))


def test_the_order_of_the_disk_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = library(tmp_path)
    before = library_sources(max_bytes=3001, max_valid_bytes=211, folder=folder)
    walk = os.walk

    def backwards(top: Path) -> object:
        for here, folders, files in walk(top):
            folders.reverse()
            yield here, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert library_sources(max_bytes=3001, max_valid_bytes=211, folder=folder) == before


def test_no_part_is_larger_than_asked_for(tmp_path: Path) -> None:
    folder = library(tmp_path)
    (folder / "huge.py").write_text("x = 1\n" * 10_007, encoding="utf-8")
    sources = library_sources(max_bytes=3001, max_valid_bytes=211, folder=folder)
    sizes = [sum(len(file.text.encode("utf-8")) for file in files) for files in (sources.train, sources.valid)]
    assert 2900 < sizes[0] <= 3001 and 150 < sizes[1] <= 211
    # Taken from everywhere, not from the beginning of the alphabet.
    assert len({name.rpartition("/")[0] for name in names(sources.train)}) == 3
    everything = library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=folder)
    assert set(names(sources.train)) < set(names(everything.train))
    assert set(names(sources.valid)) < set(names(everything.valid))


def test_written_files_read_back(tmp_path: Path) -> None:
    sources = library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=library(tmp_path / "library"))
    write_sources(sources.train, tmp_path / "copy")
    written = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.py")}
    assert written == set(names(sources.train))
    assert all((tmp_path / "copy" / file.name).read_bytes() == file.text.encode("utf-8") for file in sources.train)


@pytest.mark.parametrize("count", [0, 1])
def test_a_library_without_sources_is_said(tmp_path: Path, count: int) -> None:
    for number in range(count):
        (tmp_path / f"only{number}.py").write_text("pass\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"standard library in .*, got only {count}: use a Python") as caught:
        library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got only 0"):
        library_sources(max_bytes=MANY, max_valid_bytes=MANY, folder=tmp_path / "nowhere")
