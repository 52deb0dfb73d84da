"""Faults of a run file as messages with the line, the expected and the received value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from clearhead.base.errors import nearest
from clearhead.data.sources.run_file_tables import Form, Section, expected, form_of, near_choice
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.registry import kinds
from clearhead.training.runfile.sections import TABLES, EarlyStop, run_file_type, sections_of

Address = tuple[str, ...]

_HELD_OUT = "; `clearhead new` can hold out some of the training data"


@dataclass(frozen=True)
class Places:
    """The origin of the values of a run file: a line of the file, or an override."""

    file: str
    lines: Mapping[Address, int] = field(default_factory=dict)
    overrides: Mapping[Address, str] = field(default_factory=dict)

    def origin(self, address: Address) -> tuple[str, int]:
        """Return the override that set an address, or "", and its line in the file, or 0."""
        for length in range(len(address), 0, -1):
            start = address[:length]
            if start in self.overrides:
                return self.overrides[start], 0
            if start in self.lines:
                return "", self.lines[start]
        return "", 0

    def of(self, address: Address) -> str:
        """Return the prefix of a message about an address, such as "run.toml:12: "."""
        override, line = self.origin(address)
        if override:
            return f"override '{override}': "
        return f"{self.file}:{line}: " if line else f"{self.file}: "


def find_lines(text: str) -> dict[Address, int]:
    """Return the line (from 1) of every table header and key of a TOML text; keys of an inline table have its line."""
    lines: dict[Address, int] = {}
    table: Address = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?([^\]\"']+)\]", line)
        if header:
            table = tuple(name.strip() for name in header.group(1).split("."))
            lines.setdefault(table, number)
            continue
        key = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if key:
            address = table + tuple(name.strip("\"'") for name in key.group(1).split("."))
            lines.setdefault(address, number)
    return lines


def describe_value(value: object) -> str:
    """Return a description of a received value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text '{value}'"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, Sequence):
        return "a list"
    return f"the value {value}"


def name_of(address: Address) -> str:
    """Return the name of an address in messages: "[train] steps", or "[train]" for a table."""
    return " ".join([f"[{address[0]}]", ".".join(address[1:])]).strip()


@dataclass(frozen=True)
class Fault:
    """One fault: its address, its message, and whether it only follows from another fault."""

    address: Address
    sentence: str
    follows: bool = False


def faults_of(error: ValidationError, raw: Mapping[str, Any], places: Places, kind: str | None) -> list[Fault]:
    """Turn a validation error into one message per address.

    Args:
        error: from pydantic.
        raw: the validated values.
        places: their origins.
        kind: of the task; None: not known.
    """
    grouped: dict[Address, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_address(item["loc"], raw, item["type"]), []).append(item)
    types = {address: _type(address, items[0]) for address, items in grouped.items()}
    unknown = [address for address, type_ in types.items() if type_ == "extra_forbidden"]
    return [
        Fault(
            address,
            places.of(address[:-1] if types[address] == "missing" else address)
            + _sentence(address, types[address], items, raw, kind),
            follows=types[address] == "missing" and _is_misspelt(address, unknown),
        )
        for address, items in grouped.items()
    ]


def _is_misspelt(missing: Address, unknown: Sequence[Address]) -> bool:
    """Return whether a missing key stands in its table under a name like it, which has a message of its own."""
    return any(other[:-1] == missing[:-1] and nearest(other[-1], missing[-1:]) for other in unknown)


def _address(location: tuple[int | str, ...], raw: Mapping[str, Any], kind: str) -> Address:
    """Remove from a location what is not a key: the tag of a union, the index of a list."""
    address: list[str] = []
    here: Any = raw
    for position, name in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(here, Mapping) and (name in here or (is_last and kind == "missing")):
            address.append(str(name))
            here = here.get(name)
    return tuple(address)


def _type(address: Address, item: Mapping[str, Any]) -> str:
    """Return the type of an error; what is missing inside a list is a fault of the list."""
    is_inside = item["type"] == "missing" and item["loc"][-1] != address[-1]
    return "too_short" if is_inside else str(item["type"])


def _sentence(address: Address, type_: str, items: Sequence[Any], raw: Mapping[str, Any], kind: str | None) -> str:
    if type_ == "extra_forbidden":
        return _unknown_key(address, raw, kind)
    if type_ == "missing":
        return _missing_key(address)
    received: Any = raw
    for name in address:
        received = received[name]
    if type_.startswith("union_tag"):
        assert kind is not None, "the forms of data are those of a task"
        return _no_data(address, received, data_of(kind).forms)
    wanted = expected(_section_at(address[:-1], raw, kind), address[-1], items)
    return f"{name_of(address)} must be {wanted}, received {describe_value(received)}{near_choice(items[0])}"


def _section_at(table: Address, raw: Mapping[str, Any], kind: str | None) -> type[Section]:
    """Return the type of a table of a run file, or of one in it."""
    if not table:
        return run_file_type(kind)
    if len(table) == 1:
        return sections_of(kind)[table[0]]
    form = form_of(raw["data"][table[1]], data_of(kind).forms) if table[0] == "data" and kind is not None else None
    return form or EarlyStop


def _no_data(address: Address, value: object, forms: Sequence[type[Form]]) -> str:
    *others, last = map(_example, forms)
    such_as = f"{', '.join(others)} or {last}" if others else last
    received = describe_value(value)
    if isinstance(value, Mapping) and value:
        names = [name for form in forms for name in form.model_fields]
        hints = [nearest(str(key), names) for key in value if key not in names]
        received = f"the keys {', '.join(map(str, value))}{next(filter(None, hints), '')}"
    elif address[-1] == "valid":
        received += _HELD_OUT
    return f"{name_of(address)} must be a table that names the data, such as {such_as}; received {received}"


def _example(form: type[Form]) -> str:
    keys = ", ".join(f'{name} = "{text}"' for name, text in form.example().items())
    return f"{{ {keys} }}"


def _unknown_key(address: Address, raw: Mapping[str, Any], kind: str | None) -> str:
    name, table = address[-1], address[:-1]
    if not table:
        hint = nearest(name, TABLES) or _other_table(name, kind)
        return f"there is no table or key '{name}' at the top of a run file{hint}"
    homes = [other for other in kinds() if len(table) == 1 and name in sections_of(other)[table[0]].model_fields]
    if homes:
        return f"{name_of(address)} {only_for(kind, homes)}"
    known = _section_at(table, raw, kind).model_fields
    hint = nearest(name, known) or _other_table(name, kind)
    return f"unknown key '{name}' in {name_of(table)}{hint or '; its keys are ' + ', '.join(known)}"


def only_for(kind: str | None, homes: Iterable[str]) -> str:
    """Return what is wrong with a key that only other tasks have, such as "has no effect for the task 'fill', ..."."""
    *others, last = map(repr, homes)
    tasks = f"{', '.join(others)} and {last}" if others else last
    return f"has no effect for the task '{kind}', only for {tasks}; remove it"


def _other_table(name: str, kind: str | None) -> str:
    """Return a hint to another table that has the key."""
    homes = [table for table, section in sections_of(kind).items() if name in section.model_fields]
    return f" (it belongs in [{homes[0]}])" if homes else ""


def _missing_key(address: Address) -> str:
    if len(address) == 1:
        return f"the table [{address[0]}] is missing"
    hint = _HELD_OUT if address == ("data", "valid") else ""
    return f"{name_of(address[:-1])} needs the key '{address[-1]}'{hint}"
