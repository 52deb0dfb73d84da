"""The lines of metrics.jsonl: written, read, and named where they are damaged."""

from __future__ import annotations

import math
from pathlib import Path

from clearhead.checkpoints.runs.metrics import MetricsLog, MetricsRow

ROWS = [MetricsRow(step, 70 * step, 1.5, math.nan if step == 2 else 0.25, 1e-3, 700.0) for step in (1, 2, 3)]


def test_a_damaged_line_is_named_and_an_incomplete_last_one_is_not(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    assert log.rows() == [] and log.find_damaged_lines() == []
    for row in ROWS:
        log.append(row)
    assert str(log.rows()) == str(ROWS) and log.find_damaged_lines() == []
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text(lines[0] + lines[1].replace("140", '"140"') + lines[2] + "{}\n" + lines[0][:20])
    assert [row.step for row in log.rows()] == [1, 3]
    assert log.find_damaged_lines() == [2, 4]
    log.cut_back(1)
    assert log.path.read_text() == lines[0]
