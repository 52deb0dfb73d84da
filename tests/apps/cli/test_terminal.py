"""Every command in a pseudo-terminal: styles reach it as escape sequences, and never as their letters."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from clearhead.apps.cli.main import main, make_app
from clearhead.apps.demo import translate as translate_demo
from tests.apps.cli.tiny_run import write_run_file
from tests.apps.cli.tiny_tasks import LINES, write_lines

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]

SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\^_=>])")
LITERAL = re.compile(r"\\x1b|\\u001b|\\033|\^\[|\[\d+(;\d+)*m|\[/?(bold|dim|italic|green|red|yellow|cyan)\b[^\]]*\]")
COMMANDS = {
    "demo": ["demo", "--out", "DEMO"],
    "new": ["new", "generate", "--text", "LONG", "-o", "OUT/run.toml"],
    "train": ["train", "OUT/tiny/run.toml"],
    "translate": ["translate", "RUN", "TEXT"],
    "generate": ["generate", "GENERATE", "--prompt", "a m", "--max-new-tokens", "3"],
    "fill": ["fill", "FILL", "a ___ u"],
    "classify": ["classify", "CLASSIFY", "TEXT"],
    "tag": ["tag", "TAG", "TEXT"],
    "embed": ["embed", "EMBED", "TEXT", "--json"],
    "answer": ["answer", "ANSWER", "--question", "a", "--context", "a m u"],
    "predict": ["predict", "TAG", "TEXT"],
    "view": ["view", "RUN", "a m u", "-o", "OUT/heads.html"],
    "explain": ["explain", "RUN", "a m u"],
    "evaluate": ["evaluate", "RUN"],
    "compare": ["compare", "RUN", "COPY"],
    "diff": ["diff", "RUN", "COPY", "a m u"],
    "average": ["average", "COPY", "--last", "2"],
    "convert": ["convert", "RUN", "OUT/int8", "--precision", "int8"],
    "check": ["check", "GENERATE"],
    "bench": ["bench", "GENERATE", "--precision", "fp32"],
    "inspect": ["inspect", "RUN"],
    "heads": ["heads", "RUN", "TEXT"],
    "learn": ["learn", "--out", "OUT/lessons"],
    "doctor": ["doctor"],
    "serve": ["serve", "GENERATE", "--port", "0"],
}  # fmt: skip
ENDED = {"serve": b"curl "}
"""The output of a command after which a signal may end it."""


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], str]]]:
    """Open a pseudo-terminal: the file descriptor of its user's side, and the text that was written to it."""
    reader, writer = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunks.append(os.read(reader, 4096))
            except OSError:  # the other side is closed
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def read_written() -> str:
        return b"".join(chunks).decode("utf-8")

    try:
        yield writer, read_written
    finally:
        os.close(writer)
        thread.join(timeout=60)
        os.close(reader)


def run_in_process(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run a command whose stdout and stderr are a terminal."""
    with terminal() as (descriptor, written):
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                stream = io.TextIOWrapper(os.fdopen(os.dup(descriptor), "wb", buffering=0), "utf-8", write_through=True)
                patch.setattr(sys, name, stream)
            code = main(words)
            sys.stdout.close()
            sys.stderr.close()
    return code, written()


def run_until(words: list[str], end: bytes) -> tuple[int, str]:
    """Run a command in a separate process, and send Ctrl-C to its terminal after some bytes of output."""
    with terminal() as (descriptor, written):
        process = subprocess.Popen(
            [sys.executable, "-m", "clearhead", *words], stdin=descriptor, stdout=descriptor, stderr=descriptor
        )
        try:
            while end not in written().encode() and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=300)
        finally:
            process.kill()
    return code, written()


def literals(text: str) -> list[str]:
    """Return the escape sequences and markup that a reader sees as letters."""
    return [match[0] for match in LITERAL.finditer(SEQUENCE.sub("", text))]


def test_every_command_has_a_case() -> None:
    assert set(COMMANDS) == set(typer.main.get_command(make_app()).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_no_escape_sequence_as_letters(
    name: str, trained: Path, runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "130")
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    write_lines(tmp_path / "text.txt", LINES[:3])
    write_lines(tmp_path / "long.txt", LINES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    write_run_file(tmp_path / "tiny")
    sizes = translate_demo.TranslateSizes(locales=("de", "fa"), train_size=97, valid_per_locale=5, test_per_locale=7)
    monkeypatch.setattr(translate_demo.run_translate, "__defaults__", (sizes,))
    words = [
        word.replace("OUT", str(tmp_path)).replace("TEXT", "text.txt").replace("LONG", "long.txt")
        for word in COMMANDS[name]
    ]
    folders = {"RUN": trained / "run", "DEMO": tmp_path / "demo", "COPY": tmp_path / "copy"}
    if "COPY" in words:
        shutil.copytree(folders["RUN"], folders["COPY"])
    for index, word in enumerate(words):
        if word in folders:
            words[index] = str(folders[word])
        elif word.isupper():
            words[index] = str(runs(word.lower()))
    if name == "demo":
        monkeypatch.setattr("clearhead.apps.demo.translate.RECIPE", short_recipe())
        monkeypatch.setattr("clearhead.apps.demo.translate.write_heads_page", lambda *arguments: None)
    code, text = run_until(words, ENDED[name]) if name in ENDED else run_in_process(words, monkeypatch)
    assert code == {"serve": 143}.get(name, 0), text
    assert text and literals(text) == []


def short_recipe() -> str:
    recipe = translate_demo.RECIPE
    for key, value in {"steps": 2, "warmup": 1, "validate_every": 1}.items():
        recipe = re.sub(rf"\n{key} = \d+", f"\n{key} = {value}", recipe)
    return recipe


def test_letters_of_escape_sequences_are_seen() -> None:
    assert literals("\x1b[1mstack\x1b[0m [3] a[0] \x1b]0;title\x07") == []
    assert literals("\\x1b[1mstack\\x1b[0m") and literals("^[[1m") and literals("[1mstack") and literals("[bold]a")
