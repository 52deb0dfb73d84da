"""One change to one file of a folder, drawn from a seed: bytes, JSON structure, or what the file is."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 0.5, -0.5, 1e30, 1e-30, 2**31, 2**32, 2**63, 2**64, 10**9, 10**30, "", "a", "<unk>",
    "a" * 300, "\0", "../x", "/", "\x1b[31m", [], {}, [[]], [None], [-1], [10**9], {"a": {}}, ["a"] * 50, [[0, "a"]],
)  # fmt: skip
# What the json module would not write, in place of a string that it does.
RAW = ("NaN", "1e999", "9" * 5000, "[" * 3000, "[" * 150 + "]" * 150, '"\\ud800"', '{"a": 1, "a": 2}', "-", "")
_MARK = "\ue000raw\ue000"


def mutate(folder: Path, draw: random.Random) -> str:
    """Change one file of a folder; return what was done, in a few words."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    name = draw.choice(names)
    path = folder / name
    content = path.read_bytes()
    if draw.random() < 0.06:
        return f"{name}: {_replaced(path, draw)}"
    if name.endswith((".json", ".jsonl")) and draw.random() < 0.85:
        changed, what = mutated_json(content, draw)
    elif name.endswith(".safetensors") and draw.random() < 0.7:
        (length,) = struct.unpack("<Q", content[:8])
        header, what = mutated_json(content[8 : 8 + length], draw)
        changed = struct.pack("<Q", len(header)) + header + content[8 + length :]
    else:
        changed, what = mutated_bytes(content, draw)
    path.write_bytes(changed)
    return f"{name}: {what}"


def mutated_json(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return JSON with one value or key changed."""
    try:
        tree = [json.loads(content)]
    except ValueError:
        return mutated_bytes(content, draw)
    # Down a random path: near the root as often as deep inside.
    holder: Any = tree
    key: Any = 0
    path = []
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        path.append(str(key)[:20])
    raw = ""
    match draw.choice(["value", "value", "value", "raw", "delete", "rename", "repeat", "wrap"]):
        case "value":
            holder[key] = draw.choice(VALUES)
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
        case _:
            holder[key] = [holder[key]] * draw.choice([2, 300])
            what = "repeated"
    text = json.dumps(tree[0] if tree else None).replace(json.dumps(_MARK), raw)
    return text.encode(), f"{'.'.join(path)} {what[:40]}"


def mutated_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return bytes with a few of them changed, cut off, repeated or put in."""
    place = draw.randrange(len(content) + 1)
    end = min(len(content), place + draw.choice([1, 2, 8, 200]))
    what = draw.choice(["flipped", "cut off", "left out", "repeated", "zeroed", "put in"])
    middle = {
        "flipped": bytes(byte ^ (1 << draw.randrange(8)) for byte in content[place:end]),
        "repeated": content[place:end] * draw.choice([2, 1000]),
        "zeroed": bytes(end - place),
        "put in": draw.randbytes(draw.choice([1, 8, 300])) + content[place:end],
    }.get(what, b"")
    return content[:place] + middle + (b"" if what == "cut off" else content[end:]), f"{what} at {place}"


def _replaced(path: Path, draw: random.Random) -> str:
    """Put something else in the place of a file."""
    path.unlink()
    what = draw.choice(["missing", "a folder", "a link out", "a link to itself", "a pipe", "empty"])
    match what:
        case "a folder":
            path.mkdir()
        case "a link out":
            path.symlink_to(__file__)
        case "a link to itself":
            path.symlink_to(path.name)
        case "a pipe":
            os.mkfifo(path)
        case "empty":
            path.write_bytes(b"")
    return what
