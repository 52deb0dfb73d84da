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

from clearhead.base.errors import UNSAFE, LongTexts, escape_unsafe
from clearhead.base.progress import Display, use_display

# Characters that end a line for some readers of text, such as `str.splitlines`.
LINE_ENDS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
# Direction marks: right-to-left text needs them, but on a terminal they could disguise other text.
_DIRECTIONS = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def adapt_streams() -> None:
    """Make stdout and stderr accept every character, whatever the encoding of the console.

    A file or a pipe gets UTF-8, unless PYTHONIOENCODING sets an encoding. Characters that a console cannot show are
    escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            if stream.isatty() or "PYTHONIOENCODING" in os.environ:
                stream.reconfigure(errors="backslashreplace")
            else:
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def print_message(message: str) -> None:
    """Write a message to stderr; control characters, such as from a file name, are escaped."""
    print(escape_unsafe(message, allowed="\n\t"), file=sys.stderr, flush=True)


def silence(stream: TextIO) -> None:
    """Discard all further output of stdout or stderr, also that of libraries."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_result(line: str = "") -> None:
    """Write one line of a command's result to stdout; line ends inside it become spaces."""
    print(make_printable(line, is_terminal=sys.stdout.isatty()), flush=True)


def print_text(text: str, *, end: str = "") -> None:
    """Write text, possibly of several lines, to stdout without delay."""
    print(make_printable(text, allowed="\n\t", is_terminal=sys.stdout.isatty()), end=end, flush=True)


def make_printable(text: str, *, allowed: str = "\t", is_terminal: bool = False) -> str:
    """Return a text for output: escape control characters and replace line ends by spaces, unless in `allowed`."""
    text = LINE_ENDS.sub(lambda match: match[0] if match[0] in allowed else " ", text)
    return escape_unsafe(text, allowed=allowed if is_terminal else allowed + _DIRECTIONS)


def print_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object as one line of the result; control characters become JSON escapes."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    print(UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text), flush=True)


def print_either(as_json: bool, record: Mapping[str, Any], *lines: str) -> None:
    """Write a result to stdout as one JSON object if `as_json` is True, else as lines of text."""
    if as_json:
        print_json(record)
    else:
        for line in lines:
            print_result(line)


class MessageDisplay(Display):
    """Progress display that writes messages to stderr and shows no counts."""

    def message(self, text: str) -> None:
        """Write the message to stderr."""
        print_message(text)


class _MessageHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"clearhead: {self.format(record)}")


@contextmanager
def show_library_messages() -> Iterator[None]:
    """Show messages and logged warnings of the library inside a with block, and notices about slow steps."""
    logger, handler = logging.getLogger("clearhead"), _MessageHandler()
    slow = {name: logging.getLogger(f"clearhead.{name}") for name in ("fast.native", "busy_waiting", "generate")}
    levels = {name: slow_logger.level for name, slow_logger in slow.items()}
    for slow_logger in slow.values():
        slow_logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with use_display(MessageDisplay()):
            yield
    finally:
        logger.removeHandler(handler)
        for name, slow_logger in slow.items():
            slow_logger.setLevel(levels[name])


@contextmanager
def report_long_texts_once() -> Iterator[None]:
    """Report at the end of a with block, in one sentence, the number of texts that were too long."""
    long_texts: list[LongTexts] = []
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
                long_texts.append(message)
            elif category is UserWarning:
                print_message(f"clearhead: {message}")
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        try:
            yield
        finally:
            if long_texts:
                print_message(f"clearhead: {LongTexts.merge(long_texts)}")
