"""The examples of pages for users of other tools run in their order, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.training import quick

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell"),
]
# The outputs that a page shows, and its shell blocks, at least.
PAGES = {
    "pipelines.md": (3, 3),
    "hooked-transformer.md": (1, 0),
    "nanochat.md": (1, 1),
    "ctranslate2.md": (1, 2),
    "joeynmt.md": (1, 1),
}
# Calls of the other tool in the first table of these pages, at least.
CALLS = 15
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick.leave_out(monkeypatch)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    blocks = BLOCK.findall((ROOT / "docs" / "coming-from" / page).read_text("utf-8"))
    names: dict[str, object] = {}
    printed, num_compared, num_run = "", 0, 0
    for language, content in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(content, page, "exec"), names)
            printed = output.getvalue()
        elif language == "sh":
            run = subprocess.run(
                ["sh", "-ec", content], env={**os.environ, "PATH": path}, capture_output=True, text=True
            )
            assert run.returncode == 0, run.stderr
            # A command writes what the Python of its section wrote.
            assert not run.stdout or "convert" in content or run.stdout.split()[0] == printed.split()[0], run.stdout
            num_run += 1
        elif language == "text":
            assert content == printed
            num_compared += 1
    assert num_compared >= PAGES[page][0] and num_run >= PAGES[page][1]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "pipelines.md"])
def test_a_page_has_a_table_of_calls_three_differences_and_what_is_missing(page: str) -> None:
    text = (ROOT / "docs" / "coming-from" / page).read_text("utf-8")
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None and len(table.group().splitlines()) - 2 >= CALLS
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in table.group().splitlines())
    differences = text.partition("## Differences\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*", differences, re.MULTILINE)) == 3
    assert text.count("## What is missing\n") == 1
    assert f"({page})" in (ROOT / "docs" / "coming-from" / "index.md").read_text("utf-8")
