"""Output files of commands with one answer per line of input, and the share of the input that a process reads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.base.errors import InputError
from clearhead.base.files import explain_absent, names_in, refuse_unwritable, sync

if TYPE_CHECKING:
    from numpy import ndarray

    from clearhead import Model

STANDARD_INPUT: Final = Path("-")
EXPLICIT: Final = "--share"
_WHOLE_FILE: Final = "--share 1/1 reads the whole file"


@dataclass(frozen=True)
class FileShare:
    """Contiguous share of a file's lines, for one of several processes that answer the file together.

    Attributes:
        number: the number of the share, from 1.
        count: the number of shares.
        origin: the source of the share: "--share", or an environment such as "torchrun".
    """

    number: int
    count: int
    origin: str = EXPLICIT

    @classmethod
    def parse(cls, text: str) -> FileShare:
        """Parse a share such as 2/8.

        Raises:
            InputError: the text is not I/N with I from 1 to N.
        """
        match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            raise InputError(f"--share expects I/N with I from 1 to N, such as 2/8; got {text!r}")
        return cls(number, count)

    @classmethod
    def from_environment(cls) -> FileShare | None:
        """Return the share of this process under torchrun, in a Slurm array, or in both; None otherwise.

        Raises:
            InputError: the environment variables contradict each other.
        """
        levels = {"a Slurm array": _array_task(), "torchrun": _rank()}
        names = [name for name, level in levels.items() if level is not None]
        number, count = 0, 1
        for index, size in filter(None, levels.values()):
            number, count = number * size + index, count * size
        return cls(number + 1, count, " of ".join(reversed(names))) if names else None

    def file_of(self, output: Path) -> Path:
        """Return the path of the output file for one share of the input, such as out.txt.2-of-8."""
        return output.with_name(f"{output.name}.{self.number}-of-{self.count}")


def _rank() -> tuple[int, int] | None:
    """Return the rank of this process under torchrun and the number of processes, or None without torchrun."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None or rank >= size:
        values = f"RANK is {os.environ.get('RANK')}, WORLD_SIZE is {os.environ.get('WORLD_SIZE')}"
        raise InputError(f"{values}: torchrun sets both, with RANK from 0 to WORLD_SIZE - 1; unset or correct them")
    return rank, size


def _array_task() -> tuple[int, int] | None:
    """Return the index of this task in its Slurm array, from 0, and the number of tasks; None outside an array."""
    task, least, most, count = (_number(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "COUNT"))
    if task is None or least is None or count is None:
        return None
    step = _number("SLURM_ARRAY_TASK_STEP") or 1
    index, rest = divmod(task - least, step)
    if rest or not 0 <= index < count or (most is not None and most - least != (count - 1) * step):
        raise InputError(
            f"the tasks of this Slurm array are not evenly spaced (task {task} of {count} from {least} to {most}), so "
            f"no shares follow from them: name each share, as --share I/N; {_WHOLE_FILE}"
        )
    return index, count


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"the environment variable {name} must be a whole number from 0, got {text!r}")
    return int(text) if text else None


@dataclass
class AnswerFile:
    """Output file with one answer per line; it has a temporary name until it is complete, so that it can be resumed.

    Attributes:
        path: the path of the complete file.
        partial: the path of the file while it is written.
        share: the share of the input that the file answers. None means the whole input.
        can_resume: True if a later command can continue the partial file.
        num_answers: the number of answers that a stopped command has written.
        file: the partial file while it is open.
        has_first_window: True once the first group (window) of answers is complete.
    """

    path: Path
    partial: Path
    share: FileShare | None
    can_resume: bool
    num_answers: int = 0
    file: BinaryIO | None = None
    has_first_window: bool = False

    @contextmanager
    def open_for_writing(self) -> Iterator[BinaryIO]:
        """Open the partial file after its last whole answer; at the end of the with block it gets its final name.

        After a mistake in the first lines the file is removed. Any other failure keeps the answers for --resume.
        """
        try:
            with self.partial.open("r+b" if self.partial.exists() else "w+b") as file:
                self.num_answers, end = self.find_end(file)
                file.truncate(end)
                file.seek(end)
                self.file = file
                yield file
                self.finish(file)
            sync(self.partial)
            self.partial.replace(self.path)
            sync(self.path.parent)
        except BaseException as error:
            is_mistake = isinstance(error, InputError) and not (self.has_first_window or self.num_answers)
            if is_mistake or not self.can_resume:
                self.partial.unlink(missing_ok=True)
            raise

    @property
    def is_shared(self) -> bool:
        """True if this file has the answers to one share of the input, and other output files have the rest."""
        return self.share is not None and self.share.count > 1

    @property
    def resume_hint(self) -> str:
        """End of the message of a stopped command: advice to use --resume, or that the file is not written."""
        return "; --resume goes on from there" if self.can_resume else f"; {self.path} is not written"

    def find_end(self, file: BinaryIO) -> tuple[int, int]:
        """Return the number of whole answers in a file, and the byte offset after the last one."""
        count = end = 0
        for line in takewhile(lambda line: line.endswith(b"\n"), file):
            count, end = count + 1, end + len(line)
        return count, end

    def finish(self, file: BinaryIO) -> None:
        """Complete the file after its last answer, such as by a header; lines of text need nothing."""

    def report(self, num_lines: int, *, as_json: bool) -> None:
        """Print the name of the complete file."""
        print_message(f"{num_lines:,} lines are answered")
        print_either(as_json, {"file": str(self.path), "lines": num_lines}, str(self.path))


class RankedLines(AnswerFile):
    """Output file with several lines per answer, each of which begins with the index of the text."""

    def find_end(self, file: BinaryIO) -> tuple[int, int]:
        """Return the number of whole answers and their end in bytes, without the last, perhaps incomplete answer."""
        count = start = end = 0
        last = b""
        for line in takewhile(lambda line: line.endswith(b"\n"), file):
            index = line.partition(b" ||| ")[0]
            if index != last:
                count, start, last = count + 1, end, index
            end += len(line)
        return max(count - 1, 0), start


@dataclass
class VectorFile(AnswerFile):
    """Output file in .npy format (float32) with one row per line of input; the header is completed at the end.

    Attributes:
        width: the number of values per row; set it before writing.
    """

    width: int = 0

    def find_end(self, file: BinaryIO) -> tuple[int, int]:
        """Write the .npy header, and return the number of whole rows and the byte offset after them."""
        # The length of the header does not depend on the number of rows.
        self._write_header(file, 0)
        start = file.tell()
        num_rows = max(0, file.seek(0, os.SEEK_END) - start) // self._row_bytes
        return num_rows, start + num_rows * self._row_bytes

    def add(self, vector: ndarray) -> None:
        """Append one vector as a row."""
        assert self.file is not None
        self.file.write(vector.astype("<f4").tobytes())

    def finish(self, file: BinaryIO) -> None:
        """Write the number of rows into the .npy header."""
        end = file.tell()
        self._write_header(file, 0)
        self._write_header(file, (end - file.tell()) // self._row_bytes)

    def report(self, num_lines: int, *, as_json: bool) -> None:
        """Print the name of the complete file."""
        print_message(f"{num_lines} vectors of width {self.width}")
        print_either(as_json, {"file": str(self.path), "texts": num_lines, "width": self.width}, str(self.path))

    @property
    def _row_bytes(self) -> int:
        return 4 * self.width

    def _write_header(self, file: BinaryIO, num_rows: int) -> None:
        from numpy.lib.format import write_array_header_1_0

        file.seek(0)
        write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (num_rows, self.width)})


@dataclass(frozen=True)
class OutputOptions:
    """Options for the output file of a command with one answer per line, and for its share of the input.

    Attributes:
        output: the path of the output file. None means standard output.
        share: the share as I/N. None means that the environment decides.
        resume: True to continue after a stopped command.
        force: True to replace an existing file.
        settings: all other parameters of the command by name; a file is resumed only with equal settings.
    """

    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the answers to this file.")
    ] = None
    share: Annotated[
        str | None,
        typer.Option(
            "--share", metavar="I/N", help="Answer only share I of N contiguous shares of the lines; write FILE.I-of-N."
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last whole answer of a stopped command.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def as_json(self) -> bool:
        """True if answers are written as JSON."""
        return bool(self.settings["as_json"])

    def refuse_unstable_choice(self, output: AnswerFile | None, choice: str, option: str) -> None:
        """Refuse a choice, such as a drawn seed, that would differ between shares of the input or after --resume.

        Args:
            output: the output file. None means standard output.
            choice: the description of the choice, as the start of the message.
            option: the option that fixes the choice.

        Raises:
            InputError: the command answers a share or resumes a file.
        """
        if output is not None and (output.is_shared or self.resume):
            raise InputError(f"{choice}, which differs between shares and after --resume: add {option}")

    def refuse_unused(self, reason: str) -> None:
        """Refuse the output options if the command answers a single text.

        Args:
            reason: the end of the message, such as "without --file".

        Raises:
            InputError: one of the options is given.
        """
        values = {"-o": self.output, "--share": self.share, "--resume": self.resume, "--force": self.force}
        for option, value in values.items():
            if value:
                raise InputError(f"{option} has no effect {reason}")

    def find_output(self, source: Path, kind: type[AnswerFile]) -> AnswerFile | None:
        """Return the output file, or None for standard output; end the command if the file is complete.

        Args:
            source: the input file.
            kind: the format of the output file.

        Raises:
            InputError: options contradict each other, the input cannot be split, or the file cannot be written.
        """
        share = self._choose_share(source)
        if self.output is None:
            for option, value in (("--resume", self.resume), ("--force", self.force)):
                if value:
                    raise InputError(f"{option} has no effect without -o; leave it out")
            return None
        if self.resume and (self.force or source == STANDARD_INPUT):
            reason = "--force starts again: leave out one" if self.force else "standard input cannot be read twice"
            raise InputError(f"--resume continues a stopped command, but {reason}")
        path = self.output if share is None else share.file_of(self.output)
        is_complete = path.is_file() and not self.force and (self.resume or share is not None)
        refuse_unwritable(path, force=self.force or is_complete)
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: {explain_absent(path.parent, 'folder')}")
        if is_complete:
            print_message(f"{path} is already complete, so nothing is computed; --force computes it again")
            raise typer.Exit(0)
        if share is not None:
            hint = "" if share.origin == EXPLICIT else f", from {share.origin} ({_WHOLE_FILE})"
            print_message(f"{path}: share {share.number}/{share.count} of {source}{hint}")
        return kind(path, self._find_partial(path, source), share, can_resume=source != STANDARD_INPUT)

    def _choose_share(self, source: Path) -> FileShare | None:
        share = FileShare.from_environment() if self.share is None else FileShare.parse(self.share)
        if share is None or share.count == 1:
            return None if self.output is None else share
        if self.output is None:
            raise InputError(
                f"{share.origin} splits the lines into {share.count} shares, one file each: add -o FILE, or "
                + _WHOLE_FILE
            )
        faults = {
            "standard input cannot be split into shares: name a file": source == STANDARD_INPUT,
            f"{source} is compressed and cannot be split into shares: decompress it": source.suffix == ".gz",
            f"{source} is no regular file and cannot be split: copy it": source.exists() and not source.is_file(),
        }
        for fault, is_so in faults.items():
            if is_so:
                raise InputError(f"{fault}; {_WHOLE_FILE}")
        return share

    def _find_partial(self, path: Path, source: Path) -> Path:
        """Return the path of the partial file for these settings and this input.

        Raises:
            InputError: a stopped command left a partial file, and --resume is not given or the settings
                or the input differ.
        """
        status = source.stat() if source.is_file() else None
        content = [sorted(self.settings.items()), status and (status.st_size, status.st_mtime_ns)]
        prefix = f"{path.name}.partial-"
        partial = path.with_name(prefix + hashlib.sha256(repr(content).encode()).hexdigest()[:8])
        others = [path.with_name(name) for name in names_in(path.parent) if name.startswith(prefix)]
        for other in others:
            if self.force:
                other.unlink(missing_ok=True)
            elif not self.resume:
                raise InputError(f"{other} was left by a stopped command: --resume continues it, --force starts again")
            elif other != partial:
                raise InputError(
                    f"{other} has answers with other options or of another input: --resume needs the same command and "
                    "file; --force starts again"
                )
        return partial


def explain_rounding(model: Model, output: AnswerFile | None) -> None:
    """Print a notice if rounding may make the answers of shares differ from those of a single process."""
    if output is not None and output.is_shared and not model.is_batch_invariant:
        print_message(
            "results of this model depend on their batch in the last digits, so shares can differ from one process by "
            "rounding; on a CPU, --precision fp32 gives equal bytes"
        )
