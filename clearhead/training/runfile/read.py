"""Read a run file (TOML), apply overrides, validate it, and write it back with all defaults.

Relative paths in a run file are relative to the current directory, but that of `[model] parts`, which is code: it is
relative to the folder of the run file, and is not imported from the run file of a run directory.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from clearhead.base.errors import InputError, nearest
from clearhead.base.files import read_text_file
from clearhead.core.extensions.files import load_parts
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.registry import BUILT_IN, kinds
from clearhead.training.runfile.faults import Address, Fault, Places, faults_of, find_lines
from clearhead.training.runfile.rules import LENGTHS, check_rules, fill_defaults, has_fault
from clearhead.training.runfile.sections import TABLES, RunFile, run_file_type, sections_of

# Values for required keys that are missing or faulty, so that the rules can still check the other keys.
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
        is_of_run: whether a run directory was named, whose parts are not imported; one with checkpoints is known.

    Returns:
        The run file with every default filled in.

    Raises:
        InputError: every fault with file and line, in one report.
    """
    folder = None if is_of_run else parts_folder(path)
    return parse_run_file(read_text_file(path, "run file"), str(path), overrides, folder=folder)


def parts_folder(path: Path) -> Path | None:
    """Return the folder to which [model] parts of a run file are relative; None: it is a run directory."""
    return None if (path.parent / "checkpoints").is_dir() else path.parent


def parse_run_file(text: str, name: str, overrides: Sequence[str] = (), *, folder: Path | None = Path()) -> RunFile:
    """Validate the text of a run file.

    Args:
        text: the text.
        name: the name of the run file in messages.
        overrides: as for `load_run_file`; their [model] parts are relative to the current directory.
        folder: the folder to which [model] parts in the text are relative; None: they are not imported.

    Raises:
        InputError: every fault with file and line, in one report.
    """
    raw = _parse_toml(text, name)
    model = raw.get("model")
    if folder is not None and isinstance(model, dict) and isinstance(model.get("parts"), str):
        model["parts"] = str(folder / Path(model["parts"]).expanduser())
    origins, faults = _apply_overrides(raw, overrides)
    imports_parts = folder is not None or ("model", "parts") in origins
    places = Places(name, find_lines(text), origins)
    run, faults_here = _validate(raw, places)
    faults += faults_here
    faulty = {fault.address for fault in faults_here}
    faults += [Fault(fault.address, places.of(fault.address) + fault.sentence) for fault in check_rules(run, faulty)]
    run = fill_defaults(run)
    if not any(fault.address[:1] == ("model",) for fault in faults) and not has_fault(faulty, "task", "kind"):
        faults += _model_faults(run, places, imports_parts=imports_parts)
    if faults:
        # By line, overrides last
        ordered = sorted(
            faults, key=lambda fault: (places.origin(fault.address)[0] != "", places.origin(fault.address)[1])
        )
        raise InputError.from_faults([fault.sentence for fault in ordered if not fault.follows], subject=name)
    return run


def parse_tables(text: str, name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of a run file with its overrides, unchecked; faulty overrides are left out."""
    raw = _parse_toml(text, name)
    _apply_overrides(raw, overrides)
    return raw


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


def _apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> tuple[dict[Address, str], list[Fault]]:
    """Apply overrides to the raw values; return the override of each address, and the faults."""
    origins: dict[Address, str] = {}
    faults: list[Fault] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        address = tuple(name.strip() for name in key.split("."))
        sentence = _override_fault(address, bool(equals))
        if sentence is None:
            parsed = _override_value(value.strip())
            sentence = _set(raw, address, parsed) if parsed is not _BROKEN else "the value is not valid TOML"
        if sentence is not None:
            faults.append(Fault(address, f"override '{text}': {sentence}"))
            continue
        if address[0] == "train" and address[-1] in LENGTHS and len(address) == 2:
            _drop_other_length(raw, address[-1])
        origins[address] = text
    return origins, faults


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
    """Parse a value as TOML; anything else is text, except an invalid list, table or quoted text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _BROKEN if text.startswith(("[", "{", '"', "'")) else text
    return parsed["value"] if list(parsed) == ["value"] else text


def _set(raw: dict[str, Any], address: Address, value: Any) -> str | None:
    """Set one value in nested tables; return a message if that is impossible."""
    here = raw
    for depth, name in enumerate(address[:-1], start=1):
        if depth == 1 and name not in TABLES:
            return f"there is no table [{name}]{nearest(name, TABLES)}; the tables are {', '.join(TABLES)}"
        below = here.setdefault(name, {})
        if not isinstance(below, dict):
            return f"'{'.'.join(address[:depth])}' is not a table"
        here = below
    here[address[-1]] = value
    return None


def _drop_other_length(raw: dict[str, Any], kept: str) -> None:
    """Remove the length of the file: steps replace epochs, and epochs steps; seconds may end either early."""
    for key in LENGTHS:
        if key != kept:
            raw["train"].pop(key, None)


def _validate(raw: dict[str, Any], places: Places) -> tuple[RunFile, list[Fault]]:
    """Validate the values; faulty keys are reported and left out, so that the rules can check the others."""
    kind = _kind_of(raw)
    try:
        return run_file_type(kind).model_validate(raw), []
    except ValidationError as error:
        faults = faults_of(error, raw, places, kind)
    values: dict[str, Any] = {name: dict(raw[name]) for name in TABLES if isinstance(raw.get(name), dict)}
    placeholders = _placeholders(kind)
    for table, *keys in (fault.address for fault in faults if fault.address[0] in TABLES):
        for key in keys[:1] or _REQUIRED:
            values.setdefault(table, {}).pop(key, None)
            if key in placeholders[table]:
                values[table][key] = placeholders[table][key]
    return run_file_type(kind).model_validate(values), faults


def _kind_of(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of task of a run file; None: it names none."""
    task = raw.get("task")
    kind = task.get("kind") if isinstance(task, dict) else None
    return kind if kind in kinds() else None


def _placeholders(kind: str | None) -> dict[str, Mapping[str, Any]]:
    """Return values for the required keys of each table."""
    named = {} if kind is None else data_of(kind).forms[0].example()
    return {**_PLACEHOLDERS, "data": {"train": named, "valid": named}}


def _model_faults(run: RunFile, places: Places, *, imports_parts: bool) -> list[Fault]:
    """Check the sizes of the model with those of its preset; the vocabulary is not known yet, so it has any size."""
    from clearhead.training.runfile.model_table import resolve_spec

    try:
        if run.model.parts is not None and imports_parts:
            load_parts(run.model.parts)
        if not run.task.init:
            joint = run.tokenizer.joint is not False
            resolve_spec(run.model, kind=run.task.kind, source_vocab=1009, target_vocab=1009, joint=joint)
    except InputError as error:
        hint = f"; it may need {run.model.parts}, which is code: read that file, and name it with --parts FILE"
        reason = error.as_fault + ("" if run.model.parts is None or imports_parts else hint)
        return [Fault(("model",), f"{places.of(('model',))}{reason}")]
    return []


def to_toml(run: RunFile) -> str:
    """Write a run file as TOML text that reads back to an equal run file."""
    return toml_text({name: table for name, table in run.model_dump().items() if table is not None})


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables of values as TOML text; None is left out."""
    blocks = []
    for name, table in tables.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Write one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped and has no surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{key} = {toml_value(below)}" for key, below in value.items() if below is not None) + " }"
        )
    return "[" + ", ".join(toml_value(below) for below in value) + "]"
