"""Line input of commands: reads lines, answers them in groups (windows), and writes the answers in order."""

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
from clearhead.base.arguments import LARGEST_WINDOW, window_sizes
from clearhead.base.errors import InputError, MessageReference, renaming
from clearhead.base.files import binary_file_error
from clearhead.base.progress import Counted, use_display

# The most bytes of standard input that are read at once.
BLOCK_BYTES = 1 << 16
# Bytes of a file that are read before its first line is answered, so that faults in a small file come first.
HEAD_BYTES: Final = 1 << 24
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class InputLine:
    """One line of a command's input.

    Attributes:
        position: the number of the line within the share of this process, from 1.
        text: the text of the line, or both texts of a pair.
        count_before: function that counts the lines before the share of this process; it reads all of them.
    """

    position: int
    text: str | tuple[str, str]
    count_before: Callable[[], int] = int

    @property
    def number(self) -> int:
        """The number of the line in the whole file, from 1."""
        return self.count_before() + self.position

    @property
    def is_empty(self) -> bool:
        """True if the line has no text to answer."""
        return not "".join(self.text).strip()

    def record(self) -> dict[str, object]:
        """Return the line as JSON values; its index counts from 0."""
        if isinstance(self.text, str):
            return {"index": self.number - 1, "text": self.text}
        return {"index": self.number - 1, "text": self.text[0], "pair": self.text[1]}


@dataclass(frozen=True)
class TextInput:
    """The texts of a command: the lines of a file or of standard input, or one text of the command line.

    Attributes:
        name: the name of the input in messages. None means a single text without a file.
        blocks: the lines, in blocks; all lines of a block have arrived when the block is yielded.
        total: the number of lines. None means unknown.
        is_estimate: True if `total` is a forecast from the first lines of a large file.
        count_before: function that counts the lines before the share of this process.
        output: the file for the answers. None means standard output.
        as_json: True if the report on `output` is a JSON object.
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
        """Return the lines of a file or of standard input, read while they are answered.

        A file is read in constant memory. For a share, only its bytes are read.

        Args:
            file: the path of the file, or "-" for standard input.
            options: the output file and the share. None means all lines and no output file.
            kind: the format of the output file.

        Raises:
            InputError: the input is missing, empty or unreadable, or a line near its start is not valid UTF-8; or
                `OutputOptions.find_output` refuses the options.
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

    def windows(self, batch_size: int | None, largest: int) -> Iterator[list[tuple[int, str]]]:
        """Yield groups of lines to answer together: those that have arrived, without waiting for more."""
        sizes, position = window_sizes(batch_size, largest), 1
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
    largest: int = LARGEST_WINDOW,
) -> None:
    """Compute an answer for every line, and show the answers in order as they become available.

    Answers that a stopped command has written are not shown again. Its last group of lines (window) is computed again
    as a whole, so that its batches equal those of an uninterrupted command.

    Args:
        lines: the texts, and the file for the answers.
        answer: function that answers a list of texts or pairs; its errors name a text by its number.
        show: function that prints an answer, called in order with each line and its answer; None for an empty line.
        batch_size: the maximum number of texts in a batch. None means that a token budget decides.
        paired: True if each line holds two texts with a tab between them.
        largest: the maximum number of lines that are answered together.

    Raises:
        InputError: the input is unusable, or a text cannot be answered.
    """
    output = lines.output
    with _show_progress(lines) as bar, _open_output(output) as (num_written, printing):
        for window in lines.windows(batch_size, largest):
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
    """Return the answers to the non-empty lines of one group (window) of input lines."""
    filled = [line for line in lines if not line.is_empty]
    with use_display(_WindowProgress(bar, bar.done, len(filled))), renaming(line_namer(filled, name)):
        return iter(answer([line.text for line in filled]) if filled else ())


@contextmanager
def _open_output(output: AnswerFile | None) -> Iterator[tuple[int, AbstractContextManager[object]]]:
    """Open the output file; yield the number of answers in it, and a context that redirects `print` to it."""
    if output is None:
        yield 0, nullcontext()
        return
    with output.open_for_writing() as file:
        yield output.num_answers, redirect_stdout(io.TextIOWrapper(file, encoding="utf-8", newline="\n"))


def _read_head(lines: Iterator[str]) -> tuple[list[str], int]:
    """Take lines of an input until they have `HEAD_BYTES` bytes or end; return the lines and their number of bytes."""
    head, size = list[str](), 0
    for line in lines:
        head.append(line)
        size += len(line.encode()) + 1
        if size >= HEAD_BYTES:
            break
    return head, size


def _show_progress(lines: TextInput) -> AbstractContextManager[Bar]:
    """Return the progress display of a command: a bar, or log lines if the answers go to a file."""
    output = lines.output
    if output is None:
        # Answers that scroll by on the terminal show the progress.
        return show_counts("lines", lines.total, is_shown=not sys.stdout.isatty())
    # Several processes on one terminal would overwrite each other's bars.
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
    """Progress display for one window (group of lines), which adds its computed fraction to the bar for all lines.

    Attributes:
        bar: the bar that counts lines.
        before: the number of lines before the window.
        count: the number of non-empty lines in the window.
    """

    bar: Bar
    before: int
    count: int

    def update(self, done: int, total: int, what: Counted) -> None:
        """Show the lines before the window plus the computed fraction of the window."""
        if what == "examples":
            self.bar.show(self.before + self.count * done // total)


def parse_line(position: int, text: str, lines: TextInput, *, paired: bool) -> InputLine:
    """Parse one line of input.

    Args:
        position: the number of the line, from 1.
        text: the text of the line.
        lines: the input.
        paired: True if the line holds two texts with a tab between them; an empty line is a pair of empty texts.

    Raises:
        InputError: a line of a pair has no tab, or several.
    """
    line = InputLine(position, text, lines.count_before)
    if not paired:
        return line
    columns = ["", ""] if line.is_empty else text.split("\t")
    if len(columns) != 2:
        actual = "one text" if len(columns) == 1 else f"{len(columns)} columns"
        raise InputError(f"{lines.name}:{line.number}: expected two texts with one tab between them, got {actual}")
    return replace(line, text=(columns[0], columns[1]))


def read_lines(source: Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", without their line ends.

    Only a line feed ends a line. The first `HEAD_BYTES` of a file are read before its first line is
    yielded. Errors in a small file are thus found before any answer.

    Raises:
        InputError: the input is missing, empty or unreadable, or a line near its start is not valid UTF-8.
    """
    return chain.from_iterable(TextInput.of(source).blocks)


def read_numbers(source: Path) -> list[float]:
    """Return the numbers of a text file, or of standard input for "-", one per line.

    Raises:
        InputError: the file is unusable, or a line is not a finite number.
    """
    numbers = []
    for number, line in enumerate(read_lines(source), start=1):
        try:
            numbers.append(float(line))
        except ValueError:
            raise InputError(f"{name_of(source)}:{number}: expected a number, got {line!r}") from None
    return numbers


def _split_blocks(read: Callable[[int], bytes]) -> Iterator[list[str]]:
    """Yield the lines of a stream in blocks as they arrive, so that no line waits for the next.

    Args:
        read: function that returns the available bytes, at most the given number; it waits only if none is available.
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
    """Yield the blocks of standard input; raise InputError if there is no line."""
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
    """Return whether a path on the command line means standard input."""
    return source == STANDARD_INPUT


def name_of(file: Path) -> str:
    """Return the name of an input file for messages."""
    return "standard input" if is_standard_input(file) else str(file)


def line_namer(lines: Sequence[InputLine], name: str | None) -> Callable[[MessageReference], str | MessageReference]:
    """Return a function that names the n-th text by its line in the file, such as texts.de:7.

    Args:
        lines: the line of each text.
        name: the name of the file. None means a single text without a file.
    """

    def name_text(text: MessageReference) -> str | MessageReference:
        if not text.number:
            return text
        if name is None:
            return f"the {text.name}"
        # The second texts of pairs may be numbered after all first ones.
        line = f"{name}:{lines[(text.number - 1) % len(lines)].number}"
        return line if text.kind == "place" else f"{line}: the {text.name}"

    return name_text


def one_line(text: str) -> str:
    """Return a text without line ends and tabs, as one column of an output line."""
    return LINE_ENDS.sub(" ", text).replace("\t", " ")
