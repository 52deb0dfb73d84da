"""Table of all hook points: modules, shape, and the description in the guide to activations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.errors import SphinxError

import clearhead as ch
from clearhead.base.hooks import HookPoints
from clearhead.core.model import Transformer
from clearhead.interpret.maps.shapes import activation_shapes

GUIDE = Path(__file__).parents[2] / "guides" / "activations.md"


def lines(_argument: str) -> Iterator[str]:
    """Yield the table of the points, and every address of a small model of two stacks."""
    meanings = _meanings()
    model = ch.presets.transformer_base(vocab_size=32000)
    shapes = {shape.address: shape.shape for shape in activation_shapes(model)}
    points = _points(ch.build(model, device="meta"))
    if points.keys() != meanings.keys():
        raise SphinxError(f"{GUIDE.name} and the code differ in the hook points {points.keys() ^ meanings.keys()}")
    yield from ("| hook point | of | shape | what it is |", "|---|---|---|---|")
    for name, owners in points.items():
        address = next(address for address in shapes if re.search(rf"(^|\.){name}$", address))
        shape = ", ".join(map(str, shapes[address]))
        yield f"| `{name}` | {', '.join(f'`{owner}`' for owner in owners)} | `[{shape}]` | {meanings[name]} |"
    yield from ("", "The addresses of the first layers of the original Transformer, without those of its modules:", "")
    yield "```text"
    for address, axes in shapes.items():
        is_point = address.rpartition(".")[2] in points
        if is_point and not re.search(r"layers\.[1-9]", address):
            yield f"{address:<64} [{', '.join(map(str, axes))}]"
    yield "```"


def _points(module: Transformer) -> dict[str, list[str]]:
    """Return the classes that have each point, in the order of the modules of a model."""
    owners: dict[str, list[str]] = {}
    for submodule in module.modules():
        for name in submodule.points if isinstance(submodule, HookPoints) else ():
            owner = type(submodule).__name__
            if owner not in owners.setdefault(name, []):
                owners[name].append(owner)
    return owners


def _meanings() -> dict[str, str]:
    """Return the description of each point in the guide's table."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \| (.+?) \|$", GUIDE.read_text("utf-8"), re.MULTILINE)
    return {name: meaning for names, _owner, meaning in rows for name in re.findall(r"`(\w+)`", names)}
