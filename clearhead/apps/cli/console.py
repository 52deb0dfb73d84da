"""Output of commands: results on stdout, messages on stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from clearhead.base.errors import UNSAFE, LongTexts, visible
from clearhead.base.progress import Display, shown_by

# What ends a line for some reader of text, such as `str.splitlines`.
LINE_ENDS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# Text from right to left may need them; only a terminal could be misled.
_DIRECTIONS = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def adapt_streams() -> None:
    """Let stdout and stderr take every character, whatever the console or the system's code page can write.

    A file or a pipe gets UTF-8, unless PYTHONIOENCODING says otherwise; what a console cannot show is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            if stream.isatty() or "PYTHONIOENCODING" in os.environ:
                stream.reconfigure(errors="backslashreplace")
            else:
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def print_message(message: str) -> None:
    """Write a message to stderr, without the control characters that a file or a text may have put into it."""
    print(visible(message, kept="\n\t"), file=sys.stderr, flush=True)


def silence(stream: TextIO) -> None:
    """Let nothing more be written to stdout or stderr, not by a library either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_result(line: str = "") -> None:
    """Write one line of the result to stdout, which is one for every reader: other line ends become spaces."""
    print(shown(line, is_terminal=sys.stdout.isatty()), flush=True)


def print_text(text: str, *, end: str = "") -> None:
    """Write a text of any number of lines, or a piece of it, to stdout at once."""
    print(shown(text, kept="\n\t", is_terminal=sys.stdout.isatty()), end=end, flush=True)


def shown(text: str, *, kept: str = "\t", is_terminal: bool = False) -> str:
    """Return a text as output shows it: what ends a line and is not kept is a space, other controls are escaped."""
    text = LINE_ENDS.sub(lambda found: found[0] if found[0] in kept else " ", text)
    return visible(text, kept=kept if is_terminal else kept + _DIRECTIONS)


def print_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object as one line of the result; what would not be shown as it is has an escape of JSON."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    print(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def print_either(as_json: bool, record: Mapping[str, Any], *lines: str) -> None:
    """Write a result as one JSON object, or as lines of text."""
    if as_json:
        print_json(record)
    else:
        for line in lines:
            print_result(line)


class MessageDisplay(Display):
    """Writes messages to stderr, and shows no counts."""

    def message(self, text: str) -> None:
        """Write the message."""
        print_message(text)


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"clearhead: {self.format(record)}")


@contextmanager
def library_messages() -> Iterator[None]:
    """Show messages and logged warnings of the library inside a with block, and what makes a command take long."""
    logger, handler = logging.getLogger("clearhead"), _Messages()
    slow = {name: logging.getLogger(f"clearhead.{name}") for name in ("fast.native", "busy_waiting", "generate")}
    levels = {name: one.level for name, one in slow.items()}
    for one in slow.values():
        one.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with shown_by(MessageDisplay()):
            yield
    finally:
        logger.removeHandler(handler)
        for name, one in slow.items():
            one.setLevel(levels[name])


@contextmanager
def long_texts_said_once() -> Iterator[None]:
    """Say at the end of a with block how many texts were too long, in one sentence."""
    found: list[LongTexts] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", LongTexts)
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if isinstance(message, LongTexts):
                found.append(message)
            elif category is UserWarning:
                print_message(f"clearhead: {message}")
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        try:
            yield
        finally:
            if found:
                print_message(f"clearhead: {LongTexts.joined(found)}")
