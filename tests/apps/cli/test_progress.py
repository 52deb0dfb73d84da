"""A bar on a terminal, nothing elsewhere; a stopped command says what is done."""

from __future__ import annotations

import io
import signal
import sys

import pytest

from clearhead.apps.cli.progress import counting
from clearhead.apps.cli.stopping import Stopped
from clearhead.base import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_of_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with counting("texts") as bar:
        progress.update(3, 7, "examples")
        progress.update(90, 91, "tokens")
    assert (bar.done, bar.total) == (3, 7)
    assert "texts" in shown.getvalue() and "3/7" in shown.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_nothing_is_shown_elsewhere(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := stream())
    with counting("texts", 7, is_shown=stream is io.StringIO):
        progress.update(3, 7, "examples")
    assert shown.getvalue() == ""


@pytest.mark.parametrize(("total", "done"), [(1000, "320 of 1,000 texts are done"), (None, "320 texts are done")])
def test_what_is_done_is_said(total: int | None, done: str) -> None:
    with pytest.raises(Stopped, match=f"^clearhead: interrupted; {done}$"), counting("texts", total) as bar:
        bar.done = 320
        raise Stopped(signal.SIGINT)
