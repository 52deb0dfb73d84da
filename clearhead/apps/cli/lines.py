"""Input of commands: one line in, one line out. Lines are answered in windows, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from clearhead.apps.cli.console import LINE_ENDS, MessageDisplay
from clearhead.apps.cli.progress import Bar, at_rest, counting
from clearhead.base.arguments import window_sizes
from clearhead.base.errors import InputError, Reference, renaming
from clearhead.base.files import binary
from clearhead.base.progress import Counted, shown_by

STANDARD_INPUT = Path("-")
# Of standard input, at a time.
BLOCK_BYTES = 1 << 16
AnswerT = TypeVar("AnswerT")


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


@dataclass(frozen=True)
class Input:
    """The texts of a command: the lines of a file or of standard input, or one text of the command line.

    Attributes:
        name: for messages; None: there is one text, without a file.
        blocks: the lines, in the parts in which they arrive.
        total: the number of lines; None: not known.
    """

    name: str | None
    blocks: Iterable[Sequence[str]]
    total: int | None

    @classmethod
    def of(cls, file: Path) -> Input:
        """Return the lines of a file, which is read whole, or those of standard input, as they arrive.

        Raises:
            InputError: the input is missing, empty or unreadable, or a line is not valid UTF-8.
        """
        from clearhead.data.sources.lines import read_lines as read_file

        if is_standard_input(file):
            return cls(name_of(file), _filled(_arriving(_from_standard_input)), None)
        lines = read_file(file)
        return cls(name_of(file), [lines], len(lines))

    def windows(self, batch_size: int | None) -> Iterator[list[tuple[int, str]]]:
        """Yield numbered lines that are answered together; those that have arrived do not wait for others."""
        sizes, number = window_sizes(batch_size), 1
        for block in self.blocks:
            lines = iter(block)
            while window := list(enumerate(islice(lines, next(sizes)), start=number)):
                yield window
                number += len(window)


def answer_lines(
    lines: Input,
    answer: Callable[[list[Any]], Iterable[AnswerT]],
    show: Callable[[Line, AnswerT | None], None],
    *,
    batch_size: int | None,
    paired: bool = False,
    output: Path | None = None,
) -> None:
    """Answer every line, and show each answer as soon as it and those before it are there.

    Args:
        lines: the texts.
        answer: answers several texts, or pairs of texts; its errors name a text by its number.
        show: called with every line and its answer, in order; an empty line has None.
        batch_size: most texts of a batch; None: a token budget decides.
        paired: whether a line holds two texts with a tab between them.
        output: the file that is written when all is done; None: `show` writes to standard output.

    Raises:
        InputError: the input is unusable, or a text cannot be answered.
    """
    # Lines that scroll by are progress enough.
    is_shown = output is not None or not sys.stdout.isatty()
    kept = ""
    if output is not None:
        kept = f"; {output} is not written"
    with counting("lines", lines.total, is_shown=is_shown, kept=kept) as bar:
        for window in lines.windows(batch_size):
            read = [line_of(number, text, lines.name, paired=paired) for number, text in window]
            filled = [line for line in read if not line.is_empty]
            by_line = named_by_line([line.number for line in filled], lines.name)
            answers: Iterator[AnswerT] = iter(())
            with shown_by(_Share(bar, bar.done, len(filled))), renaming(by_line):
                if filled:
                    answers = iter(answer([line.text for line in filled]))
            for line in read:
                show(line, None if line.is_empty else next(answers))
                bar.done += 1
            bar.show(bar.done)


@dataclass(frozen=True)
class _Share(MessageDisplay):
    """Shows the share of a window that is computed; a line is done when its answer is shown.

    Attributes:
        bar: of the lines.
        before: lines before the window.
        count: lines of the window that are computed.
    """

    bar: Bar
    before: int
    count: int

    def update(self, done: int, total: int, what: Counted) -> None:
        """Show the share."""
        if what == "examples":
            self.bar.show(self.before + self.count * done // total)


def line_of(number: int, text: str, name: str | None, *, paired: bool) -> Line:
    """Return a line of input.

    Args:
        number: of the line, counted from 1.
        text: the line.
        name: of the input, for messages.
        paired: whether it holds two texts with a tab between them.

    Raises:
        InputError: it is no pair.
    """
    return Line(number, split_pair(number, text, name) if paired else text)


def split_pair(number: int, text: str, name: str | None) -> tuple[str, str]:
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
        InputError: as for `Input.of`.
    """
    return chain.from_iterable(Input.of(source).blocks)


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


def _arriving(read: Callable[[int], bytes]) -> Iterator[list[str]]:
    """Yield lines in the blocks in which they arrive, so that none waits for the next.

    Args:
        read: returns what is there, at most so many bytes, and waits only where there is nothing.
    """
    number, begun = 1, list[bytes]()
    while block := read(BLOCK_BYTES):
        first, *more = block.split(b"\n")
        begun.append(first)
        if more:
            lines = [b"".join(begun), *more[:-1]]
            yield [_decoded(line, place) for place, line in enumerate(lines, start=number)]
            number, begun = number + len(lines), [more[-1]]
    if rest := b"".join(begun):
        yield [_decoded(rest, number)]


def _from_standard_input(size: int) -> bytes:
    with at_rest():
        return bytes(sys.stdin.buffer.read1(size))  # type: ignore[union-attr]


def _filled(blocks: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the lines of standard input; without any it is refused, as an empty file is."""
    is_empty = True
    for block in blocks:
        is_empty = False
        yield block
    if is_empty:
        raise InputError(f"{name_of(STANDARD_INPUT)} is empty; expected at least one line of text")


def _decoded(line: bytes, number: int) -> str:
    if b"\0" in line:
        raise binary(f"standard input:{number}")
    try:
        return line.decode("utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input:{number}: not valid UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); "
            "convert the file to UTF-8"
        ) from None


def is_standard_input(source: Path) -> bool:
    """Return whether a file name on the command line means standard input."""
    return source == STANDARD_INPUT


def name_of(file: Path) -> str:
    """Return the name of the input for messages."""
    return "standard input" if is_standard_input(file) else str(file)


def named_by_line(numbers: Sequence[int], name: str | None) -> Callable[[Reference], str | Reference]:
    """Return how to name one of several texts, counted from 1: by the line of the file that it came from.

    Args:
        numbers: the line of each text, counted from 1.
        name: of the file; None: there is only one text, without a file.
    """

    def line_of(text: Reference) -> str | Reference:
        if not text.number:
            return text
        if name is None:
            return f"the {text.name}"
        # The second texts of pairs can be counted after all the first ones.
        line = f"{name}:{numbers[(text.number - 1) % len(numbers)]}"
        return line if text.kind == "place" else f"{line}: the {text.name}"

    return line_of


def one_line(text: str) -> str:
    """Return a text as one column of a line: without line ends and tabs, which would break the output format."""
    return LINE_ENDS.sub(" ", text).replace("\t", " ")
