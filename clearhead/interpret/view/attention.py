"""Draw attention: one head as a matrix of tokens, or all heads as thumbnails.

Legend: L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from clearhead.base.errors import InputError
from clearhead.base.figures import (
    EDGE,
    FAINT,
    draw_color_scale,
    draw_heat_map,
    label_text,
    new_figure,
    save_figure,
    text_width,
    write_beside,
)

MOST_TOKENS = 2000
"""Most tokens on a side of a matrix that a picture shows."""
_CELL, _SMALLEST_CELL, _LARGEST_GRID, _LABEL = 0.25, 0.02, 24.0, 0.2  # inches
_LONGEST_LABEL = 24  # characters
_THUMBNAIL, _GAP = 0.8, 0.08  # inches
_LEGEND = "attention weight: row = {}, column = key token"


def draw_matrix(
    weights_TS: Float[np.ndarray, "queries keys"],
    queries: Sequence[str],
    keys: Sequence[str],
    path: Path,
    *,
    title: str,
    row: str = "query token",
) -> None:
    """Draw the attention of one head as a heat map with the tokens on both axes.

    Args:
        weights_TS: attention weights, from 0 to 1.
        queries, keys: labels of the rows and of the columns.
        path: .png or .svg file to write.
        title: one line above the picture.
        row: meaning of a row, for the legend.

    Raises:
        InputError: the text has too many tokens for a picture, or the file cannot be written.
    """
    largest = max(weights_TS.shape)
    if largest > MOST_TOKENS:
        raise InputError(f"a picture shows at most {MOST_TOKENS:,} tokens on a side, got {largest:,}: shorten the text")
    cell = max(_SMALLEST_CELL, min(_CELL, _LARGEST_GRID / largest))
    rows, columns = _labels(queries, cell), _labels(keys, cell)
    rotated = [text_width(name) > cell for name in columns]
    left = max(map(text_width, rows)) + 0.3
    top = 0.75 + max(0.16, *(text_width(name) for name in columns))
    grid_width, grid_height, legend = cell * len(keys), cell * len(queries), _LEGEND.format(row)
    width = max(left + grid_width + 0.3, text_width(title) * 1.4 + 0.5, text_width(legend) + 2.2)
    height = top + grid_height + 0.85
    figure = new_figure(width, height, title)
    axes = figure.add_axes((left / width, 0.75 / height, grid_width / width, grid_height / height))
    draw_heat_map(axes, weights_TS, rows, columns, rotated=rotated)
    if cell < _LABEL / 2:
        axes.grid(visible=False, which="minor")
    draw_color_scale(figure, legend)
    save_figure(figure, path)


@dataclass(frozen=True)
class StackThumbnails:
    """Thumbnails of the heads of one stack.

    Args:
        stack: name of the stack.
        layers: number of each layer.
        heads: thumbnails of the heads of each layer, with values from 0 to 1 and any size.
    """

    stack: str
    layers: Sequence[int]
    heads: Sequence[Float[np.ndarray, "_ _ _"]]


def draw_overview(stacks: Sequence[StackThumbnails], path: Path, *, title: str) -> None:
    """Draw every head of every layer as a thumbnail: one row per layer, one column per head.

    Args:
        stacks: stacks to draw, at least one, below each other.
        path: .png or .svg file to write.
        title: one line above the picture.

    Raises:
        InputError: the file cannot be written.
    """
    pitch = _THUMBNAIL + _GAP
    columns = max(len(heads) for stack in stacks for heads in stack.heads)
    heights = [0.55 + pitch * len(stack.layers) for stack in stacks]
    legend = _LEGEND.format("query token")
    width = max(0.95 + pitch * columns, text_width(title) * 1.4 + 0.5, text_width(legend) + 2.2)
    height = 0.65 + sum(heights) + 0.75
    figure = new_figure(width, height, title)
    top = height - 0.65
    for stack, stack_height in zip(stacks, heights, strict=True):
        figure.text(0.25 / width, (top - 0.12) / height, stack.stack, fontsize=10, color=FAINT, va="center")
        for row, (layer, heads) in enumerate(zip(stack.layers, stack.heads, strict=True)):
            low = top - 0.5 - pitch * row - _THUMBNAIL
            for head, weights_TS in enumerate(heads):
                left = 0.8 + pitch * head
                bounds = (left / width, low / height, _THUMBNAIL / width, _THUMBNAIL / height)
                axes = figure.add_axes(bounds)
                _draw_thumbnail(axes, weights_TS)
                if row == 0:
                    write_beside(axes, f"head {head}", (0.0, 1.0), (0.0, 3.0), size=7.0)
                if head == 0:
                    write_beside(axes, f"layer {layer}", (0.0, 0.5), (-38.0, 0.0), size=7.0, va="center")
        top -= stack_height
    draw_color_scale(figure, legend)
    save_figure(figure, path)


def _draw_thumbnail(axes: Axes, weights_TS: Float[np.ndarray, "queries keys"]) -> None:
    axes.imshow(weights_TS, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(EDGE)


def _labels(tokens: Sequence[str], cell: float) -> list[str]:
    """Return the token labels of the cells; if the cells are too small, most labels are empty."""
    step = math.ceil(_LABEL / cell - 1e-9) if cell < _LABEL else 1
    return [label_text(token, _LONGEST_LABEL) if position % step == 0 else "" for position, token in enumerate(tokens)]
