"""A model drawn from its spec, in the manner of figure 1 of arXiv 1706.03762."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clearhead import spec
from clearhead.interpret.view.architecture_column import TITLE, Column, Entry, Side
from clearhead.interpret.view.svg import Box, Line, Shape, Text, bounds_of, safe, svg_text

_BORDER = 24.0
_CHANNEL = 56.0  # between the stacks, where the memory passes
_NARROWEST = 128.0
_LONGEST_TITLE = 60


def draw_architecture(model: spec.Model, title: str, notes: Sequence[str] = ()) -> str:
    """Draw a model: the encoder on the left, the decoder on the right, the head on top, each repeated layer once.

    Args:
        model: its spec.
        title: one line above.
        notes: smaller lines below the title.

    Returns:
        the text of an SVG file.
    """
    name = safe(title if len(title) <= _LONGEST_TITLE else f"…{title[1 - _LONGEST_TITLE :]}")
    shapes = architecture_shapes(model)
    left, top, _, _ = bounds_of(shapes)
    head: list[Shape] = [Text(left, top - 26 - 17 * len(notes), name, 16.0, "start", is_bold=True)]
    for row, note in enumerate(notes):
        head.append(Text(left, top - 22 - 17 * (len(notes) - 1 - row), safe(note), 12.0, "start", is_faint=True))
    every = [*head, *shapes]
    left, top, right, bottom = bounds_of(every)
    moved = [shape.moved(_BORDER - left, _BORDER - top) for shape in every]
    return svg_text(moved, right - left + 2 * _BORDER, bottom - top + 2 * _BORDER, f"The architecture of {name}")


def architecture_shapes(model: spec.Model) -> list[Shape]:
    """Return the shapes of the drawing of a model, without its title."""
    if model.encoder is None or model.decoder is None:
        (column,) = _columns(model, {"encoder" if model.decoder is None else "decoder": 1})
        return column.shapes
    encoder, decoder = _columns(model, {"encoder": -1, "decoder": 1})
    _, _, right, _ = bounds_of(encoder.shapes)
    left, _, _, _ = bounds_of(decoder.shapes)
    size = f"source × {model.encoder.width:,}"
    label = Text(8.0, encoder.y - 24, size, anchor="start", is_faint=True)
    channel = max(right, label.bounds[2]) + _CHANNEL / 2
    shift = channel + _CHANNEL / 2 - left
    found = encoder.shapes + [shape.moved(shift, 0.0) for shape in decoder.shapes]
    return [*found, label, *_memory_lines((0.0, encoder.y), channel, decoder.entries, shift)]


def _memory_lines(start: tuple[float, float], channel: float, entries: Sequence[Entry], shift: float) -> list[Line]:
    """Lead the memory from the top of the encoder to the keys and values of every cross-attention."""
    x, y = start
    lines = []
    for entry in entries:
        value, key = (place + shift for place in entry.x)
        way = ((x, y), (x, y - 16), (channel, y - 16), (channel, entry.y), (key, entry.y), (key, entry.top))
        lines.append(Line(way, has_arrow=True))
        lines.append(Line(((value, entry.y), (value, entry.top)), has_arrow=True))
    return lines


def _columns(model: spec.Model, sides: Mapping[str, Side]) -> list[Column]:
    """Draw the stacks, first with boxes of no width, which show how wide they must be."""
    probes = [_column(model, name, 0.0, side) for name, side in sides.items()]
    boxes = [shape for probe in probes for shape in probe.shapes if isinstance(shape, Box) and not shape.width]
    widest = max(text.bounds[2] - text.bounds[0] for box in boxes for text in box.texts)
    return [_column(model, name, max(_NARROWEST, widest + 22), side) for name, side in sides.items()]


def _column(model: spec.Model, name: str, width: float, side: Side) -> Column:
    stack = model.encoder if name == "encoder" else model.decoder
    assert stack is not None
    has_two, is_last = (
        model.encoder is not None and model.decoder is not None,
        stack is (model.decoder or model.encoder),
    )
    tokens = {"encoder": "source", "decoder": "target"}[name] if has_two else "tokens"
    column = Column(width, side)
    column.text(0.0, 10.0, f"{tokens}, shifted right" if has_two and is_last else tokens, TITLE)
    column.embedding(model, stack, name, tokens)
    column.layers(stack, name)
    column.end(stack, name)
    if is_last:
        column.head(model, stack.width, tokens)
    return column
