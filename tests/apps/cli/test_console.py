"""One line of text output is one line for every reader and steers no terminal; JSON says exactly what there is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from clearhead.apps.cli.console import print_json, print_message, print_result, print_text
from clearhead.apps.cli.lines import one_line

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
CONTROLS = "\x00\x07\x08\x1b\x7f\x80\x9b\x9f"
HEBREW = "\u202bשלום\u202c \u2067a\u2069"


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def out(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], str]:
    """Reads what was written to stdout."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: request.param, raising=False)
    return lambda: capsys.readouterr().out


def test_a_line_is_one_line_for_every_reader(out: Callable[[], str]) -> None:
    print_result(f"a\t{ENDS}b")
    assert out() == f"a\t{' ' * len(ENDS)}b\n"
    assert one_line(f"a\t{ENDS}b") == f"a{' ' * (len(ENDS) + 1)}b"


def test_no_control_character_comes_through(out: Callable[[], str]) -> None:
    print_result(CONTROLS)
    assert out() == r"\x00\x07\x08\x1b\x7f\x80\x9b\x9f" + "\n"
    print_text(f"a\n\t{CONTROLS}\r\n\u2028b")
    assert out() == "a\n\t" + r"\x00\x07\x08\x1b\x7f\x80\x9b\x9f" + " \n b"
    print_result("\ud800")
    assert out() == "\\ud800\n"


def test_json_is_exact_and_one_line_for_every_reader(out: Callable[[], str]) -> None:
    text = ENDS + CONTROLS + HEBREW + 'é\ud800\\u001b"'
    print_json({"text": text})
    written = out()
    assert json.loads(written) == {"text": text}
    assert len(written.splitlines()) == 1 and written.removesuffix("\n").isprintable()
    assert "é" in written and "שלום" in written


def test_directions_of_text_stay_where_no_terminal_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_result(HEBREW)
    assert capsys.readouterr().out == f"{HEBREW}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_result(HEBREW)
    assert capsys.readouterr().out == "\\u202bשלום\\u202c \\u2067a\\u2069\n"


def test_a_message_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_message("one\n\ttwo\x1b\u2028")
    assert capsys.readouterr().err == "one\n\ttwo\\x1b\\u2028\n"
