"""Input of commands: one line in, one line out. Texts are read, answered in chunks and returned with their lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from clearhead.errors import InputError

CHUNK = 1024
STANDARD_INPUT = Path("-")
Item = TypeVar("Item")
AnswerT = TypeVar("AnswerT")

_NUMBERED = re.compile(r"\btext (\d+)\b(:?)")


@dataclass(frozen=True)
class Line:
    """One line of input.

    Attributes:
        number: counted from 1.
        text: its text, or both texts of a pair.
    """

    number: int
    text: str | tuple[str, str]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer."""
        return not "".join(self.text).strip()

    def record(self) -> dict[str, object]:
        """Return the line as JSON values; its index is counted from 0."""
        if isinstance(self.text, str):
            return {"index": self.number - 1, "text": self.text}
        return {"index": self.number - 1, "text": self.text[0], "pair": self.text[1]}


def answered_lines(
    file: Path,
    answer: Callable[[list[Any]], Sequence[AnswerT]],
    *,
    batch_size: int | None,
    paired: bool = False,
    given: str | None = None,
) -> Iterator[tuple[Line, AnswerT | None]]:
    """Yield every line of a file with its answer; an empty line has None.

    Args:
        file: the file, or "-" for standard input.
        answer: answers several texts, or pairs of texts; its errors name a text by its number.
        batch_size: most lines answered together; None: as many as are read at once.
        paired: whether a line holds two texts with a tab between them.
        given: the only text, instead of those of the file.

    Raises:
        InputError: the file is unusable, or a text cannot be answered.
    """
    name, size = name_of(file), 1 if is_interactive(file) else batch_size or CHUNK
    numbered = enumerate(read_lines(file) if given is None else [given], start=1)
    lines = (Line(number, split_pair(number, text, name) if paired else text) for number, text in numbered)
    for chunk in chunks(lines, size):
        filled = [line for line in chunk if not line.is_empty]
        try:
            answers = iter(answer([line.text for line in filled]) if filled else ())
        except InputError as error:
            numbers = [line.number for line in filled]
            raise InputError(*named_by_line(str(error), numbers, name if given is None else None).split("\n")) from None
        for line in chunk:
            yield line, None if line.is_empty else next(answers)


def split_pair(number: int, text: str, name: str) -> tuple[str, str]:
    """Return the two texts of a line.

    Args:
        number: of the line, counted from 1.
        text: the line; an empty one is a pair of empty texts.
        name: of the input, for messages.

    Raises:
        InputError: there is not exactly one tab between two texts.
    """
    columns = text.split("\t") if text.strip() else ["", ""]
    if len(columns) != 2:
        received = "one text" if len(columns) == 1 else f"{len(columns)} columns"
        raise InputError(f"{name}:{number}: expected two texts with one tab between them, received {received}")
    return columns[0], columns[1]


def read_lines(source: Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", without their line ends.

    Only a line feed ends a line. A file is read whole before its first line is yielded, so that an error in it is found
    before anything is answered.

    Raises:
        InputError: the file is missing, empty or unreadable, or a line is not valid UTF-8.
    """
    from clearhead.data.sources.lines import read_lines as read_file

    return _decoded(sys.stdin.buffer, "standard input") if is_standard_input(source) else iter(read_file(source))


def read_numbers(source: Path) -> list[float]:
    """Return the numbers of a text file, or of standard input for "-", one in each line.

    Raises:
        InputError: the file is unusable, or a line is not a finite number.
    """
    numbers = []
    for number, line in enumerate(read_lines(source), start=1):
        try:
            numbers.append(float(line))
        except ValueError:
            raise InputError(f"{name_of(source)}:{number}: expected a number, received {line!r}") from None
    return numbers


def _decoded(lines: Iterator[bytes], name: str) -> Iterator[str]:
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
    while chunk := list(islice(lines, size)):
        yield chunk


def is_standard_input(source: Path) -> bool:
    """Return whether a file name on the command line means standard input."""
    return source == STANDARD_INPUT


def is_interactive(source: Path) -> bool:
    """Return whether a person types the lines and expects each answer at once."""
    return is_standard_input(source) and sys.stdin.isatty()


def name_of(file: Path) -> str:
    """Return the name of the input for messages."""
    return "standard input" if is_standard_input(file) else str(file)


def named_by_line(message: str, numbers: Sequence[int], name: str | None) -> str:
    """Return a message about "text 3" with the line of the file that the text came from.

    Args:
        message: counts texts from 1.
        numbers: the line of each text, counted from 1.
        name: of the file; None: there is only one text, without a file.
    """

    def place(match: re.Match[str]) -> str:
        if name is None:
            return f"the text{match[2]}"
        # The second texts of pairs can be counted after all the first ones.
        number = numbers[(int(match[1]) - 1) % len(numbers)]
        return f"{name}:{number}:" + ("" if match[2] else " the text")

    return _NUMBERED.sub(place, message)


def one_line(text: str) -> str:
    """Return a text without line ends and tabs, which would break the output format."""
    return text.replace("\n", " ").replace("\r", " ").replace("\t", " ")
