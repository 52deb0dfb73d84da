"""Input of commands: one line in, one line out. Lines are answered in windows, in order."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeVar

from clearhead.apps.cli.console import LINE_ENDS, MessageDisplay
from clearhead.apps.cli.outputs import EXPLICIT, STANDARD_INPUT, AnswerFile, FileShare, OutputOptions
from clearhead.apps.cli.progress import Bar, pause_idle_time, show_counts
from clearhead.base.arguments import window_sizes
from clearhead.base.errors import InputError, MessageReference, renaming
from clearhead.base.files import binary_file_error
from clearhead.base.progress import Counted, use_display

# Of standard input, at a time.
BLOCK_BYTES = 1 << 16
# So much of a file is read before its first line is answered: faults in a small file are reported first.
HEAD_BYTES: Final = 1 << 24
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class InputLine:
    """One line of input.

    Attributes:
        position: the line in the share that is read, counted from 1.
        text: its text, or both texts of a pair.
        count_before: counts the lines of the file before the share, which takes a pass over them.
    """

    position: int
    text: str | tuple[str, str]
    count_before: Callable[[], int] = int

    @property
    def number(self) -> int:
        """The line in the whole file, counted from 1."""
        return self.count_before() + self.position

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
class TextInput:
    """The texts of a command: the lines of a file or of standard input, or one text of the command line.

    Attributes:
        name: for messages; None: there is one text, without a file.
        blocks: the lines, in the parts in which they arrive.
        total: the number of lines; None: not known.
        is_estimate: whether `total` is a forecast from the first lines of a large file.
        count_before: as for `Line`.
        output: the file of the answers; None means standard output.
        as_json: whether the report on `output` is a JSON object.
    """

    name: str | None
    blocks: Iterable[Iterable[str]]
    total: int | None
    is_estimate: bool = False
    count_before: Callable[[], int] = int
    output: AnswerFile | None = None
    as_json: bool = False

    @classmethod
    def of(cls, file: Path, options: OutputOptions | None = None, kind: type[AnswerFile] = AnswerFile) -> TextInput:
        """Return the lines of a file, or those of standard input, as they arrive.

        A file is read as its lines are answered, in constant memory. Of a share, only its bytes are read.

        Args:
            file: the file, or "-".
            options: where the answers go, and which share is read; None means all lines and no file.
            kind: the form of the answers in a file.

        Raises:
            InputError: the input is missing, empty or unreadable, a line near its start is not valid UTF-8, or as for
                `OutputOptions.find_output`.
        """
        output, as_json = None, False
        if options is not None:
            output, as_json = options.find_output(file, kind), options.as_json
        if is_standard_input(file):
            texts = cls(name_of(file), _refuse_empty(_split_blocks(_from_standard_input)), None)
        elif output is not None and output.share is not None and output.is_shared:
            texts = cls._of_share(file, output.share)
        else:
            texts = cls._of_file(file)
        return replace(texts, output=output, as_json=as_json)

    @classmethod
    def _of_file(cls, file: Path) -> TextInput:
        from clearhead.data.sources.lines import empty_file, stream_lines

        lines = stream_lines(file)
        head, size = _read_head(lines)
        if not head:
            raise empty_file(file)
        is_estimate = size >= HEAD_BYTES
        total: int | None = len(head)
        if is_estimate:
            can_forecast = file.is_file() and file.suffix != ".gz"
            total = len(head) * file.stat().st_size // size if can_forecast else None
        return cls(name_of(file), [chain(head, lines)], total, is_estimate)

    @classmethod
    def _of_share(cls, file: Path, share: FileShare) -> TextInput:
        from clearhead.data.sources.lines import count_lines_before, find_share, stream_lines

        span = find_share(file, share.number, share.count)
        lines = stream_lines(file, span)
        head, size = _read_head(lines)
        is_estimate, total = size >= HEAD_BYTES, len(head)
        if is_estimate:
            total = total * len(span) // size
        count_before = cache(partial(count_lines_before, file, span.start))
        return cls(name_of(file), [chain(head, lines)], total, is_estimate, count_before)

    def windows(self, batch_size: int | None) -> Iterator[list[tuple[int, str]]]:
        """Yield numbered lines that are answered together; those that have arrived do not wait for others."""
        sizes, position = window_sizes(batch_size), 1
        for block in self.blocks:
            lines = iter(block)
            while window := list(enumerate(islice(lines, next(sizes)), start=position)):
                yield window
                position += len(window)


def answer_lines(
    lines: TextInput,
    answer: Callable[[list[Any]], Iterable[AnswerT]],
    show: Callable[[InputLine, AnswerT | None], None],
    *,
    batch_size: int | None,
    paired: bool = False,
) -> None:
    """Answer every line, and show each answer as soon as it and those before it are there.

    Answers that a stopped command has written are not shown again. The window in which it was stopped is computed
    again as a whole: its batches are those of a command that was not stopped.

    Args:
        lines: the texts, and the file of the answers.
        answer: answers several texts, or pairs of texts; its errors name a text by its number.
        show: prints an answer; called with every line and its answer, in order; an empty line has None.
        batch_size: most texts of a batch; None: a token budget decides.
        paired: whether a line holds two texts with a tab between them.

    Raises:
        InputError: the input is unusable, or a text cannot be answered.
    """
    output = lines.output
    with _show_progress(lines) as bar, _open_output(output) as (num_written, printing):
        for window in lines.windows(batch_size):
            last = window[-1][0]
            if last <= num_written:
                bar.skip(last)
                continue
            read = [parse_line(position, text, lines, paired=paired) for position, text in window]
            answers = _answer_window(read, lines.name, answer, bar)
            with printing:
                for line in read:
                    value = None if line.is_empty else next(answers)
                    if line.position > num_written:
                        show(line, value)
                    bar.done += 1
                sys.stdout.flush()
            bar.show(bar.done)
            if output is not None:
                output.has_first_window = True
    if output is not None:
        output.report(bar.done, as_json=lines.as_json)


def _answer_window(
    lines: Sequence[InputLine], name: str | None, answer: Callable[[list[Any]], Iterable[AnswerT]], bar: Bar
) -> Iterator[AnswerT]:
    """Return the answers to the lines of a window that are not empty."""
    filled = [line for line in lines if not line.is_empty]
    with use_display(_WindowProgress(bar, bar.done, len(filled))), renaming(line_namer(filled, name)):
        return iter(answer([line.text for line in filled]) if filled else ())


@contextmanager
def _open_output(output: AnswerFile | None) -> Iterator[tuple[int, AbstractContextManager[object]]]:
    """Give the number of answers that the output has, and a context manager in which `print` writes to it."""
    if output is None:
        yield 0, nullcontext()
        return
    with output.open_for_writing() as file:
        yield output.num_answers, redirect_stdout(io.TextIOWrapper(file, encoding="utf-8", newline="\n"))


def _read_head(lines: Iterator[str]) -> tuple[list[str], int]:
    """Take the first lines, with at least `HEAD_BYTES` if there are so many, and return them and their bytes."""
    head, size = list[str](), 0
    for line in lines:
        head.append(line)
        size += len(line.encode()) + 1
        if size >= HEAD_BYTES:
            break
    return head, size


def _show_progress(lines: TextInput) -> AbstractContextManager[Bar]:
    """Return the progress of a command: a bar, or lines in a log where the answers go to a file."""
    output = lines.output
    if output is None:
        # Lines that scroll by are progress enough.
        return show_counts("lines", lines.total, is_shown=not sys.stdout.isatty())
    # The bars of several processes on one terminal would overwrite each other.
    is_alone = output.share is None or output.share.origin == EXPLICIT
    return show_counts(
        "lines",
        lines.total,
        is_shown=is_alone,
        stop_note=output.resume_hint,
        log=f"{output.path}: ",
        is_estimate=lines.is_estimate,
    )


@dataclass(frozen=True)
class _WindowProgress(MessageDisplay):
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


def parse_line(position: int, text: str, lines: TextInput, *, paired: bool) -> InputLine:
    """Return a line of input.

    Args:
        position: of the line, counted from 1.
        text: the line.
        lines: the input.
        paired: whether the line holds two texts with a tab between them; an empty one is a pair of empty texts.

    Raises:
        InputError: there is not exactly one tab between two texts.
    """
    line = InputLine(position, text, lines.count_before)
    if not paired:
        return line
    columns = ["", ""] if line.is_empty else text.split("\t")
    if len(columns) != 2:
        actual = "one text" if len(columns) == 1 else f"{len(columns)} columns"
        raise InputError(f"{lines.name}:{line.number}: expected two texts with one tab between them, received {actual}")
    return replace(line, text=(columns[0], columns[1]))


def read_lines(source: Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", without their line ends.

    Only a line feed ends a line. The first `HEAD_BYTES` of a file are read before its first line is yielded, so that an
    error in a small file is found before anything is answered.

    Raises:
        InputError: as for `Input.of`.
    """
    return chain.from_iterable(TextInput.of(source).blocks)


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


def _split_blocks(read: Callable[[int], bytes]) -> Iterator[list[str]]:
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
            yield [_decode_line(line, line_number) for line_number, line in enumerate(lines, start=number)]
            number, begun = number + len(lines), [more[-1]]
    if rest := b"".join(begun):
        yield [_decode_line(rest, number)]


def _from_standard_input(size: int) -> bytes:
    with pause_idle_time():
        return bytes(sys.stdin.buffer.read1(size))  # type: ignore[union-attr]


def _refuse_empty(blocks: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the lines of standard input; without any it is refused, as an empty file is."""
    is_empty = True
    for block in blocks:
        is_empty = False
        yield block
    if is_empty:
        raise InputError(f"{name_of(STANDARD_INPUT)} is empty; expected at least one line of text")


def _decode_line(line: bytes, number: int) -> str:
    if b"\0" in line:
        raise binary_file_error(f"standard input:{number}")
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


def line_namer(lines: Sequence[InputLine], name: str | None) -> Callable[[MessageReference], str | MessageReference]:
    """Return how to name one of several texts, counted from 1: by the line of the file that it came from.

    Args:
        lines: the line of each text.
        name: of the file; None: there is only one text, without a file.
    """

    def name_text(text: MessageReference) -> str | MessageReference:
        if not text.number:
            return text
        if name is None:
            return f"the {text.name}"
        # The second texts of pairs can be counted after all the first ones.
        line = f"{name}:{lines[(text.number - 1) % len(lines)].number}"
        return line if text.kind == "place" else f"{line}: the {text.name}"

    return name_text


def one_line(text: str) -> str:
    """Return a text as one column of a line: without line ends and tabs, which would break the output format."""
    return LINE_ENDS.sub(" ", text).replace("\t", " ")
