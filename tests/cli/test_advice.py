"""Advice in a message can be followed as it stands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.cli.main import main
from clearhead.training.runfile.read import load_run_file
from tests.cli.test_bad_input import refused
from tests.cli.tiny_tasks import LINES, write_lines

Runs = Callable[[str], Path]
PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.mark.parametrize("command", ["new", "evaluate"])
def test_a_picture_in_a_folder_of_texts_is_left_out_with_the_option_of_the_message(
    command: str, runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "a.txt", LINES)
    (tmp_path / "texts" / "b.png").write_bytes(PICTURE)
    words = [command, "generate" if command == "new" else str(runs("generate")), "--text", str(tmp_path / "texts")]
    words += ["--output", str(tmp_path / "run.toml")] if command == "new" else []
    message = refused(capfd, *words)
    assert "b.png: expected text, but this looks like a binary file; or leave it out: --pattern" in message
    assert main([*words, *shlex.split(message.rpartition("leave it out: ")[2])]) == 0
    if command == "new":
        assert load_run_file(tmp_path / "run.toml").data.train.pattern == "*.txt"


def test_the_field_of_json_lines_has_an_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [f'{{"body": "{line}"}}' for line in LINES])
    words = ["new", "generate", "--text", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "run.toml")]
    assert "there is no field 'text'; the fields are 'body'" in refused(capfd, *words)
    assert main([*words, "--text-column", "body"]) == 0
    assert load_run_file(tmp_path / "run.toml").data.train.field == "body"
