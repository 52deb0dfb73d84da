"""Pictures of signed changes as heat maps, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from clearhead.base.errors import InputError
from clearhead.base.figures import (
    draw_color_scale,
    draw_heat_map,
    label_text,
    new_figure,
    save_figure,
    text_width,
    write_beside,
)

MOST_COLUMNS = 400
"""The largest number of columns that a picture shows."""
_CELL, _LONGEST_LABEL = 0.25, 16  # inches, characters
_LEGEND = "change of the log-probability: blue more, red less"


@dataclass(frozen=True)
class ChangeMap:
    """One heat map.

    Args:
        title: above it.
        changes: of any size and sign; NaN where there is none.
        rows, columns: labels.
    """

    title: str
    changes: Float[np.ndarray, "rows columns"]
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def labels(self) -> list[str]:
        """The labels of the columns as they are written."""
        return [label_text(name, _LONGEST_LABEL) for name in self.columns]

    @property
    def top(self) -> float:
        """The height of title and column labels, in inches."""
        return 0.45 + max(0.16, *map(text_width, self.labels))


def draw_changes(maps: Sequence[ChangeMap], path: Path, *, title: str) -> None:
    """Draw changes, all with the same colours: white is none, and the strongest has the largest size among all.

    Args:
        maps: at least one; one below the other.
        path: the .png or .svg file.
        title: one line above.

    Raises:
        InputError: there are too many columns for a picture, or the file cannot be written.
    """
    most = max(len(heat_map.columns) for heat_map in maps)
    if most > MOST_COLUMNS:
        raise InputError(f"a picture shows at most {MOST_COLUMNS} tokens, and this text has {most:,}")
    largest = float(max(np.nanmax(np.abs(heat_map.changes), initial=0.0) for heat_map in maps)) or 1.0
    left = 0.35 + max(text_width(name) for heat_map in maps for name in heat_map.rows)
    width = max(left + _CELL * most + 0.3, text_width(title) * 1.4 + 0.5, text_width(_LEGEND) + 2.4)
    height = 0.6 + sum(heat_map.top + _CELL * len(heat_map.rows) + 0.2 for heat_map in maps) + 0.8
    figure = new_figure(width, height, title)
    top = height - 0.6
    for heat_map in maps:
        grid_width, grid_height = _CELL * len(heat_map.columns), _CELL * len(heat_map.rows)
        low = top - heat_map.top - grid_height
        axes = figure.add_axes((left / width, low / height, grid_width / width, grid_height / height))
        rotated = [text_width(name) > _CELL for name in heat_map.labels]
        draw_heat_map(axes, heat_map.changes, heat_map.rows, heat_map.labels, rotated=rotated, largest=largest)
        write_beside(axes, heat_map.title, (0.0, 1.0), (0.0, 72 * (heat_map.top - 0.25)), size=10.0)
        top = low - 0.2
    draw_color_scale(figure, _LEGEND, largest=largest)
    save_figure(figure, path)
