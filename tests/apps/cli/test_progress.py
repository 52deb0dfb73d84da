"""A bar on a terminal and nothing elsewhere; silence is counted; a stopped command says what is done."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from clearhead.apps.cli.progress import IdleDisplay, pause_idle_time, show_counts, show_idle_time
from clearhead.apps.cli.stopping import Stopped
from clearhead.base import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_of_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with show_counts("texts") as bar:
        progress.update(3, 7, "examples")
        progress.update(90, 91, "tokens")
    assert (bar.done, bar.total) == (3, 7)
    assert "texts" in shown.getvalue() and "3/7" in shown.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_nothing_is_shown_elsewhere(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := stream())
    with show_counts("texts", 7, is_shown=stream is io.StringIO):
        progress.update(3, 7, "examples")
    assert shown.getvalue() == ""


@pytest.mark.parametrize(("total", "done"), [(1000, "320 of 1,000 texts are done"), (None, "320 texts are done")])
def test_what_is_done_is_said(total: int | None, done: str) -> None:
    with pytest.raises(Stopped, match=f"^clearhead: interrupted; {done}$"), show_counts("texts", total) as bar:
        bar.done = 320
        raise Stopped(signal.SIGINT)


BEAT = "working, {} s\x1b[K\r"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, for stdout and stderr, and no thread."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(IdleDisplay, "watch", lambda self: None)
    return Terminal()


@contextmanager
def replace_streams(stdout: io.StringIO, stderr: io.StringIO) -> Iterator[None]:
    """Pytest sets both streams anew before a test, so that a fixture cannot do this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        yield
        assert sys.stdout is stdout and sys.stderr is stderr


def test_silence_is_counted_until_something_is_written(terminal: Terminal, clock: Clock) -> None:
    with replace_streams(terminal, terminal), show_idle_time(clock) as waiting:
        for clock.now in (1.0, 3.0, 4.0):
            waiting.show_if_idle()
        print("a result")
        waiting.show_if_idle()
        clock.now = 9.0
        waiting.show_if_idle()
        print("a message", file=sys.stderr)
    expected = [BEAT.format(3), BEAT.format(4), "\x1b[K", "a result\n", BEAT.format(5), "\x1b[K", "a message\n"]
    assert terminal.getvalue() == "".join(expected)


def test_nothing_is_left_at_the_end(terminal: Terminal, clock: Clock) -> None:
    with replace_streams(terminal, terminal), show_idle_time(clock) as waiting:
        clock.now = 7.0
        waiting.show_if_idle()
    assert terminal.getvalue() == BEAT.format(7) + "\x1b[K"
    waiting.show_if_idle()
    assert terminal.getvalue().endswith("\x1b[K")


def test_the_middle_of_a_line_and_who_types_are_not_disturbed(terminal: Terminal, clock: Clock) -> None:
    with replace_streams(terminal, terminal), show_idle_time(clock) as waiting:
        print("Once upon", end="")
        clock.now = 10.0
        waiting.show_if_idle()
        print("╰──╯\x1b[?25h", end="")
        clock.now = 20.0
        waiting.show_if_idle()
        assert "working" not in terminal.getvalue()
        print()
        with pause_idle_time():
            clock.now = 30.0
            waiting.show_if_idle()
        clock.now = 31.0
        waiting.show_if_idle()
        assert "working" not in terminal.getvalue()
        clock.now = 33.0
        waiting.show_if_idle()
        assert "working, 3 s" in terminal.getvalue()


@pytest.mark.parametrize(("terminal_type", "rank"), [("dumb", "0"), ("xterm", "1")])
def test_elsewhere_nothing_changes(
    terminal_type: str, rank: str, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal_type)
    monkeypatch.setenv("RANK", rank)
    with replace_streams(terminal, terminal), show_idle_time(clock) as waiting:
        assert sys.stderr is terminal
        clock.now = 10.0
        waiting.show_if_idle()
    assert not terminal.getvalue()


def test_a_pipe_gets_results_only(terminal: Terminal, clock: Clock) -> None:
    with replace_streams(piped := io.StringIO(), terminal), show_idle_time(clock) as waiting:
        clock.now = 10.0
        waiting.show_if_idle()
        print("a result")
    assert piped.getvalue() == "a result\n" and "working, 10 s" in terminal.getvalue()
