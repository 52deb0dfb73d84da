"""Plots of a run, redrawn from time to time during training, and a note on dropout in the training loss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from clearhead.base.progress import message
from clearhead.checkpoints.runs.metrics import MetricsRow


class Plotter:
    """Plots the metrics of a run from time to time, within a small share of the run time.

    A failure does not stop training: it is reported once, and plotting ends.

    Args:
        folder: the folder of the plots, usually RUN/plots.
        every_seconds: the minimum time between two updates, in seconds.
        share: the maximum share of the run time to spend on plotting.
        note: a sentence below the title of the loss plot.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every_seconds: float = 20.0,
        share: float = 0.02,
        note: str = "",
    ) -> None:
        self.folder = folder
        self._note = note
        self._every_seconds = every_seconds
        self._share = share
        self._not_before = time.monotonic() + every_seconds
        self._works = True

    def draw_if_due(self, rows: Sequence[MetricsRow], *, score_name: str = "score") -> None:
        """Draw all plots if enough time has passed since the last update."""
        if time.monotonic() >= self._not_before:
            self.draw(rows, score_name=score_name)

    def draw(self, rows: Sequence[MetricsRow], *, score_name: str = "score") -> None:
        """Draw all plots now."""
        if not self._works or not rows:
            return
        began = time.monotonic()
        try:
            # matplotlib takes a second to import.
            from clearhead.training.progress.pictures import write_plots

            write_plots(self.folder, rows, score_name=score_name, note=self._note)
        except Exception as error:  # noqa: BLE001
            self._works = False
            message(f"the plots cannot be drawn ({type(error).__name__}: {error}); training goes on without them")
        spent = time.monotonic() - began
        self._not_before = time.monotonic() + max(self._every_seconds, spent / self._share)


def training_loss_note(module: nn.Module, label_smoothing: float) -> str:
    """Return a note if the training loss includes dropout or label smoothing, unlike the validation loss; else "".

    Args:
        module: the module to train.
        label_smoothing: the label smoothing of the run.
    """
    has_dropout = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules())
    parts = ["dropout"] if has_dropout else []
    parts += [f"label smoothing {label_smoothing:g}"] if label_smoothing else []
    return f"the training loss includes {' and '.join(parts)}; the validation loss does not" if parts else ""
