"""The page on the run directory names every file that a run writes, and none that no run writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.checkpoints.runs.directory import JOB_FILE, LOCK
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.training.progress.pictures import write_plots
from clearhead.training.progress.tracker import TRACKER_FILE
from tests import hf_models

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "run-directory.md"
# Of a package that is not always there, of a run under torchrun, and of the time before a run ends.
ELSEWHERE = {"tensorboard/", TRACKER_FILE, JOB_FILE, LOCK}
TABLES = {
    "tokenizer": {"kind": "character"},
    "model": {"layers": 1, "width": 16, "heads": 2, "feedforward": 16},
}
SENTENCES = ["ein hund bellt", "ein hund", "zwei hunde bellen"]


def written_files(run: Path) -> set[str]:
    """Return the files of a run with the names of the page: checkpoints are of step N, and origin/ is one entry."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {re.sub(r"step-\d+", "step-N", "origin/" if name.startswith("origin/") else name) for name in names}


def train(run: Path, kind: str, **tables: dict[str, object]) -> set[str]:
    settings = {"run": str(run), "steps": 4, "validate_every": 2, **tables.pop("train", {})}
    task = {"kind": kind, **tables.pop("task", {})}
    extra_tables = TABLES if "init" not in task else {}
    pairs = [(sentence, sentence[::-1]) if kind == "translate" else sentence for sentence in SENTENCES * 4]
    data = {"valid": 0.3, "max_length": 16}
    ch.train({"task": task, "data": data, **extra_tables, **tables, "train": settings}, data={"train": pairs})
    write_plots(run / "plots", read_metrics(run / "metrics.jsonl"))
    return written_files(run)


@pytest.mark.usefixtures("quick_trainings")
def test_every_file_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    checkpoint = hf_models.language_model(tmp_path / "checkpoint")
    names = train(tmp_path / "pairs", "translate", train={"average": 2, "ema": 0.9, "keep": 1})
    names |= train(tmp_path / "sides", "translate", tokenizer={"kind": "word", "joint": False})
    names |= train(tmp_path / "tuned", "generate", task={"init": str(checkpoint)})
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall("`(.+?)`", row)}
    assert names == named - ELSEWHERE and named >= ELSEWHERE
