"""What every command reads and writes: results on stdout, messages on stderr, lines of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from clearhead.errors import InputError

Item = TypeVar("Item")


def print_message(message: str) -> None:
    """Write a message for the person at the terminal; it is no result."""
    print(message, file=sys.stderr, flush=True)


def print_result(result: str = "") -> None:
    """Write one line of the result."""
    print(result, flush=True)


def print_text(piece: str) -> None:
    """Write a piece of the result as soon as it is there, without a line end."""
    print(piece, end="", flush=True)


def print_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object as one line of the result."""
    print_result(json.dumps(record, ensure_ascii=False, allow_nan=False))


def read_lines(source: Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", without their line ends.

    Only a line feed ends a line, so one line in is one line out whatever else stands in it. A file is read whole
    before the first line is given, so that a fault in it is found before anything is answered.

    Raises:
        InputError: the file is missing, empty or unreadable, or a line is not valid UTF-8.
    """
    from clearhead.data.sources.lines import read_lines as read_file

    return _decoded(sys.stdin.buffer, "standard input") if is_standard_input(source) else iter(read_file(source))


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}:{number}: not valid UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); "
                "convert the file to UTF-8"
            ) from None


def chunks(lines: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Group lines into lists of at most `size`."""
    chunk: list[Item] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def is_standard_input(source: Path) -> bool:
    """Tell whether a file name on the command line means standard input."""
    return str(source) == "-"


def is_interactive(source: Path) -> bool:
    """Tell whether the lines are typed by a person, who wants each answer at once."""
    return is_standard_input(source) and sys.stdin.isatty()


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


def read_parallel(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Read two line-aligned files.

    Raises:
        InputError: a file is missing, empty or unreadable, or their line counts differ.
    """
    from clearhead.data.sources.pairs import FilePair, read_pairs

    pairs = read_pairs(FilePair(source, target))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write text, one sentence in a line.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
