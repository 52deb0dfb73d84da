"""Draw cross-attention from target tokens to source tokens as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float

from clearhead.base.figures import draw_color_scale, draw_heat_map, new_figure, save_figure, text_width, write_beside

CELL, HEAD, FOOT = 0.25, 0.62, 0.75  # inches
LEGEND = "attention weight: row = token being written, column = source token"


@dataclass(frozen=True)
class AlignmentHeatMap:
    """Heat map of one sentence pair, with the size of its picture in inches.

    Args:
        weights: attention weights of each target token (row) on the source tokens (columns); a row sums to one.
        source_tokens: labels of the columns.
        target_tokens: labels of the rows.
        title: title above the heat map.
    """

    weights: Float[np.ndarray, "target source"]
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    title: str

    @cached_property
    def rotated(self) -> list[bool]:
        """List with True for each column label that is wider than its column and therefore vertical."""
        return [text_width(token) > CELL for token in self.source_tokens]

    @cached_property
    def left(self) -> float:
        """Width of the row labels, in inches."""
        return max(map(text_width, self.target_tokens)) + 0.25

    @cached_property
    def top(self) -> float:
        """Height of the column labels, in inches."""
        labels = zip(self.source_tokens, self.rotated, strict=True)
        return max(0.16, *(text_width(token) for token, is_rotated in labels if is_rotated), 0.0) + 0.08

    @property
    def grid(self) -> tuple[float, float]:
        """Width and height of all cells together, in inches."""
        return CELL * len(self.source_tokens), CELL * len(self.target_tokens)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the heat map with its labels and title, in inches."""
        width, height = self.grid
        return self.left + max(width, 1.1 * text_width(self.title)) + 0.2, self.top + 0.45 + height + 0.2


def draw_alignments(alignments: Sequence[AlignmentHeatMap], path: Path, *, title: str) -> None:
    """Draw attention weights as heat maps in one picture, with the tokens on both axes.

    Args:
        alignments: heat maps to draw, at least one; two per row.
        path: PNG file to write.
        title: one line above all heat maps.

    Raises:
        InputError: the file cannot be written.
    """
    rows = [alignments[first : first + 2] for first in range(0, len(alignments), 2)]
    columns = [max(heat_map.size[0] for heat_map in alignments[start::2]) for start in range(min(2, len(alignments)))]
    heights = [max(heat_map.size[1] for heat_map in row) for row in rows]
    width = max(sum(columns) + 0.3, text_width(title) * 1.5 + 0.5, text_width(LEGEND) + 2.2)
    height = HEAD + sum(heights) + FOOT
    figure = new_figure(width, height, title)
    top = height - HEAD
    for row, row_height in zip(rows, heights, strict=True):
        for column, heat_map in enumerate(row):
            grid_width, grid_height = heat_map.grid
            left, low = 0.15 + sum(columns[:column]) + heat_map.left, top - heat_map.top - 0.45 - grid_height
            axes = figure.add_axes((left / width, low / height, grid_width / width, grid_height / height))
            draw_heat_map(
                axes, heat_map.weights, heat_map.target_tokens, heat_map.source_tokens, rotated=heat_map.rotated
            )
            write_beside(axes, heat_map.title, (0.0, 1.0), (0.0, 72 * (heat_map.top + 0.08)), size=10.0)
        top -= row_height
    draw_color_scale(figure, LEGEND)
    save_figure(figure, path)
