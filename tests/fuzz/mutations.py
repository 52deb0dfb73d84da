"""Changes to one file of a folder, drawn from a seed: bytes, lines, JSON structure, archives, or what the file is."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 0.5, -0.5, 1e30, 1e-30, 2**31, 2**32, 2**63, 2**64, 10**9, 10**30, "", "a", "<unk>",
    "a" * 300, "a" * 10**6, "\0", "../x", "/", "\x1b[31m", [], {}, [[]], [None], [-1], [10**9], {"a": {}}, ["a"] * 50,
    [[0, "a"]],
)  # fmt: skip
# What the json module would not write, in place of a string that it does.
RAW = ("NaN", "1e999", "9" * 5000, "[" * 3000, "[" * 150 + "]" * 150, '"\\ud800"', '{"a": 1, "a": 2}', "-", "")
LINES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch escaped').read() }}",
    "{{ raise_exception(messages) }}{{ strftime_now(5) }}",
    "{{ strftime_now('%c' * 3000000) }}",
    "{% for i in range(90000) %}the cat {% endfor %}",
    "{{ raise_exception('a ' * 10 ** 6) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{% for i in range(99999999) %}{% for j in range(99999999) %}{{ j }}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}{{ '%999999999d' % 1 }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set x.y = 1 %}{% if %}",
    "{{ '\\ud800' }}",
    "step-99999999999999999999999999", "step-2", "../step-2", "[train]", "a = 1", "a.b.c = [[1]]", "#version: 9",
    "a b c", "\0", "\x1b[31m", "\ufeff", "\u2028", "a" * 30_000, "",
)  # fmt: skip
# A pickle that would run a command.
_PICKLE = b"cposix\nsystem\n(S'touch escaped'\ntR."
_MARK = "\ue000raw\ue000"


def mutate(folder: Path, name: str, draw: random.Random) -> str:
    """Change one file of a folder, and return a short description of the change.

    In most cases manifests are updated, as if an attacker hid the change. Otherwise most changes would already fail at
    the check of the manifest.
    """
    path = folder / name
    if draw.random() < 0.06:
        what = _replace_file(path, folder, draw)
    else:
        content, whats = path.read_bytes(), []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            content, what = _change_content(content, name, draw)
            whats.append(what)
        path.write_bytes(content)
        what = ", ".join(whats)
    if draw.random() < 0.8:
        for manifest in folder.rglob("manifest.json"):
            if manifest != path:
                _reseal(manifest)
    return f"{name}: {what}"


def _change_content(content: bytes, name: str, draw: random.Random) -> tuple[bytes, str]:
    suffix = name.rpartition(".")[2]
    change: Callable[[bytes, random.Random], tuple[bytes, str]] = mutate_bytes
    if draw.random() < 0.8:
        change = {
            "json": mutate_json, "jsonl": _mutate_rows, "safetensors": _mutate_header, "bin": _mutate_archive,
            "model": mutate_bytes, "spm": mutate_bytes, "toml": _mutate_toml,
        }.get(suffix, mutate_lines)  # fmt: skip
    return change(content, draw)


def mutate_json(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return JSON with one value or key changed."""
    try:
        tree = [json.loads(content)]
    except (ValueError, RecursionError):
        return mutate_bytes(content, draw)
    holder, key, path = _choose_key(tree, draw)
    raw = ""
    match draw.choice(["value", "value", "value", "near", "near", "raw", "delete", "rename", "repeat", "wrap", "swap"]):
        case "value":
            holder[key] = draw.choice(VALUES)
            what = f"= {holder[key]!r}"
        case "near":
            holder[key] = _similar_value(holder[key], draw)
            what = f"= {holder[key]!r}"
        case "raw":
            raw, holder[key] = draw.choice(RAW), _MARK
            what = f"= {raw}"
        case "delete":
            del holder[key]
            what = "deleted"
        case "rename" if isinstance(holder, dict):
            holder[str(draw.choice(VALUES))] = holder.pop(key)
            what = "renamed"
        case "wrap":
            holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key])])
            what = "wrapped"
        case "swap":
            holder2, key2, path2 = _choose_key(tree, draw)
            # A copy, since one place can be inside the other.
            holder[key] = json.loads(json.dumps(holder2[key2]))
            what = f"= that of {'.'.join(path2)}"
        case _:
            # As often as a megabyte holds it, at most.
            holder[key] = [holder[key]] * draw.choice([2, 300, 10**6 // len(json.dumps(holder[key]))])
            what = "repeated"
    text = json.dumps(tree[0] if tree else None).replace(json.dumps(_MARK), raw)
    return text.encode(), f"{'.'.join(path)} {what[:40]}"


def _choose_key(tree: list[Any], draw: random.Random) -> tuple[Any, Any, list[str]]:
    """Go down a random path: near the root as often as deep inside."""
    holder: Any = tree
    key: Any = 0
    path = []
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        path.append(str(key)[:20])
    return holder, key, path


def _similar_value(value: Any, draw: random.Random) -> Any:
    """Return a value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([value + 1, value - 1, -value, 2 * value, value * 10**3, value * 10**6])
    if isinstance(value, str):
        cut = draw.randrange(len(value) + 1)
        return value[:cut] + draw.choice(["", "x", " ", "(a+)+$", "\u2581", *LINES]) + value[cut:]
    if isinstance(value, list):
        return draw.sample(value, len(value)) if draw.random() < 0.5 else value + value
    return {key: draw.choice(list(value.values())) for key in value} if isinstance(value, dict) else 0


def mutate_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return bytes with a few of them changed, cut off, repeated or put in."""
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.choice([1, 2, 8, 200]))
    what = draw.choice(["flipped", "cut off", "left out", "repeated", "zeroed", "put in"])
    middle = {
        "flipped": bytes(byte ^ (1 << draw.randrange(8)) for byte in content[start:end]),
        "repeated": content[start:end] * draw.choice([2, 1000]),
        "zeroed": bytes(end - start),
        "put in": draw.randbytes(draw.choice([1, 8, 300])) + content[start:end],
    }.get(what, b"")
    return content[:start] + middle + (b"" if what == "cut off" else content[end:]), f"{what} at {start}"


def mutate_lines(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a text with a line put in, left out, repeated, exchanged or joined to the next."""
    lines = content.decode("utf-8", "replace").split("\n")
    index, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    what = draw.choice(["put in", "put in", "left out", "repeated", "exchanged", "joined"])
    match what:
        case "put in":
            lines.insert(index, draw.choice(LINES))
        case "left out":
            del lines[index]
        case "repeated":
            lines[index:index] = [lines[other]] * draw.choice([1, 300])
        case "exchanged":
            lines[index], lines[other] = lines[other], lines[index]
        case _:
            lines[index : index + 2] = ["".join(lines[index : index + 2])]
    return "\n".join(lines).encode("utf-8", "replace"), f"line {index + 1} {what}"


def _mutate_rows(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    rows = content.split(b"\n")
    number = draw.randrange(len(rows))
    rows[number], what = mutate_json(rows[number], draw)
    return b"\n".join(rows), f"line {number + 1} {what}"


def _mutate_toml(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a run file with one value changed."""
    lines = content.decode("utf-8", "replace").split("\n")
    places = [number for number, line in enumerate(lines) if "=" in line]
    if not places or draw.random() < 0.3:
        return mutate_lines(content, draw)
    line_number = draw.choice(places)
    key, value = lines[line_number].split("=", 1)[0], draw.choice(VALUES)
    lines[line_number] = f"{key}= {json.dumps(value)}"
    return "\n".join(lines).encode("utf-8", "replace"), lines[line_number][:60]


def _mutate_header(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a safetensors file with its header changed."""
    if len(content) < 8:
        return mutate_bytes(content, draw)
    (length,) = struct.unpack("<Q", content[:8])
    header, what = mutate_json(content[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + content[8 + length :], what


def _mutate_archive(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a file of torch with one of its entries changed, and perhaps compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        return mutate_bytes(content, draw)
    if not entries:
        return mutate_bytes(content, draw)
    # Half of the time the pickle, which says what the others are.
    pickles = [number for number, (name, _) in enumerate(entries) if name.endswith("data.pkl")]
    number = draw.choice(pickles) if pickles and draw.random() < 0.5 else draw.randrange(len(entries))
    name, entry = entries[number]
    changed, what = (_PICKLE, "runs a command") if draw.random() < 0.05 else mutate_bytes(entry, draw)
    entries[number] = name, changed
    compression = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for entry_name, data in entries:
            archive.writestr(zipfile.ZipInfo(entry_name), data, compression)
    return packed.getvalue(), f"{name} {what}"


def _replace_file(path: Path, folder: Path, draw: random.Random) -> str:
    """Put something else in the place of a file."""
    content = path.read_bytes()
    path.unlink()
    kinds = [
        "missing",
        "a folder",
        "a link out",
        "a link to itself",
        "a link to a device",
        "a pipe",
        "empty",
        "another",
    ]
    what = draw.choice(kinds)
    match what:
        case "a folder":
            path.mkdir()
        case "a link out":
            path.symlink_to(folder.parent / "outside")
        case "a link to itself":
            path.symlink_to(path.name)
        case "a device":
            path.symlink_to(draw.choice(["/dev/zero", "/dev/full", "/dev/stdin"]))
        case "a pipe":
            os.mkfifo(path)
        case "empty":
            path.write_bytes(b"")
        case "another":
            others = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix == path.suffix)
            path.write_bytes(draw.choice(others).read_bytes() if others else content)
    return what


def _reseal(manifest: Path) -> None:
    """Bring the sizes and digests of a manifest up to date."""
    content = json.loads(manifest.read_bytes())
    for name in list(content["files"]):
        file = manifest.parent / name
        if file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            content["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        elif not os.path.lexists(file):
            del content["files"][name]
    manifest.write_text(json.dumps(content))
