"""Errors and warnings for users: wrong input, failures at run time, truncated texts."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

# Limits of a message: faults, characters of a line, and characters of a word, such as a name from a file or a path.
MOST_FAULTS, LONGEST_LINE, LONGEST_WORD = 20, 2000, 255
_LONG_WORD = re.compile(rf"[^\s'\"]{{{LONGEST_WORD + 1},}}")
# Control characters, lone surrogates, and characters that reverse or break a line.
_SPACES = re.compile(r"[^\S ]")
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_unsafe(text: str, *, allowed: str = "") -> str:
    """Escape the characters of a text that would control a terminal, so that a name from a file cannot forge a message.

    Args:
        text: any text.
        allowed: the unsafe characters that are not escaped, such as line breaks.
    """
    return UNSAFE.sub(lambda match: match[0] if match[0] in allowed else ascii(match[0])[1:-1], text)


def json_text(value: object) -> str:
    """Return a value as JSON for a message, with Unicode spaces escaped, and shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return shorten(_SPACES.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def shorten(text: str, most: int = 40) -> str:
    """Return a text for a message, cut off if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def program_name(command: str) -> str:
    """Return the name of a command's program, without its folder and without arguments, which may contain passwords."""
    words = (PurePath(word).name for word in command.split() if "=" not in word)
    return next(words, "(a command without a name)")


def _line(text: str) -> str:
    """Return a line of a message, escaped for terminals, with long words and long lines shortened."""
    line = _LONG_WORD.sub(lambda match: shorten(match[0], 80), escape_unsafe(text))
    return shorten(line, LONGEST_LINE)


@dataclass(frozen=True)
class MessageReference:
    """Subject of a message: an argument in Python, a key of a run file or of another file, or one of several texts.

    Args:
        kind: the kind of subject. A "field" is a key of another file, without an option on the command line. A "text"
            is the subject of a sentence, as in "text 3 is empty". A "place" is a prefix, as in "text 3: ...".
        name: the name of the argument or key, or the noun for a text.
        value: the suggested value of the argument or key. None means that the message suggests none.
        number: the number of the text, from 1; 0 for arguments and keys.
    """

    kind: Literal["argument", "key", "field", "text", "place"]
    name: str
    value: object = None
    number: int = 0

    def __str__(self) -> str:
        """Return the subject as the user writes it: an argument as in Python, such as `top_k=5`, a key as in TOML."""
        if self.number:
            return f"{self.name} {self.number}"
        if self.kind == "key":
            return f"'{self.name}'" if self.value is None else f"{self.name} = {json.dumps(self.value)}"
        return self.name if self.value is None else f"{self.name}={self.value!r}"

    def as_option(self, option: str) -> str:
        """Return an argument or a key as the option of a command line."""
        return option if self.value is None or self.value is True else f"{option} {json.dumps(self.value)}"


class Message(str):
    """String for a user whose references (arguments, keys, texts) can be renamed, such as to options of a command.

    `+` and `join` return a `Message`; an f-string makes a plain string.

    Args:
        parts: plain texts, references and other messages, in order.
    """

    parts: tuple[str | MessageReference, ...]

    def __new__(cls, *parts: str | MessageReference) -> Message:
        """Create a message from texts, references and messages, which are joined in order."""
        message = super().__new__(cls, "".join(map(str, parts)))
        message.parts = sum((piece.parts if isinstance(piece, Message) else (piece,) for piece in parts), ())
        return message

    def __add__(self, other: str) -> str:
        return Message(self, other)

    def __radd__(self, other: str) -> str:
        return Message(other, self)

    def join(self, messages: Iterable[str]) -> Message:
        """Return several messages as one, with this message between them, like `str.join`."""
        return Message(*[piece for message in messages for piece in (self, message)][1:])

    def rename_references(self, rename: Callable[[MessageReference], str | MessageReference]) -> Message:
        """Return the message with its references renamed; its plain text is not searched."""
        return Message(*(rename(piece) if isinstance(piece, MessageReference) else piece for piece in self.parts))


def argument(name: str, value: object = None) -> Message:
    """Return an argument for a message; a command shows its option instead."""
    return Message(MessageReference("argument", name, value))


def key(name: str, value: object = None) -> Message:
    """Return a key of a run file, or an argument in quotation marks, for a message; a command shows its option."""
    return Message(MessageReference("key", name, value))


def nth_text(number: int, what: str = "text") -> Message:
    """Return "text N" (from 1) as the subject of an error message; a command writes "FILE:LINE: the text" instead."""
    return Message(MessageReference("text", what, number=number))


def at_text(number: int) -> Message:
    """Return "text N" (from 1) as the prefix of an error message; a command writes "FILE:LINE" instead."""
    return Message(MessageReference("place", "text", number=number))


class InputError(ValueError):
    """Error: wrong input; the command line exits with code 2.

    Args:
        lines: the lines of the message; a `Message` keeps its references.
    """

    def __init__(self, *lines: str) -> None:
        self.lines: tuple[Message, ...] = tuple(map(Message, lines))
        super().__init__(*self.lines)

    def __str__(self) -> str:
        """Return the message with its references as Python writes them."""
        return "\n".join(map(_line, self.lines))

    @property
    def about(self) -> tuple[MessageReference, ...]:
        """References of the message: its arguments, keys and texts, in order."""
        return tuple(piece for line in self.lines for piece in line.parts if isinstance(piece, MessageReference))

    @property
    def as_fault(self) -> str:
        """The message in one line, for a report of several faults."""
        first, *rest = str(self).split("\n")
        return " ".join([first, "; ".join(line.removeprefix("  - ") for line in rest)]).rstrip()

    @classmethod
    def from_faults(cls, faults: Sequence[str], *, subject: str = "the input") -> InputError:
        """Return one error for several faults; it lists at most the first `MOST_FAULTS`.

        Args:
            faults: one sentence for each fault; at least one.
            subject: the checked object, for the first line of a report with several faults.
        """
        assert faults, "from_faults needs at least one fault"
        if len(faults) == 1:
            return cls(faults[0])
        shown = list(faults[:MOST_FAULTS])
        if len(faults) > MOST_FAULTS:
            shown.append(f"and {len(faults) - MOST_FAULTS} more")
        return cls(f"{len(faults)} faults in {subject}:", *(Message("  - ", fault) for fault in shown))


@contextlib.contextmanager
def _change_lines(change: Callable[[tuple[Message, ...]], tuple[Message, ...]]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        error.lines = change(error.lines)
        raise


def within(subject: str) -> AbstractContextManager[None]:
    """Return a context manager that puts a subject in front of the message of each `InputError` raised inside."""
    return _change_lines(lambda lines: (Message(subject, ": ", lines[0]), *lines[1:]))


def renaming(rename: Callable[[MessageReference], str | MessageReference]) -> AbstractContextManager[None]:
    """Return a context manager that renames the references of each `InputError` raised inside."""
    return _change_lines(lambda lines: tuple(line.rename_references(rename) for line in lines))


class ContextTooLong(InputError):
    """Error: a prompt, or a prompt and the requested new tokens, exceed the positions of the model."""


class LackOfMemory(InputError):
    """Error: the forecast of a load, a prompt or a training exceeds the free memory."""


class RunFailure(RuntimeError):
    """Error: a failure at run time; the command line exits with code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Compare by name, so that torch need not be imported.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


class LongTexts(UserWarning):
    """Warning: texts that are longer than the model can read.

    Args:
        count: the number of texts.
        limit: the maximum length that the model reads; the rest of a text is left out.
        unit: the unit of the limit.
    """

    def __init__(self, count: int, limit: int, unit: str = "tokens") -> None:
        self.count: int = count
        self.limit: int = limit
        self.unit: str = unit
        texts, each = ("1 text is", "it") if count == 1 else (f"{count:,} texts are", "each")
        super().__init__(
            f"{texts} longer than the {limit:,} {unit} that the model reads; the rest of {each} is left out"
        )

    @classmethod
    def merge(cls, warnings: Sequence[LongTexts]) -> LongTexts:
        """Return one warning for several (at least one)."""
        return cls(sum(each.count for each in warnings), warnings[0].limit, warnings[0].unit)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest valid name, or an empty string if none is close.

    A prefix of exactly one valid name is close, such as "de" to "de_DE". So are the initials of its words, such as "lr"
    to "learning_rate".
    """
    match = nearest_name(name, valid)
    return "" if match is None else f" (did you mean '{match}'?)"


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def nearest_name(name: str, valid: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the closest valid name, as `did_you_mean` finds it, or None if none is close.

    Args:
        name: the invalid name.
        valid: the valid names.
        least: the minimum share of common characters for a close name, from 0 to 1.
    """
    names = list(valid)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=least)
    longer = [valid for valid in names if name and (valid.startswith(name) or _initials(valid) == name)]
    return next(iter(matches or (longer if len(longer) == 1 else [])), None)
