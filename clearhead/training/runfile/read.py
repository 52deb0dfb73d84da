"""Read a run file (TOML), apply overrides, validate it, and write it back with all defaults.

Relative paths in a run file are relative to the current directory. An exception is `[model] parts`, which is code: it
is relative to the folder of the run file. The run file of a run directory does not import this code.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import read_text_file
from clearhead.core.extensions.files import load_parts
from clearhead.data.sources.run_file_tables import Form, RunFileSection, describe_expected, form_of, near_choice
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.registry import BUILT_IN, task_kinds
from clearhead.training.runfile.sections import (
    LENGTHS,
    TABLES,
    Address,
    EarlyStop,
    Fault,
    RunFile,
    check_rules,
    fill_defaults,
    has_fault,
    name_of,
    only_for,
    run_file_type,
    sections_of,
)

_HELD_OUT = "; `clearhead new` can hold out some of the training data"
# Placeholders for required keys that are missing or wrong, so that the rules can still check the other keys.
_PLACEHOLDERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "task": {"kind": BUILT_IN[0]},
        "tokenizer": {"kind": "word", "path": "-"},
        "model": {},
        "lora": {"rank": 8},
        "train": {"run": "-", "steps": 1_000_000, "epochs": 1_000, "seconds": 1e6},
    }
)
_REQUIRED = ("kind", "train", "valid", "rank", "run", "steps")


def load_run_file(path: Path, overrides: Sequence[str] = (), *, is_of_run: bool = False) -> RunFile:
    """Read and validate a run file.

    Args:
        path: the TOML file.
        overrides: `table.key=value` texts; a value is TOML, and a bare word is text.
        is_of_run: True if the file belongs to a run directory, whose code is not imported. A folder with checkpoints is
            recognised as such without this argument.

    Returns:
        The run file with every default filled in.

    Raises:
        InputError: every fault with file and line, in one report.
    """
    folder = None if is_of_run else extensions_folder(path)
    return parse_run_file(read_text_file(path, "run file"), str(path), overrides, folder=folder)


def extensions_folder(path: Path) -> Path | None:
    """Return the folder to which the path `parts` of [model] is relative; None for a file in a run directory."""
    return None if (path.parent / "checkpoints").is_dir() else path.parent


def parse_run_file(text: str, name: str, overrides: Sequence[str] = (), *, folder: Path | None = Path()) -> RunFile:
    """Validate the text of a run file.

    Args:
        text: the TOML text.
        name: the name of the run file in messages.
        overrides: `table.key=value` texts, as in `load_run_file`; their [model] parts is relative to the current
            directory.
        folder: the folder to which [model] parts in the text is relative. None means that it is not imported.

    Raises:
        InputError: every fault with file and line, in one report.
    """
    draft = _Draft(name, _parse_toml(text, name), find_lines(text))
    model = draft.values.get("model")
    if folder is not None and isinstance(model, dict) and isinstance(model.get("parts"), str):
        model["parts"] = str(folder / Path(model["parts"]).expanduser())
    draft.apply(overrides)
    run, faulty = draft.validate()
    for fault in check_rules(run, faulty):
        draft.report(fault.address, fault.sentence)
    run = fill_defaults(run)
    if not any(fault.address[:1] == ("model",) for fault in draft.faults) and not has_fault(faulty, "task", "kind"):
        draft.check_model(run, imports_extensions=folder is not None or ("model", "parts") in draft.overrides)
    draft.refuse_faults()
    return run


def parse_tables(text: str, name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the unchecked tables of a run file with overrides applied; wrong overrides are left out."""
    draft = _Draft(name, _parse_toml(text, name))
    draft.apply(overrides)
    return draft.values


@dataclass
class _Draft:
    """A run file during parsing: values, origins and faults.

    Attributes:
        name: the name of the run file in messages.
        values: the unchecked tables.
        lines: the line number of each table and key in the file.
        overrides: the override that set a key, by address.
        faults: the faults found so far.
    """

    name: str
    values: dict[str, Any]
    lines: Mapping[Address, int] = field(default_factory=dict)
    overrides: dict[Address, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def kind(self) -> str | None:
        """The kind of task; None if the run file names no valid kind."""
        task = self.values.get("task")
        kind = task.get("kind") if isinstance(task, dict) else None
        return kind if kind in task_kinds() else None

    def origin(self, address: Address) -> tuple[str, int]:
        """Return the override that set the value at an address (or ""), and the value's line in the file (or 0)."""
        for length in range(len(address), 0, -1):
            start = address[:length]
            if start in self.overrides:
                return self.overrides[start], 0
            if start in self.lines:
                return "", self.lines[start]
        return "", 0

    def report(self, address: Address, sentence: str, *, at: Address | None = None, follows: bool = False) -> None:
        """Add a fault; its message starts with the origin of its address, such as "run.toml:12: ".

        Args:
            address: the address of the fault.
            sentence: the message.
            at: the address whose origin the message names. None means the address of the fault.
            follows: True if the fault only follows from another fault.
        """
        override, line = self.origin(address if at is None else at)
        start = f"{self.name}:{line}" if line else self.name
        if override:
            start = f"override '{override}'"
        self.faults.append(Fault(address, f"{start}: {sentence}", follows))

    def apply(self, overrides: Iterable[str]) -> None:
        """Apply overrides to the values; a wrong one is reported and left out."""
        for text in overrides:
            key, equals, value = text.partition("=")
            address = tuple(name.strip() for name in key.split("."))
            sentence = _override_fault(address, bool(equals))
            if sentence is None:
                parsed = _override_value(value.strip())
                sentence = self._set(address, parsed) if parsed is not _BROKEN else "the value is not valid TOML"
            if sentence is not None:
                self.faults.append(Fault(address, f"override '{text}': {sentence}"))
                continue
            if len(address) == 2 and address[0] == "train" and address[1] in LENGTHS:
                # An override of steps replaces epochs in the file, and vice versa; seconds can end both early.
                for length in set(LENGTHS) - {address[1]}:
                    self.values["train"].pop(length, None)
            self.overrides[address] = text

    def _set(self, address: Address, value: Any) -> str | None:
        """Set a value in nested tables; return a message if this is impossible, else None."""
        if address[0] not in TABLES:
            return (
                f"there is no table [{address[0]}]{did_you_mean(address[0], TABLES)}; "
                f"the tables are {', '.join(TABLES)}"
            )
        table = self.values
        for depth, name in enumerate(address[:-1], start=1):
            below = table.setdefault(name, {})
            if not isinstance(below, dict):
                return f"'{'.'.join(address[:depth])}' is not a table"
            table = below
        table[address[-1]] = value
        return None

    def validate(self) -> tuple[RunFile, set[Address]]:
        """Return the run file, and the addresses of wrong values.

        A wrong value is reported and replaced by a placeholder, so that the rules can check the other keys.
        """
        try:
            return run_file_type(self.kind).model_validate(self.values), set()
        except ValidationError as error:
            faulty = self._report_values(error)
        values: dict[str, Any] = {name: dict(self.values[name]) for name in TABLES if self._has_table(name)}
        placeholders = _placeholders(self.kind)
        for table, *keys in (address for address in faulty if address[0] in TABLES):
            for key in keys[:1] or _REQUIRED:
                values.setdefault(table, {}).pop(key, None)
                if key in placeholders[table]:
                    values[table][key] = placeholders[table][key]
        return run_file_type(self.kind).model_validate(values), set(faulty)

    def _has_table(self, name: str) -> bool:
        return isinstance(self.values.get(name), dict)

    def _report_values(self, error: ValidationError) -> list[Address]:
        """Report one fault per address with a wrong value, and return these addresses."""
        grouped: dict[Address, list[Any]] = {}
        for item in error.errors(include_url=False):
            grouped.setdefault(self._address(item["loc"], item["type"]), []).append(item)
        types = {address: _type(address, items[0]) for address, items in grouped.items()}
        unknown = [address for address, type_ in types.items() if type_ == "extra_forbidden"]
        for address, items in grouped.items():
            is_missing = types[address] == "missing"
            self.report(
                address,
                self._sentence(address, types[address], items),
                at=address[:-1] if is_missing else address,
                follows=is_missing and _is_misspelt(address, unknown),
            )
        return list(grouped)

    def _address(self, location: tuple[int | str, ...], type_: str) -> Address:
        """Return a location of pydantic as an address: without tags of unions and indices of lists."""
        address: list[str] = []
        values: Any = self.values
        for position, name in enumerate(location):
            is_last = position == len(location) - 1
            if isinstance(values, Mapping) and (name in values or (is_last and type_ == "missing")):
                address.append(str(name))
                values = values.get(name)
        return tuple(address)

    def _sentence(self, address: Address, type_: str, items: Sequence[Any]) -> str:
        if type_ == "extra_forbidden":
            return self._unknown_key(address)
        if type_ == "missing":
            return _missing_key(address)
        received: Any = self.values
        for name in address:
            received = received[name]
        if type_.startswith("union_tag"):
            assert self.kind is not None, "a run file without a task has no [data] forms"
            return _no_data(address, received, data_of(self.kind).forms)
        wanted = describe_expected(self._section_at(address[:-1]), address[-1], items)
        return f"{name_of(address)} must be {wanted}, got {describe_value(received)}{near_choice(items[0])}"

    def _section_at(self, table: Address) -> type[RunFileSection]:
        """Return the type of a table of the run file, or of a nested table."""
        if not table:
            return run_file_type(self.kind)
        if len(table) == 1:
            return sections_of(self.kind)[table[0]]
        if table[0] != "data" or self.kind is None:
            return EarlyStop
        return form_of(self.values["data"][table[1]], data_of(self.kind).forms) or EarlyStop

    def _unknown_key(self, address: Address) -> str:
        name, table = address[-1], address[:-1]
        if not table:
            hint = did_you_mean(name, TABLES) or _other_table(name, self.kind)
            return f"there is no table or key '{name}' at the top of a run file{hint}"
        homes = [
            other for other in task_kinds() if len(table) == 1 and name in sections_of(other)[table[0]].model_fields
        ]
        if homes:
            return f"{name_of(address)} {only_for(self.kind, homes)}"
        known = self._section_at(table).model_fields
        hint = did_you_mean(name, known) or _other_table(name, self.kind)
        return f"unknown key '{name}' in {name_of(table)}{hint or '; its keys are ' + ', '.join(known)}"

    def check_model(self, run: RunFile, *, imports_extensions: bool) -> None:
        """Check the [model] table by building its spec, with an arbitrary vocabulary size instead of the unknown one.

        Args:
            run: the checked run file.
            imports_extensions: True if the file of [model] parts is imported.
        """
        from clearhead.training.runfile.model_table import resolve_spec

        try:
            if run.model.parts is not None and imports_extensions:
                load_parts(run.model.parts)
            if not run.task.init:
                joint = run.tokenizer.joint is not False
                resolve_spec(run.model, kind=run.task.kind, source_vocab=1009, target_vocab=1009, joint=joint)
        except InputError as error:
            hint = f"; it may need {run.model.parts}, which is code: read that file, and name it with --parts FILE"
            self.report(("model",), error.as_fault + ("" if run.model.parts is None or imports_extensions else hint))

    def refuse_faults(self) -> None:
        """Raise an `InputError` with every fault, ordered by line; faults of overrides come last."""
        ordered = sorted(
            self.faults, key=lambda fault: (self.origin(fault.address)[0] != "", self.origin(fault.address)[1])
        )
        if ordered:
            raise InputError.from_faults([fault.sentence for fault in ordered if not fault.follows], subject=self.name)


def _parse_toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message = str(error)
        match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = match.group(1) if match and match.group(1) else text.count("\n") + 1
        column = f" (column {match.group(2)})" if match and match.group(2) else ""
        reason = message[: match.start()] if match else message
        hint = "; text needs quotes" if reason == "Invalid value" else ""
        raise InputError(f"{name}:{line}: not valid TOML: {reason[0].lower()}{reason[1:]}{column}{hint}") from None


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
    """Return a value of a run file in words, for messages."""
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


def _override_fault(address: Address, has_equals: bool) -> str | None:
    if not has_equals:
        return "expected table.key=value, such as train.steps=1000"
    if len(address) >= 2 and all(address):
        return None
    homes = [name for name, section in sections_of(None).items() if address[0] in section.model_fields]
    hint = f"; did you mean {homes[0]}.{address[0]}?" if homes else ", such as train.steps=1000"
    return f"the key needs the name of its table{hint}"


_BROKEN = object()


def _override_value(text: str) -> Any:
    """Parse an override value as TOML; other text is a string, except an invalid list, table or quoted text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _BROKEN if text.startswith(("[", "{", '"', "'")) else text
    return parsed["value"] if list(parsed) == ["value"] else text


def _placeholders(kind: str | None) -> dict[str, Mapping[str, Any]]:
    """Return valid placeholder values for the required keys of each table."""
    named = {} if kind is None else data_of(kind).forms[0].example()
    return {**_PLACEHOLDERS, "data": {"train": named, "valid": named}}


def _is_misspelt(missing: Address, unknown: Sequence[Address]) -> bool:
    """Return whether a missing key is misspelt in its table; the misspelt key already has a message."""
    return any(other[:-1] == missing[:-1] and did_you_mean(other[-1], missing[-1:]) for other in unknown)


def _type(address: Address, item: Mapping[str, Any]) -> str:
    """Return the type of a pydantic error; "too_short" if an item is missing inside the value at the address."""
    is_inside = item["type"] == "missing" and item["loc"][-1] != address[-1]
    return "too_short" if is_inside else str(item["type"])


def _no_data(address: Address, value: object, forms: Sequence[type[Form]]) -> str:
    *others, last = map(_example, forms)
    such_as = f"{', '.join(others)} or {last}" if others else last
    received = describe_value(value)
    if isinstance(value, Mapping) and value:
        names = [name for form in forms for name in form.model_fields]
        hints = [did_you_mean(str(key), names) for key in value if key not in names]
        received = f"the keys {', '.join(map(str, value))}{next(filter(None, hints), '')}"
    elif address[-1] == "valid":
        received += _HELD_OUT
    return f"{name_of(address)} must be a table that names the data, such as {such_as}; got {received}"


def _example(form: type[Form]) -> str:
    keys = ", ".join(f'{name} = "{text}"' for name, text in form.example().items())
    return f"{{ {keys} }}"


def _other_table(name: str, kind: str | None) -> str:
    """Return a hint that names another table with this key, or an empty string."""
    homes = [table for table, section in sections_of(kind).items() if name in section.model_fields]
    return f" (it belongs in [{homes[0]}])" if homes else ""


def _missing_key(address: Address) -> str:
    if len(address) == 1:
        return f"the table [{address[0]}] is missing"
    hint = _HELD_OUT if address == ("data", "valid") else ""
    return f"{name_of(address[:-1])} needs the key '{address[-1]}'{hint}"


def to_toml(run: RunFile) -> str:
    """Return a run file as TOML text, which parses to an equal run file."""
    return toml_text({name: table for name, table in run.model_dump().items() if table is not None})


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of values as TOML text; None is left out."""
    blocks = []
    for name, table in tables.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Return one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # TOML has the escapes of JSON, but needs DEL escaped, and has no surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{key} = {toml_value(below)}" for key, below in value.items() if below is not None) + " }"
        )
    return "[" + ", ".join(toml_value(below) for below in value) + "]"
