"""The data tables of a run file: which keys belong together, and what is wrong with a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from clearhead.errors import InputError, key, nearest

SourceT = TypeVar("SourceT")


@dataclass(frozen=True)
class Form(Generic[SourceT]):
    """One way to write a source in a run file.

    Args:
        marker: the key that tells this form from the others.
        required: other keys that must be there.
        optional: keys that may be there.
        make: turns a table without faults into a source.
    """

    marker: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    make: Callable[[Mapping[str, Any]], SourceT]

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that may be in a table of this form."""
        return (self.marker, *self.required, *self.optional)


def parse_form(
    table: Mapping[str, Any],
    forms: Sequence[Form[SourceT]],
    *,
    expected: str,
    columns: Collection[str] = (),
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> SourceT:
    """Turn a table of a run file into a source.

    Args:
        table: keys and values of exactly one of the forms.
        forms: the forms to choose from.
        expected: the forms in words, for the message.
        columns: the keys whose value may be the number of a column.
        choices: the values that some keys may have.

    Raises:
        InputError: no form or several of them; or every unknown or missing key and every wrong value, in one report.
    """
    # A lone key that one form requires is half of that form, which the report below completes.
    matching = [form for form in forms if form.marker in table] or [
        form for form in forms[:1] if any(key in table for key in form.required)
    ]
    if len(matching) != 1:
        every = [key for form in forms for key in form.keys]
        hint = next((found for key in table if key not in every and (found := nearest(key, every))), "")
        raise InputError(
            f"expected data in exactly one form ({expected}), received {', '.join(map(repr, table)) or 'nothing'}{hint}"
        )
    form = matching[0]
    faults = [
        key(name) + " does not belong to data given by " + key(form.marker) + nearest(name, form.keys)
        for name in table
        if name not in form.keys
    ]
    for name in form.keys:
        if name in table:
            faults += _value_faults(name, table[name], name in columns, choices.get(name))
        elif name not in form.optional:
            faults.append(key(name) + " is missing; data given by " + key(form.marker) + " needs it")
    if faults:
        raise InputError.from_faults(faults, subject="the data table")
    return form.make(table)


def _value_faults(name: str, value: object, is_column: bool, choices: Sequence[str] | None) -> list[str]:
    if isinstance(value, str) and value and choices and value not in choices:
        return [key(name) + f" is {value!r}; expected one of {', '.join(choices)}{nearest(value, choices)}"]
    if isinstance(value, str) and value:
        return []
    if is_column and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return []
    expected = "a column by its number, counted from 1, or by its name" if is_column else "a text that is not empty"
    return [key(name) + f" is {value!r}; expected {expected}"]


def user_path(text: str | Path) -> Path:
    """Return the path of data that a user names, with "~" as the user's home.

    Raises:
        InputError: it is a pipe or a device, which cannot be read twice.
    """
    path = Path(text).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is a pipe or a device, and data is read more than once: write it into a file")
    return path


def has_ending(path: Path | str, *endings: str) -> bool:
    """Tell whether a file name, without .gz, has one of some endings."""
    return str(path).removesuffix(".gz").endswith(endings)
