"""The cache of kernels: damaged libraries, and libraries that others may have written, are compiled again."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clearhead.fast.native import build
from clearhead.fast.native.options import INFERENCE
from tests.processors import load_library

NOBODY = 65534
SOURCE = 'extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n'


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / INFERENCE).mkdir()
    (tmp_path / INFERENCE / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "FOLDER", tmp_path)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A valid library in a cache that nothing was loaded from yet: a process loads a path only once."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "first"))
    build.compile_library([])
    shutil.copytree(tmp_path / "first", tmp_path / "cache", copy_function=shutil.copy2)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    (library_file,) = (tmp_path / "cache" / "native").glob("*.so")
    return library_file


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def plant(library: Path, folder: Path) -> Path:
    """Replace a library by another one; return the file that exists after loading."""
    mark, source = folder / "mark", folder / "planted.cc"
    source.write_text(
        '#include <cstdio>\n__attribute__((constructor)) void run() { fclose(fopen("' + str(mark) + '", "w")); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return mark


def take_from_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a path to another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_a_sound_library_is_loaded_as_it_is(library: Path, warnings: Callable[[], list[str]]) -> None:
    before = library.stat()
    assert load_library(build.compile_library([])).one() == 1
    assert library.stat().st_ino == before.st_ino and not warnings()


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_planted_library_is_compiled_anew(
    mode: int, library: Path, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    mark = plant(library, tmp_path)
    library.parent.chmod(mode)
    assert load_library(build.compile_library([])).one() == 1
    assert not mark.exists() and mode_of(library.parent) == 0o700
    (message,) = warnings()
    assert message == (
        f"compiling kernels for inference again, which takes about 10 s: the library in {library.parent} is damaged"
    )


@pytest.mark.parametrize("size", [0, 1000, 4096, 9000])
def test_a_truncated_library_is_compiled_anew(size: int, library: Path, warnings: Callable[[], list[str]]) -> None:
    os.truncate(library, size)
    assert load_library(build.compile_library([])).one() == 1
    (message,) = warnings()
    assert message.endswith("is damaged") and build.fault_of(library) is None


def test_a_library_that_others_can_write_is_compiled_anew(library: Path, warnings: Callable[[], list[str]]) -> None:
    library.chmod(0o722)
    assert load_library(build.compile_library([])).one() == 1
    (message,) = warnings()
    assert message.endswith("is not to be trusted (it can be written by others)") and mode_of(library) == 0o700


def test_a_library_of_another_user_is_not_loaded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_from_user(library, monkeypatch)
    fault = build.fault_of(library)
    assert fault == "is not to be trusted (it belongs to another user)"


@pytest.mark.parametrize("change", ["digest", "link", "pipe", "renamed"])
def test_what_is_not_the_library_that_was_kept_is_not_loaded(change: str, library: Path, tmp_path: Path) -> None:
    record = library.with_suffix(".sha256")
    if change == "digest":
        record.unlink()
    elif change == "link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    elif change == "pipe":
        library.unlink()
        os.mkfifo(library)
    else:
        # With write access to the folder, someone could give an older library the name of a newer one.
        library.rename(library.with_name("other.so"))
        library, record = library.with_name("other.so"), record.rename(record.with_name("other.sha256"))
    assert build.fault_of(library) is not None


@pytest.mark.parametrize("location", ["cache", "cache/native"])
def test_a_folder_of_another_user_is_refused(
    location: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = plant(library, tmp_path)
    library.parent.chmod(0o777)
    take_from_user(tmp_path / location, monkeypatch)
    with pytest.raises(OSError, match="belongs to another user: change that, or set CLEARHEAD_CACHE to a new folder"):
        build.compile_library([])
    assert not mark.exists()


def test_a_cache_that_others_can_write_is_refused(library: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").chmod(0o770)
    with pytest.raises(OSError, match=r"cache can be written by others: change that"):
        build.compile_library([])
    assert mode_of(tmp_path / "cache") == 0o770, "the cache is shared on purpose"


def test_kernels_are_kept_whatever_the_umask_is(
    open_umask: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "deep" / "cache"))
    assert load_library(build.compile_library([])).one() == 1
    (library,) = (tmp_path / "deep" / "cache" / "native").glob("*.so")
    assert build.fault_of(library) is None and not warnings()
    assert mode_of(library.parent) == mode_of(library.parents[1]) == 0o700


def test_the_default_cache_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    root = tmp_path / ".cache" / "clearhead"
    root.mkdir(parents=True)
    root.chmod(0o775)
    assert load_library(build.compile_library([])).one() == 1
    assert mode_of(root) == 0o755


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    left = tmp_path / "cache" / "native" / "tmpabc123"
    left.mkdir(parents=True)
    (left / "one.o").touch()
    build.compile_library([])
    assert {path.suffix for path in left.parent.iterdir()} == {"", ".so", ".sha256"}
    assert not left.exists()


def test_a_folder_that_cannot_be_closed_is_used_as_long_as_nobody_else_can_write_there(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.parent.chmod(0o755)

    def refuse(path: Path, mode: int) -> None:
        raise OSError(f"{path} is on a disk that cannot be written")

    monkeypatch.setattr(Path, "chmod", refuse)
    assert load_library(build.compile_library([])).one() == 1
