"""One line in, one line out: texts are read, answered in chunks and given back with the lines they came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from clearhead.cli.console import chunks, is_interactive, is_standard_input, read_lines
from clearhead.errors import InputError

CHUNK = 1024
TextT = TypeVar("TextT", str, tuple[str, str])
AnswerT = TypeVar("AnswerT")

_NUMBERED = re.compile(r"\btext (\d+)\b(:?)")


@dataclass(frozen=True)
class Line(Generic[TextT]):
    """One line of input.

    Attributes:
        number: counted from 1.
        text: what stands in it; both texts where a line holds a pair.
    """

    number: int
    text: TextT

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer."""
        return not "".join(self.text).strip()

    def record(self) -> dict[str, object]:
        """Return what a JSON object says of the line; its index is counted from 0."""
        if isinstance(self.text, str):
            return {"index": self.number - 1, "text": self.text}
        return {"index": self.number - 1, "text": self.text[0], "pair": self.text[1]}


def answered_lines(
    file: Path,
    answer: Callable[[list[str]], Sequence[AnswerT]],
    *,
    batch_size: int | None,
    given: str | None = None,
) -> Iterator[tuple[Line[str], AnswerT | None]]:
    """Yield every line of a file with its answer; an empty line has None.

    Args:
        file: the file, or "-" for standard input.
        answer: answers some texts, one each; a mistake in one of them is named by its line.
        batch_size: most lines answered together; None: as many as are read at once.
        given: the only text, instead of those of the file.

    Raises:
        InputError: the file is unusable, or a text cannot be answered.
    """
    if given is not None:
        return _answered(iter([Line(1, given)]), answer, 1, None)
    lines = (Line(number, text) for number, text in enumerate(read_lines(file), start=1))
    return _answered(lines, answer, _size(file, batch_size), name_of(file))


def answered_pairs(
    file: Path, answer: Callable[[list[tuple[str, str]]], Sequence[AnswerT]], *, batch_size: int | None
) -> Iterator[tuple[Line[tuple[str, str]], AnswerT | None]]:
    """Yield every line of a file, two texts with a tab between them, with its answer; as `answered_lines`."""
    name = name_of(file)
    lines = (_pair(number, text, name) for number, text in enumerate(read_lines(file), start=1))
    return _answered(lines, answer, _size(file, batch_size), name)


def name_of(file: Path) -> str:
    """Return what a message calls the input."""
    return "standard input" if is_standard_input(file) else str(file)


def _size(file: Path, batch_size: int | None) -> int:
    return 1 if is_interactive(file) else batch_size or CHUNK


def _pair(number: int, text: str, name: str) -> Line[tuple[str, str]]:
    columns = text.split("\t") if text.strip() else ["", ""]
    if len(columns) != 2:
        raise InputError(
            f"{name}:{number}: expected two texts with one tab between them, received "
            f"{'one text' if len(columns) == 1 else f'{len(columns)} columns'}"
        )
    return Line(number, (columns[0], columns[1]))


def _answered(
    lines: Iterator[Line[TextT]], answer: Callable[[list[TextT]], Sequence[AnswerT]], size: int, name: str | None
) -> Iterator[tuple[Line[TextT], AnswerT | None]]:
    for chunk in chunks(lines, size):
        filled = [line for line in chunk if not line.is_empty]
        try:
            answers = iter(answer([line.text for line in filled]) if filled else ())
        except InputError as error:
            raise InputError(named_by_line(str(error), [line.number for line in filled], name)) from None
        for line in chunk:
            yield line, None if line.is_empty else next(answers)


def named_by_line(message: str, numbers: Sequence[int], name: str | None) -> str:
    """Return a message about "text 3" with the line of a file that this text came from.

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
    """Return a text without line ends and tabs, which would break the form of the output."""
    return text.replace("\n", " ").replace("\r", " ").replace("\t", " ")
