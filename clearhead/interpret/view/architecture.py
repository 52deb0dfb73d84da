"""Draw the architecture of a model from its spec, in the style of figure 1 of arXiv 1706.03762.

A column draws one stack: boxes above each other, residual lines around the branches, frames around the layers. The
residual stream runs upwards at x = 0, starting at y = 0; y grows downwards, as in SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead import spec
from clearhead.interpret.view.architecture_blocks import (
    Block,
    LayerRun,
    format_number,
    function_block,
    head_blocks,
    layer_groups,
    linear_block,
    norm_block,
    output_name,
    position_block,
    score_table_block,
    table_block,
)
from clearhead.interpret.view.svg import (
    Box,
    Circle,
    Point,
    Polyline,
    Shape,
    Text,
    bounds_of,
    escape_text,
    estimated_width,
    svg_text,
)

_BORDER = 24.0
_CHANNEL = 56.0  # between the stacks, where the memory passes
_NARROWEST = 128.0
_LONGEST_TITLE = 60


def draw_architecture(model: spec.Model, title: str, notes: Sequence[str] = ()) -> str:
    """Draw a model: the encoder on the left, the decoder on the right, the head on top, each repeated layer once.

    Args:
        model: spec of the model.
        title: one line above the drawing.
        notes: smaller lines below the title.

    Returns:
        The text of an SVG file.
    """
    name = escape_text(title if len(title) <= _LONGEST_TITLE else f"…{title[1 - _LONGEST_TITLE :]}")
    shapes = architecture_shapes(model)
    left, top, _, _ = bounds_of(shapes)
    head: list[Shape] = [Text(left, top - 26 - 17 * len(notes), name, 16.0, "start", is_bold=True)]
    for row, note in enumerate(notes):
        head.append(Text(left, top - 22 - 17 * (len(notes) - 1 - row), escape_text(note), 12.0, "start", is_faint=True))
    every = [*head, *shapes]
    left, top, right, bottom = bounds_of(every)
    moved = [shape.shift(_BORDER - left, _BORDER - top) for shape in every]
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
    shapes = encoder.shapes + [shape.shift(shift, 0.0) for shape in decoder.shapes]
    return [*shapes, label, *_memory_lines((0.0, encoder.y), channel, decoder.entries, shift)]


def _memory_lines(
    start: tuple[float, float], channel: float, entries: Sequence[MemoryEntry], shift: float
) -> list[Polyline]:
    """Return lines from the top of the encoder to the keys and values of every cross-attention."""
    x, y = start
    lines = []
    for entry in entries:
        value, key = (arrow_x + shift for arrow_x in entry.x)
        points = ((x, y), (x, y - 16), (channel, y - 16), (channel, entry.y), (key, entry.y), (key, entry.top))
        lines.append(Polyline(points, has_arrow=True))
        lines.append(Polyline(((value, entry.y), (value, entry.top)), has_arrow=True))
    return lines


def _columns(model: spec.Model, sides: Mapping[str, Side]) -> list[StackColumn]:
    """Draw the stacks twice: first with boxes of width 0, to measure the widest text."""
    probes = [_column(model, name, 0.0, side) for name, side in sides.items()]
    boxes = [shape for probe in probes for shape in probe.shapes if isinstance(shape, Box) and not shape.width]
    widest = max(text.bounds[2] - text.bounds[0] for box in boxes for text in box.texts)
    return [_column(model, name, max(_NARROWEST, widest + 22), side) for name, side in sides.items()]


def _column(model: spec.Model, name: str, width: float, side: Side) -> StackColumn:
    stack = model.encoder if name == "encoder" else model.decoder
    assert stack is not None
    has_two, is_last = (
        model.encoder is not None and model.decoder is not None,
        stack is (model.decoder or model.encoder),
    )
    tokens = {"encoder": "source", "decoder": "target"}[name] if has_two else "tokens"
    column = StackColumn(width, side)
    column.text(0.0, 10.0, f"{tokens}, shifted right" if has_two and is_last else tokens, TITLE)
    column.embedding(model, stack, name, tokens)
    column.layers(stack, name)
    column.end(stack, name)
    if is_last:
        column.head(model, stack.width, tokens)
    return column


TITLE, FACT, SMALL = 12.5, 11.0, 9.0
_FACT_LINE, _PAD = 15.0, 9.0
_NORM_HEIGHT = 23.0
_GAP, _LABEL_GAP, _FAN = 18.0, 30.0, 38.0  # gaps: between boxes, next to a size label, below an attention
_PLUS, _SMALL_GAP = 8.0, 6.0
_MARGIN = 13.0  # between residual lines, boxes and frames
_BETWEEN = 22.0  # between parallel branches
Side = Literal[-1, 1]


@dataclass(frozen=True)
class MemoryEntry:
    """Position at which keys and values of the memory enter a cross-attention.

    Args:
        x: x positions of the value arrow and of the key arrow.
        y: y at which the two arrows split.
        top: y of the end of the arrows.
    """

    x: tuple[float, float]
    y: float
    top: float


class StackColumn:
    """Drawing of one stack, built from the bottom to the top.

    Args:
        width: width of its boxes, in pixels.
        side: side of residual lines, positions and layer counts: -1 is left, 1 is right.
    """

    def __init__(self, width: float, side: Side) -> None:
        self.width: float = width
        self.side = side
        self.x: float = 0.0
        self.y: float = 0.0
        self.side_top: float = float("inf")  # top of the last box next to the stream
        self.shapes: list[Shape] = []
        self.entries: list[MemoryEntry] = []

    def text(self, x: float, y: float, content: str, size: float = FACT, anchor: str = "middle") -> None:
        """Draw a line of text next to the boxes of the stack."""
        self.shapes.append(Text(x, y, content, size, anchor, is_faint=True))

    def line(self, *points: Point, arrow: bool = False, dashed: bool = False) -> None:
        """Draw a line through points of the picture, such as a residual connection."""
        self.shapes.append(Polyline(points, arrow, dashed))

    def arrow(self, gap: float = _GAP) -> None:
        """Draw the residual stream upwards, as an arrow to the next box."""
        self.line((self.x, self.y), (self.x, self.y - gap), arrow=True)
        self.y -= gap

    def draw_labelled(self, label: str, *, arrow: bool = True) -> None:
        """Draw the residual stream upwards, with the size of its vectors as a label."""
        # The label is on the side without positions and residual lines.
        anchor = "end" if self.side > 0 else "start"
        self.text(self.x - 8 * self.side, self.y - 0.5 * _LABEL_GAP, label, anchor=anchor)
        self.line((self.x, self.y), (self.x, self.y - _LABEL_GAP), arrow=arrow)
        self.y -= _LABEL_GAP

    def draw_box(self, block: Block, x: float, bottom: float, width: float) -> Box:
        """Draw a box with its texts; `bottom` is its lower edge and `x` its middle."""
        lines = 1 + len(block.facts)
        height = _NORM_HEIGHT if lines == 1 else 2 * _PAD + lines * _FACT_LINE
        first = bottom - height + (height / 2 if lines == 1 else _PAD + _FACT_LINE / 2)
        texts = [Text(x, first, block.title, TITLE, is_bold=lines > 1)]
        texts += [Text(x, first + row * _FACT_LINE, fact, FACT) for row, fact in enumerate(block.facts, 1)]
        box = Box(x - width / 2, bottom - height, width, height, block.kind, tuple(texts), block.address, block.norms)
        self.shapes.append(box)
        return box

    def box(self, block: Block | None, *, with_arrow: bool = True) -> None:
        """Draw a module's box on the residual stream; draw nothing if the block is None."""
        if block is not None:
            if with_arrow:
                self.arrow()
            self.y = self.draw_box(block, self.x, self.y, self.width).top

    def plus(self) -> None:
        """Draw a plus sign on the residual stream, where branch outputs are added."""
        self.arrow()
        self.shapes.append(Circle(self.x, self.y - _PLUS, _PLUS))
        self.y -= 2 * _PLUS

    def side_input(self, block: Block) -> None:
        """Draw a box next to the stack, such as positions, and the plus sign that adds its output to the stream."""
        half = _PAD + (1 + len(block.facts)) * _FACT_LINE / 2
        # A box next to the stream is taller than a plus sign, so a second box needs more space.
        self.arrow(max(_GAP, self.y - self.side_top + _SMALL_GAP + half - _PLUS))
        y = self.y - _PLUS
        self.shapes.append(Circle(self.x, y, _PLUS))
        self.y -= 2 * _PLUS
        self.side_top = y - half
        edge = self.side * (self.width / 2 + _MARGIN)
        if block.title == "sinusoidal":
            radius = 11.0
            self.shapes.append(Circle(edge + self.side * radius, y, radius, mark="wave"))
            anchor, beside = "start" if self.side > 0 else "end", edge + self.side * (2 * radius + 6)
            for row, line in enumerate((block.title, *block.facts)):
                self.text(beside, y + (row - 0.5) * _FACT_LINE, line, anchor=anchor)
        else:
            width = box_width([block])
            self.draw_box(block, edge + self.side * width / 2, y + half, width)
        self.line((edge, y), (self.side * _PLUS, y), arrow=True)

    # --- below and above the layers -------------------------------------------------------------------------------

    def embedding(self, model: spec.Model, stack: spec.Stack, name: str, tokens: str) -> None:
        """Draw the embedding: word_norm(table * scale) + segments + positions, then norm and projection in order."""
        embedding, address = stack.embedding, f"{name}.embedding"
        projection_order = None if embedding.projection is None else embedding.projection.place
        projection = linear_block(stack.table_width, stack.width, f"{address}.projection")
        summed = stack.table_width
        self.box(table_block(model, stack, address))
        self.box(_norm(embedding.word_norm, f"{address}.word_norm"))
        if embedding.num_segments:
            sizes = f"{format_number(embedding.num_segments)} × {format_number(summed)}"
            self.side_input(Block("position", "Segments", (sizes,), f"{address}.segments"))
        if embedding.position is not None:
            self.side_input(position_block(embedding.position, summed, f"{address}.position"))
        self.box(projection if projection_order == "before_norm" else None)
        self.box(_norm(embedding.norm, f"{address}.norm"))
        self.box(projection if projection_order == "after_norm" else None)
        self.draw_labelled(f"{tokens} × {format_number(stack.width)}", arrow=False)

    def end(self, stack: spec.Stack, name: str) -> None:
        """Draw the final norm of a stack."""
        self.box(_norm(stack.final_norm, f"{name}.final_norm"))

    def head(self, model: spec.Model, width: int, tokens: str) -> None:
        """Draw the head of the model, with the size and the name of its output."""
        size, shown = f"{tokens} × {format_number(width)}", ""
        for block, following in head_blocks(model, width, tokens):
            if size != shown:
                self.draw_labelled(size)
            self.box(block, with_arrow=size == shown)
            size, shown = following, size
        if size == shown:
            self.arrow()
        else:
            self.draw_labelled(size)
        self.text(0.0, self.y - _FACT_LINE / 2, output_name(model.head), TITLE)
        self.y -= _FACT_LINE

    # --- layers ---------------------------------------------------------------------------------------------------

    def step(self, step: spec.Step, width: int, address: str) -> None:
        """Draw one step of a layer: x <- out(x + the sum of the branches of pre(x))."""
        self.line((0.0, self.y), (0.0, self.y - 10))
        self.y -= 10
        fork, first = self.y, len(self.shapes)
        self.box(_norm(step.pre, f"{address}.pre"))
        if len(step.branches) == 1:
            self.branch(step.branches[0], width, f"{address}.branches.0")
        else:
            self.parallel(step.branches, width, address)
        left, _, right, _ = bounds_of(self.shapes[first:])
        self.plus()
        around = right + _MARGIN if self.side > 0 else left - _MARGIN
        y = self.y + _PLUS
        self.line((0.0, fork), (around, fork), (around, y), (self.side * _PLUS, y), arrow=True)
        self.box(_norm(step.out, f"{address}.out"))

    def parallel(self, branches: Sequence[spec.Branch], width: int, address: str) -> None:
        """Draw the parallel branches of a layer step side by side, and the plus sign that sums their outputs."""
        self.line((0.0, self.y), (0.0, self.y - 10))
        bottom = self.y - 10
        pitch = self.width + _BETWEEN
        places = [(index - (len(branches) - 1) / 2) * pitch for index in range(len(branches))]
        self.line((places[0], bottom), (places[-1], bottom))
        tops = []
        for index, (branch, x) in enumerate(zip(branches, places, strict=True)):
            self.x, self.y = x, bottom
            self.branch(branch, width, f"{address}.branches.{index}")
            tops.append(self.y)
        y = min(tops) - _GAP - _PLUS
        for x, top in zip(places, tops, strict=True):
            if x == 0:
                self.line((0.0, top), (0.0, y + _PLUS), arrow=True)
            else:
                self.line((x, top), (x, y), (_PLUS if x > 0 else -_PLUS, y), arrow=True)
        self.shapes.append(Circle(0.0, y, _PLUS))
        self.x, self.y = 0.0, y - _PLUS

    def branch(self, branch: spec.Branch, width: int, address: str) -> None:
        """Draw a residual branch: scale * post(function(pre(x)))."""
        self.box(_norm(branch.pre, f"{address}.pre"))
        block = function_block(branch.function, width, f"{address}.function")
        if isinstance(branch.function, spec.Attention):
            self.fan(from_memory=branch.function.source == "memory")
            self.box(block, with_arrow=False)
        else:
            self.box(block)
        self.box(_norm(branch.post, f"{address}.post"))
        if branch.scale != 1.0:
            self.box(Block("linear", f"times {format_number(branch.scale)}"))

    def fan(self, *, from_memory: bool) -> None:
        """Draw the value, key and query arrows into an attention; in cross-attention, V and K come from the encoder."""
        x, top, middle = self.x, self.y - _FAN, self.y - 0.5 * _FAN
        xs = [x - self.width / 4, x, x + self.width / 4]
        if from_memory:
            low = self.y - 0.26 * _FAN
            self.line((x, self.y), (x, low), (xs[2], low), (xs[2], top), arrow=True)
            self.entries.append(MemoryEntry((xs[0], xs[1]), middle, top))
        else:
            self.line((x, self.y), (x, top), arrow=True)
            for side_x in (xs[0], xs[2]):
                self.line((x, middle), (side_x, middle), (side_x, top), arrow=True)
        for side_x, name in zip(xs, "VKQ", strict=True):
            self.text(side_x + 5, top + 0.32 * _FAN, name, SMALL, "start")
        self.y = top

    def layers(self, stack: spec.Stack, name: str) -> None:
        """Draw the layers: each repeating unit once, in a frame with the number of its repeats."""
        for group in layer_groups(stack):
            self.lead()
            first, is_unit = len(self.shapes), len(group.runs) > 1
            for run in group.runs:
                if is_unit:
                    self.lead()
                self.run(stack, run, name, is_inside=is_unit)
            if is_unit:
                self.enclose(first)
            lines = [
                name,
                f"layers {group.first} to {group.last}" if group.last > group.first else f"layer {group.first}",
            ]
            if stack.sharing is not None:
                used = len(set(stack.sharing[group.first : group.last + 1]))
                lines.append(f"{used} shared layer{'s' * (used > 1)}")
            self.count(first, group.repeats, lines)
            if group.first == 0 and stack.score_table is not None:
                self.score_table(score_table_block(stack.score_table, stack.width, f"{name}.score_table"), first)

    def lead(self) -> None:
        """Draw the residual stream up to the next frame."""
        self.line((0.0, self.y), (0.0, self.y - _MARGIN))
        self.y -= _MARGIN

    def run(self, stack: spec.Stack, run: LayerRun, name: str, *, is_inside: bool) -> None:
        """Draw a layer in a frame; if it repeats inside a repeating unit, also write the number of its repeats."""
        first = len(self.shapes)
        for index, step in enumerate(stack.layers[run.layer].steps):
            self.step(step, stack.width, f"{name}.layers.{run.layer}.steps.{index}")
        self.enclose(first)
        if is_inside and run.count > 1:
            self.count(first, run.count, [])

    def enclose(self, first: int) -> None:
        """Draw a frame under all shapes from index `first` on, and the stream up to the top of the frame."""
        left, top, right, bottom = bounds_of(self.shapes[first:])
        left, top, right = left - _MARGIN, top - _MARGIN, right + _MARGIN
        self.line((0.0, self.y), (0.0, top))
        self.y = top
        self.shapes.insert(first, Box(left, top, right - left, bottom - top, "frame"))

    def count(self, first: int, repeats: int, lines: Sequence[str]) -> None:
        """Write the number of repeats next to the shapes from index `first` on."""
        left, top, right, bottom = bounds_of(shape for shape in self.shapes[first:] if isinstance(shape, Box))
        x, anchor = (right + 10, "start") if self.side > 0 else (left - 10, "end")
        y = (top + bottom) / 2 - 0.5 * _FACT_LINE * len(lines)
        self.shapes.append(Text(x, y, f"{repeats} ×", 17.0, anchor, is_bold=True))
        for row, line in enumerate(lines, 1):
            self.text(x, y + 4 + row * _FACT_LINE, line, anchor=anchor)

    def score_table(self, block: Block, first: int) -> None:
        """Draw the table that the attentions of all layers share, next to the frame that starts at index `first`."""
        left, _, right, bottom = bounds_of(shape for shape in self.shapes[first:] if isinstance(shape, Box))
        frame, width = (right if self.side > 0 else left), box_width([block])
        edge = frame + self.side * 2 * _MARGIN
        box = self.draw_box(block, edge + self.side * width / 2, bottom - 6, width)
        y = box.top + box.height / 2
        self.line((edge, y), (frame, y), arrow=True, dashed=True)


def box_width(blocks: Iterable[Block]) -> float:
    """Return the width that holds the texts of all boxes."""
    texts = [
        estimated_width(text, TITLE if row == 0 else FACT, is_bold=row == 0)
        for block in blocks
        for row, text in enumerate((block.title, *block.facts))
    ]
    return max(texts, default=0.0) + 2 * _PAD


def _norm(norm: spec.LayerNorm | spec.RMSNorm | spec.Part | None, address: str) -> Block | None:
    return None if norm is None else norm_block(norm, address)
