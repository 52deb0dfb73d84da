"""Output of commands: results on stdout, messages on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from clearhead.errors import LongTexts, visible


def print_message(message: str) -> None:
    """Write a message to stderr, without the control characters that a file or a text may have put into it."""
    print(visible(message, kept="\n\t"), file=sys.stderr, flush=True)


def silence(stream: TextIO) -> None:
    """Let nothing more be written to stdout or stderr, not by a library either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_result(result: str = "") -> None:
    """Write one line of the result to stdout; a terminal gets no control characters."""
    print(visible(result, kept="\n\t") if sys.stdout.isatty() else result, flush=True)


def print_text(piece: str) -> None:
    """Write a piece of the result at once, without a line end; a terminal gets no control characters."""
    print(visible(piece, kept="\n\t") if sys.stdout.isatty() else piece, end="", flush=True)


def print_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object as one line of the result."""
    print_result(json.dumps(record, ensure_ascii=False, allow_nan=False))


def print_either(as_json: bool, record: Mapping[str, Any], *lines: str) -> None:
    """Write a result as one JSON object, or as lines of text."""
    if as_json:
        print_json(record)
    else:
        for line in lines:
            print_result(line)


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"clearhead: {record.getMessage()}")


@contextmanager
def library_messages() -> Iterator[None]:
    """Show warnings which the library logs inside a with block, and what makes a command take long."""
    logger, handler = logging.getLogger("clearhead"), _Messages()
    slow = {name: logging.getLogger(f"clearhead.{name}") for name in ("native", "busy_waiting")}
    levels = {name: one.level for name, one in slow.items()}
    for one in slow.values():
        one.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
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


def human_count(value: float | int) -> str:
    """Return a large number with three digits and its unit: 2.61M, 512k."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def human_bytes(value: float | int) -> str:
    """Return a number of bytes with its unit (1 MB = 10**6 bytes)."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"
