"""Metrics of a run: one JSON object per line of `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from clearhead.base.errors import RunFailure
from clearhead.base.files import read_model_file, sync
from clearhead.checkpoints.runs.checkpoint import write_text

FILE_NAME: Final = "metrics.jsonl"


@dataclass(frozen=True)
class MetricsRow:
    """One line of `metrics.jsonl`.

    Attributes:
        step: the number of optimizer steps.
        tokens: the number of source and target tokens seen since the run began.
        seconds: the wall-clock time in seconds since the run began, over all resumptions.
        loss: the mean training loss per label since the previous line, in nats.
        learning_rate: the schedule's learning rate at this step.
        tokens_per_second: the training speed since the previous line, without validations and saves.
        valid_loss: the mean validation loss per label, in nats. None means that this step was not validated.
        valid_score: the validation score. None means that this step was not validated or has no score.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    valid_loss: float | None = None
    valid_score: float | None = None


class MetricsLog:
    """File `metrics.jsonl` of one run, to which training appends lines.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.path: Path = run / FILE_NAME

    def append(self, row: MetricsRow) -> None:
        """Append one line and flush it.

        Raises:
            RunFailure: the disk refuses the write.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        except OSError as error:
            raise RunFailure(f"{self.path} could not be written: {error.strerror}") from error

    def sync(self) -> None:
        """Flush the file to the disk; call this before a checkpoint is written."""
        if self.path.exists():
            sync(self.path)

    def cut_back(self, step: int) -> None:
        """Delete the lines after a step, and an incomplete last line."""
        rows = [row for row in self.rows() if row.step <= step]
        write_text(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def find_damaged_lines(self) -> list[int]:
        """Return the numbers of complete lines that cannot be read."""
        return find_damaged_lines(self.path)

    def rows(self) -> list[MetricsRow]:
        """Return all complete lines."""
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read a `metrics.jsonl`; a missing file has no lines, and incomplete or damaged lines are skipped."""
    return [row for _, row in _parse_lines(path) if row is not None]


def find_damaged_lines(path: Path) -> list[int]:
    """Return the numbers, from 1, of complete lines of a `metrics.jsonl` that cannot be read."""
    return [number for number, row in _parse_lines(path) if row is None]


def _parse_lines(path: Path) -> Iterator[tuple[int, MetricsRow | None]]:
    if not path.exists():
        return
    kind = TypeAdapter(MetricsRow)
    *complete, last = read_model_file(path, what="the metrics of a run").split(b"\n")
    for number, line in enumerate([*complete, last], start=1):
        try:
            yield number, kind.validate_json(line, strict=True)
        except ValidationError:
            # The last line of a killed process may be incomplete.
            if number <= len(complete):
                yield number, None
