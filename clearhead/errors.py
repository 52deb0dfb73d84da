"""What users are told: wrong input, a failure while running, and texts that are not read to their ends."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType

_OPTIONS: ContextVar[Mapping[str, str]] = ContextVar("options", default=MappingProxyType({}))
# Of a message: faults, characters of a line, and of a word in it, which may be a name from a file or a path.
MOST_FAULTS, LONGEST_LINE, LONGEST_WORD = 20, 2000, 255
_LONG_WORD = re.compile(rf"[^\s'\"]{{{LONGEST_WORD + 1},}}")
# Control characters, lone surrogates, and what reverses or breaks a line.
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, *, kept: str = "") -> str:
    """Escape the characters of a text that would steer a terminal, so that a name from a file cannot forge a message.

    Args:
        text: anything.
        kept: characters that stay as they are, such as line breaks.
    """
    return UNSAFE.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)


def json_text(value: object) -> str:
    """Return a value as a message shows it: as JSON, and shortened if it is long."""
    return shortened(json.dumps(value, ensure_ascii=False, default=repr))


def shortened(text: str, most: int = 40) -> str:
    """Return a text as a message shows it, cut off if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _line(text: str) -> str:
    """Return a line of a message without what would steer a terminal, with names of a file's length at most."""
    line = _LONG_WORD.sub(lambda found: shortened(found[0], 80), visible(text))
    return shortened(line, LONGEST_LINE)


class InputError(ValueError):
    """Wrong input; the command line exits with code 2.

    Args:
        lines: of the message, one in most cases.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(_line, map(str, lines))))

    def within(self, subject: str) -> InputError:
        """Return the same error with what it is about in front."""
        return InputError(*f"{subject}: {self}".split("\n"))

    @property
    def as_fault(self) -> str:
        """The whole message in one line, as a fault of another report."""
        first, *rest = str(self).split("\n")
        return " ".join([first, "; ".join(line.removeprefix("  - ") for line in rest)]).rstrip()

    @classmethod
    def from_faults(cls, faults: Sequence[str], *, subject: str = "the input") -> InputError:
        """Put faults into one report, which lists the first of very many.

        Args:
            faults: one sentence for each fault; at least one.
            subject: what was checked, for the first line of a report with several faults.
        """
        assert faults, "an error report needs at least one fault"
        if len(faults) == 1:
            return cls(faults[0])
        shown = list(faults[:MOST_FAULTS])
        if len(faults) > MOST_FAULTS:
            shown.append(f"and {len(faults) - MOST_FAULTS} more")
        return cls(f"{len(faults)} faults in {subject}:", *(f"  - {fault}" for fault in shown))


class RunFailure(RuntimeError):
    """A failure while running; the command line exits with code 1."""


@contextlib.contextmanager
def keys_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Let messages name options of a command in place of keys of a run file.

    Args:
        options: the option of each key, such as "--pattern" for "pattern".
    """
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def key(name: str, value: object = None) -> str:
    """Return a key of a run file for a message, or the option of the running command that stands for it.

    Args:
        name: of the key.
        value: what to set it to; None: the message names the key alone.
    """
    option = _OPTIONS.get().get(name)
    if value is None:
        return option or f"'{name}'"
    return f"{option} {json.dumps(value)}" if option else f"{name} = {json.dumps(value)}"


class LongTexts(UserWarning):
    """Texts that a model does not read to their ends.

    Args:
        count: how many.
        limit: how much of each is read.
        unit: what the limit counts.
    """

    def __init__(self, count: int, limit: int, unit: str = "tokens") -> None:
        self.count, self.limit, self.unit = count, limit, unit
        texts, each = ("1 text is", "it") if count == 1 else (f"{count:,} texts are", "each")
        super().__init__(
            f"{texts} longer than the {limit:,} {unit} that the model reads; the rest of {each} is left out"
        )

    @classmethod
    def joined(cls, found: Sequence[LongTexts]) -> LongTexts:
        """Return one warning for several; at least one is given."""
        return cls(sum(each.count for each in found), found[0].limit, found[0].unit)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest valid name, or an empty string if none is close.

    A prefix of exactly one valid name is close to it: "de" to "de_DE".
    """
    found = nearest_name(name, valid)
    return "" if found is None else f" (did you mean '{found}'?)"


def nearest_name(name: str, valid: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the closest valid name, as `nearest` finds it, or None if none is close.

    Args:
        name: that is not valid.
        valid: the names that are.
        least: the share of characters in common from which on a name is close.
    """
    names = list(valid)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=least)
    longer = [valid_name for valid_name in names if name and valid_name.startswith(name)]
    return next(iter(matches or (longer if len(longer) == 1 else [])), None)
