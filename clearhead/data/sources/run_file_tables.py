"""Tables of a run file: base classes, parsing of tables that name data, and the format in which data is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clearhead.base.errors import InputError, did_you_mean, key
from clearhead.base.printing import Printed
from clearhead.spec.tasks.record import DataFormat

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Filled = Annotated[str, Field(min_length=1)]
_COLUMN = Field(description="a column by its number, counted from 1, or by its name")
Column = Annotated[Count | Filled, _COLUMN]
OptionalColumn = Annotated[Count | Filled | None, _COLUMN]

_EXPECTED: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "string": "text in quotes",
    "bool": "true or false",
    "model": "a table",
    "finite": "a finite number",
}
_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


class RunFileSection(Printed, BaseModel):
    """A table of a run file. The description of a key replaces its type in messages about wrong values."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Form(RunFileSection):
    """A form of table that names data in a run file; its first key distinguishes it from the task's other forms."""

    @classmethod
    def marker(cls) -> str:
        """Return the first key of the form, which no other form has and by which a table is recognized."""
        return next(iter(cls.model_fields))

    @classmethod
    def example(cls) -> dict[str, str]:
        """Return the required keys with example values, for messages."""
        return {name: (field.examples or ["-"])[0] for name, field in cls.model_fields.items() if field.is_required()}

    def as_source(self) -> Any:
        """Return the source that reads the data that the table names.

        Raises:
            InputError: the table has keys that do not belong together.
        """
        raise NotImplementedError


FormT = TypeVar("FormT", bound=Form)


def form_of(table: Mapping[str, Any], forms: Sequence[type[FormT]]) -> type[FormT] | None:
    """Return the form that a table has by its keys; None if no form or several forms match."""
    # A required key of the first form without its marker still selects the first form: the marker is missing.
    matching = [form for form in forms if form.marker() in table] or [
        form for form in forms[:1] if any(name in table for name in form.example())
    ]
    return matching[0] if len(matching) == 1 else None


def parse_table(table: Mapping[str, Any], forms: Sequence[type[FormT]]) -> FormT:
    """Parse a table that names data.

    Args:
        table: the keys and values of exactly one form.
        forms: the allowed forms.

    Raises:
        InputError: the table has no form or several forms; or every unknown or missing key and every wrong value, in
            one report.
    """
    form = form_of(table, forms)
    if form is None:
        raise _not_one_form(table, forms)
    try:
        return form.model_validate(dict(table))
    except ValidationError as error:
        items: dict[str, list[Any]] = {}
        for item in error.errors(include_url=False):
            items.setdefault(str(item["loc"][0]), []).append(item)
        faults = [_fault(form, name, of_key) for name, of_key in items.items()]
        raise InputError.from_faults(faults, subject="the data table") from None


def _not_one_form(table: Mapping[str, Any], forms: Sequence[type[Form]]) -> InputError:
    known = [name for form in forms for name in form.model_fields]
    hints = [did_you_mean(name, known) for name in table if name not in known]
    *others, last = [form.marker() for form in forms]
    markers = "; ".join([*others, f"or {last}"]) if others else last
    received = ", ".join(map(repr, table)) or "nothing"
    return InputError(f"expected data in exactly one form ({markers}), got {received}{next(filter(None, hints), '')}")


def _fault(form: type[Form], name: str, items: Sequence[Mapping[str, Any]]) -> str:
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        return (
            key(name)
            + " does not belong to data given by "
            + key(form.marker())
            + did_you_mean(name, form.model_fields)
        )
    if kind == "missing":
        return key(name) + " is missing; data given by " + key(form.marker()) + " needs it"
    return (
        key(name) + f" is {items[0]['input']!r}; expected {describe_expected(form, name, items)}{near_choice(items[0])}"
    )


def describe_expected(section: type[RunFileSection], name: str, items: Sequence[Mapping[str, Any]]) -> str:
    """Return the expected value of a key, in words.

    Args:
        section: the type of the table.
        name: the name of the key.
        items: the errors of pydantic for the key.
    """
    described = section.model_fields[name].description if name in section.model_fields else None
    return described or " or ".join(dict.fromkeys(map(_describe_item, items)))


def near_choice(item: Mapping[str, Any]) -> str:
    """Return " (did you mean 'x'?)" if a value resembles an allowed choice, else an empty string."""
    is_choice = item["type"] == "literal_error" and isinstance(item["input"], str)
    return did_you_mean(item["input"], _choices(item)) if is_choice else ""


def _choices(item: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))


def _describe_item(item: Mapping[str, Any]) -> str:
    kind, context = str(item["type"]), item.get("ctx", {})
    if kind == "literal_error":
        return "one of " + ", ".join(_choices(item))
    if kind in _BOUNDS:
        name, word = _BOUNDS[kind]
        return f"{word} {context[name]:g}"
    if kind == "string_too_short":
        return "text that is not empty"
    return _EXPECTED.get(kind.split("_")[0], "another kind of value")


def user_path(text: str | Path) -> Path:
    """Return the path of user data, with "~" expanded to the home directory.

    Raises:
        InputError: the path is a pipe or a device, which cannot be read twice.
    """
    path = Path(text).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is a pipe or a device, and data is read more than once: write the data to a file")
    return path


def has_ending(path: Path | str, *endings: str) -> bool:
    """Return whether a file name ends in one of `endings`; case and a final .gz are ignored."""
    return str(path).lower().removesuffix(".gz").endswith(endings)


_FORMS = ("text", "tsv", "jsonl", "dataset", "source")
# Keys that name the data itself.
_NAMES = frozenset({*_FORMS, "target", "split", "config", "revision"})
_ENDINGS = (".tsv", ".csv", ".jsonl")


def describe_data_format(table: Mapping[str, Any]) -> DataFormat:
    """Return the data format of a [data] table: its form and the keys that say how the data is read.

    Args:
        table: the keys of the table that are set.
    """
    form, ending = _kind(table)
    # With plain text, these keys name other files.
    files = ("labels", "pair") if form == "text" and not ending else ()
    keys = {key: value for key, value in table.items() if key not in _NAMES and key not in (form, *files)}
    return DataFormat(form=form, ending=ending, keys=keys)


def apply_data_format(table: Mapping[str, Any], reading: DataFormat | None) -> dict[str, Any]:
    """Add the reading options of the training data to a [data] table of the same form.

    Args:
        table: the keys of the table that are set; they are not changed.
        reading: the data format of the training data. None means that it is not known.
    """
    if reading is None:
        return dict(table)
    form, ending = _kind(table)
    keys = dict(reading.keys) if (form, ending) == (reading.form, reading.ending) else {}
    if form == "text":
        path = user_path(str(table["text"]))
        has_fields = reading.form == "text" and (ending == ".jsonl" or any(path.rglob("*.jsonl*")))
        for name, is_read in {"document": True, "pattern": path.is_dir(), "field": has_fields}.items():
            keys.pop(name, None)
            if is_read and name in reading.keys:
                keys[name] = reading.keys[name]
    return {**keys, **table}


def _kind(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return the form of a table, and the ending of its text file if that file has columns or fields."""
    form = next((form for form in _FORMS if form in table), next(iter(table), ""))
    ending = next((suffix for suffix in _ENDINGS if form == "text" and has_ending(str(table[form]), suffix)), "")
    return form, ending
