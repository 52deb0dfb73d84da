"""What every source of records shares: JSON lines, fields by name, data sets by name, and tables of a run file."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from clearhead.data.sources.lines import file_digest
from clearhead.errors import InputError, nearest

SourceT = TypeVar("SourceT")


def parse_record(line: str, place: str) -> object:
    """Return the JSON value of one line.

    Args:
        line: the text of the line.
        place: where it stands, for the message.

    Raises:
        InputError: the line is not JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: expected one JSON object in the line, but at character {error.colno}: {error.msg.lower()}"
        ) from None


def field_value(record: object, field: str, place: str) -> object:
    """Return a value of a record by its field, or by a path of fields joined with dots.

    Args:
        record: a JSON object, or a row of a data set.
        field: the name; "translation.de" is field "de" of field "translation".
        place: where the record stands, for the message.

    Raises:
        InputError: the record is no object, or lacks the field.
    """
    names = [field] if isinstance(record, Mapping) and field in record else field.split(".")
    value = record
    for name in names:
        if not isinstance(value, Mapping):
            raise InputError(f"{place}: expected an object with the field '{name}', received {shown(value)}")
        if name not in value:
            raise InputError(
                f"{place}: there is no field '{name}'; the fields are "
                f"{', '.join(map(repr, value)) or 'none'}{nearest(name, map(str, value))}"
            )
        value = value[name]
    return value


def text_field(record: object, field: str, place: str) -> str:
    """Return a text of a record, found as `field_value` finds it.

    Args:
        record: a JSON object, or a row of a data set.
        field: the name, or a path of names joined with dots.
        place: where the record stands, for the message.

    Raises:
        InputError: the record lacks the field, or what it holds is not Unicode text.
    """
    value = field_value(record, field, place)
    if not isinstance(value, str):
        raise InputError(f"{place}: field '{field}' is {shown(value)}; expected a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{place}: field '{field}' holds a lone surrogate, which is not Unicode text") from None
    return value


def column_position(column: int | str, names: Sequence[str], place: str) -> int:
    """Return the position of a column that is given by its number from 0 or by its name.

    Args:
        column: the number or the name.
        names: the names of all columns.
        place: where the names stand, for the message.

    Raises:
        InputError: no column has the name.
    """
    if isinstance(column, int):
        return column
    if column not in names:
        raise InputError(
            f"{place}: there is no column '{column}'; the first line names "
            f"{', '.join(map(repr, names))}{nearest(column, names)}"
        )
    return names.index(column)


def load_named(name: str, config: str | None, split: str) -> Any:
    """Load a part of a data set by name with the `datasets` library.

    Args:
        name: the name on the Hugging Face hub, or a local folder.
        config: which configuration of the data set, where it has several.
        split: the part to load, such as "train".

    Raises:
        InputError: the library is not installed, or it cannot load the part.
    """
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise InputError(
            f"data set '{name}' needs the datasets library; install it with: pip install 'clearhead[datasets]'"
        ) from None
    try:
        return library.load_dataset(name, config, split=split)
    except (OSError, ValueError, LookupError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"data set '{name}', split '{split}', cannot be loaded: {reason}") from None


def content(path: Path) -> str:
    """Return what the text of a file depends on: its bytes, and whether they are unpacked.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    return f"{'gz' if path.suffix == '.gz' else 'plain'} {file_digest(path)}"


def path_of(text: str) -> Path:
    """Return the path that a run file names, with "~" as the user's home."""
    return Path(text).expanduser()


def identity_key(*inputs: object) -> str:
    """Return one hash of JSON values: the name of what is made from them in the cache."""
    return hashlib.sha256(json.dumps(list(inputs)).encode()).hexdigest()


def shown(value: object) -> str:
    """Return a value as a message shows it: as JSON, and cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(frozen=True)
class Form(Generic[SourceT]):
    """One way to write a source down in a run file.

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
    value_faults: Callable[[str, object], list[str]],
) -> SourceT:
    """Turn a table of a run file into a source.

    Args:
        table: keys and values of exactly one of the forms.
        forms: the forms to choose from.
        expected: the forms in words, for the message.
        value_faults: what is wrong with the value of a known key.

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
        f"'{key}' does not belong to data given by '{form.marker}'{nearest(key, form.keys)}"
        for key in table
        if key not in form.keys
    ]
    for key in form.keys:
        if key in table:
            faults += value_faults(key, table[key])
        elif key not in form.optional:
            faults.append(f"'{key}' is missing; data given by '{form.marker}' needs it")
    if faults:
        raise InputError.from_faults(faults, subject="the data table")
    return form.make(table)
