"""The numbers of a run: one JSON object per line in `metrics.jsonl`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from clearhead.errors import RunFailure
from clearhead.files import sync
from clearhead.runs.checkpoint import write_text

FILE_NAME: Final = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """One line of `metrics.jsonl`.

    Attributes:
        step: optimizer steps taken.
        tokens: source and target tokens seen since the run began.
        seconds: wall-clock time since the run began, over all its resumptions.
        loss: mean training loss per label since the line before, in nats.
        learning_rate: the schedule's learning rate of this step.
        tokens_per_second: of training alone, since the line before.
        valid_loss: mean validation loss per label in nats, where this step was validated.
        valid_score: the validation score, where this step was validated and there is one.
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
    """The file `metrics.jsonl` of one run, appended to as it runs.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / FILE_NAME

    def append(self, row: Metrics) -> None:
        """Add one line and hand it to the system at once, so that it outlives this process.

        Raises:
            RunFailure: the disk refuses the write.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        except OSError as error:
            raise RunFailure(f"{self.path} could not be written: {error.strerror}.") from error

    def sync(self) -> None:
        """Wait until every line has reached the disk; a checkpoint must never be ahead of its metrics."""
        if self.path.exists():
            sync(self.path)

    def cut_back(self, step: int) -> None:
        """Drop the lines after a step, and a line that was cut off in mid-write, as if they had never been written."""
        rows = [row for row in self.rows() if row.step <= step]
        write_text(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def rows(self) -> list[Metrics]:
        """Return every whole line; a last line that was cut off in mid-write is left out."""
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[Metrics]:
    """Read a `metrics.jsonl`; a missing file has no lines, and a line that was cut off is left out."""
    if not path.exists():
        return []
    names = {field.name for field in fields(Metrics)}
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            rows.append(Metrics(**{name: value for name, value in values.items() if name in names}))
        except (ValueError, TypeError, AttributeError):
            continue
    return rows
