"""What killed processes left under temporary names is removed; what a running one writes is not."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from clearhead.base import temporary_files
from clearhead.base.errors import RunFailure
from clearhead.base.files import replacing, write_json
from clearhead.checkpoints.runs.checkpoint import write_folder


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_next_file_removes_what_killed_processes_left(tmp_path: Path, gone: int) -> None:
    (tmp_path / f".page.html.writing-{gone}").write_text("half")
    (tmp_path / f".other.writing-{gone}-{temporary_files._machine()}").mkdir()
    (tmp_path / f".other.writing-{gone}-{temporary_files._machine()}" / "weights").write_text("half")
    (tmp_path / f".model.writing-{gone}.removing").mkdir()
    (tmp_path / f".link.writing-{gone}").symlink_to(tmp_path)
    remaining = {"page.html", ".page.html", f"page.html.writing-{gone}", f".writing-{gone}", ".page.html.writing-x"}
    for name in remaining:
        (tmp_path / name).touch()
    write_json(tmp_path / "settings.json", {})
    assert names_in(tmp_path) == {*remaining, "settings.json"}


def test_the_next_folder_removes_what_killed_processes_left(tmp_path: Path, gone: int) -> None:
    (tmp_path / f".model.writing-{gone}").mkdir()
    with write_folder(tmp_path / "model") as temporary:
        assert names_in(tmp_path) == {temporary.name}
    assert names_in(tmp_path) == {"model"}


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    writing, parent = tmp_path / f".a.writing-{os.getpid()}", tmp_path / f".b.writing-{os.getppid()}"
    for path in (writing, parent):
        path.touch()
    with replacing(tmp_path / "one") as first:
        first.touch()
        write_json(tmp_path / "two", {})
        assert names_in(tmp_path) == {writing.name, parent.name, first.name, "two"}
    assert names_in(tmp_path) == {writing.name, parent.name, "one", "two"}


def test_what_another_machine_writes_is_left_alone_for_a_day(
    tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "another machine")
        patch.setattr("os.getpid", lambda: gone)
        theirs = temporary_files.temporary_path(tmp_path / "model")
    theirs.touch()
    write_json(tmp_path / "one", {})
    assert theirs.exists()
    os.utime(theirs, (time.time() - 25 * 3600,) * 2)
    write_json(tmp_path / "one", {})
    assert not theirs.exists()


def test_a_process_that_ended_without_a_wait_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        (tmp_path / f".page.writing-{process.pid}").touch()
        write_json(tmp_path / "one", {})
        assert names_in(tmp_path) == {"one"}


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailure, match="could not be saved"), write_folder(tmp_path / "file" / "model"):
        pass
