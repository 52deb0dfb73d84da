"""Faults of a run file as messages with the line, the expected and the received value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from clearhead.errors import nearest
from clearhead.training.runfile.sections import SECTIONS, SOURCE_FORMS, FilePair

Address = tuple[str, ...]

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text in quotes",
    "bool": "true or false",
    "model": "a table",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class Places:
    """The origin of the values of a run file: a line of the file, or an override."""

    file: str
    lines: Mapping[Address, int] = field(default_factory=dict)
    overrides: Mapping[Address, str] = field(default_factory=dict)

    def origin(self, address: Address) -> tuple[str, int]:
        """Return the override that set an address, or "", and its line in the file, or 0."""
        for length in range(len(address), 0, -1):
            part = address[:length]
            if part in self.overrides:
                return self.overrides[part], 0
            if part in self.lines:
                return "", self.lines[part]
        return "", 0

    def of(self, address: Address) -> str:
        """Return the prefix of a message about an address, such as "run.toml:12: "."""
        override, line = self.origin(address)
        return f"override '{override}': " if override else f"{self.file}:{line}: " if line else f"{self.file}: "


def find_lines(text: str) -> dict[Address, int]:
    """Return the line (from 1) of every table header and key of a TOML text; keys of an inline table have its line."""
    lines: dict[Address, int] = {}
    table: Address = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?([^\]\"']+)\]", line)
        if header:
            table = tuple(part.strip() for part in header.group(1).split("."))
            lines.setdefault(table, number)
            continue
        key = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if key:
            address = table + tuple(part.strip("\"'") for part in key.group(1).split("."))
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


# Descriptions of keys with values of more than one kind.
_WANTED: Mapping[Address, str] = {
    ("lora", "targets"): 'a list of addresses, such as ["**.query", "**.value"]',
    ("train", "betas"): "a list of 2 numbers, each at least 0 and below 1",
    ("train", "warmup"): "a number of steps from 0 on, or a share of all steps such as 0.1",
    ("train", "validate_every"): "a number of steps from 1 on, or a share of all steps such as 0.1",
}


@dataclass(frozen=True)
class Fault:
    """One fault: its address, its message, and whether it only follows from another fault."""

    address: Address
    sentence: str
    follows: bool = False


def faults_of(error: ValidationError, raw: Mapping[str, Any], places: Places) -> list[Fault]:
    """Turn a validation error into one message per address.

    Args:
        error: from pydantic.
        raw: the validated values.
        places: their origins.
    """
    grouped: dict[Address, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_address(item["loc"], raw, item["type"]), []).append(item)
    kinds = {address: str(items[0]["type"]) for address, items in grouped.items()}
    unknown = [address for address, kind in kinds.items() if kind == "extra_forbidden"]
    return [
        Fault(
            address,
            _sentence(address, items, raw, places),
            follows=kinds[address] == "missing" and _is_misspelt(address, unknown),
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
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(here, Mapping) and (part in here or (is_last and kind == "missing")):
            address.append(str(part))
            here = here.get(part)
    return tuple(address)


def _sentence(address: Address, items: Sequence[Any], raw: Mapping[str, Any], places: Places) -> str:
    first = items[0]
    kind = str(first["type"])
    if address in _WANTED:
        received = describe_value(raw[address[0]][address[1]])
        return f"{places.of(address)}{name_of(address)} must be {_WANTED[address]}, received {received}"
    if kind == "extra_forbidden":
        return places.of(address) + _unknown_key(address, raw)
    if kind == "missing":
        return places.of(address[:-1]) + _missing_key(address)
    if kind.startswith("union_tag"):
        return places.of(address) + (
            f"{name_of(address)} must be a table that names the data, such as "
            '{ text = "train.txt" }, { source = "train.de", target = "train.en" }, { tsv = "train.tsv" }, '
            '{ jsonl = "train.jsonl" } '
            'or { dataset = "name", split = "train" }' + f"; received {_described_table(first['input'])}"
        )
    expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
    received = first["input"]
    hint = nearest(received, _choices(first)) if kind == "literal_error" and isinstance(received, str) else ""
    return f"{places.of(address)}{name_of(address)} must be {expected}, received {describe_value(received)}{hint}"


def _described_table(value: object) -> str:
    """Describe what does not name data: where it is a table, by its keys, with the name that one of them is near to."""
    if not isinstance(value, Mapping) or not value:
        return describe_value(value)
    hints = (nearest(str(key), SOURCE_FORMS) for key in value)
    return f"the keys {', '.join(map(str, value))}{next(filter(None, hints), '')}"


def _choices(item: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))


def _expected(item: Mapping[str, Any]) -> str:
    kind, context = str(item["type"]), item.get("ctx", {})
    if kind == "literal_error":
        return "one of " + ", ".join(_choices(item))
    if kind in _BOUNDS:
        name, word = _BOUNDS[kind]
        return f"{word} {context[name]:g}"
    if kind == "string_too_short":
        return "text that is not empty"
    return _EXPECTED.get(kind.split("_")[0], "another kind of value")


def _unknown_key(address: Address, raw: Mapping[str, Any]) -> str:
    key, table = address[-1], address[:-1]
    if not table:
        return f"there is no table or key '{key}' at the top of a run file{nearest(key, SECTIONS) or _other_table(key)}"
    known = _known_keys(address, raw)
    hint = nearest(key, known) or _other_table(key)
    return f"unknown key '{key}' in {name_of(table)}{hint or '; its keys are ' + ', '.join(known)}"


def _known_keys(address: Address, raw: Mapping[str, Any]) -> list[str]:
    """Return the valid keys of the table of an unknown key."""
    if len(address) == 2:
        return list(SECTIONS[address[0]].model_fields)
    if address[0] == "data":
        table = raw["data"][address[1]]
        form = next((form for name, form in SOURCE_FORMS.items() if name != "source" and name in table), FilePair)
        return list(form.model_fields)
    return ["metric", "patience"]


def _other_table(key: str) -> str:
    """Return a hint to another table that has the key."""
    homes = [name for name, section in SECTIONS.items() if key in section.model_fields]
    return f" (it belongs in [{homes[0]}])" if homes else ""


def _missing_key(address: Address) -> str:
    if len(address) == 1:
        return f"the table [{address[0]}] is missing"
    hint = "; `clearhead new` can hold out some of the training pairs" if address == ("data", "valid") else ""
    return f"{name_of(address[:-1])} needs the key '{address[-1]}'{hint}"
