"""A job that resumes exactly passes; planted defects are found, and a stopped check leaves no files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from clearhead.apps.check.job import forecast
from clearhead.apps.check.job import job as job_check
from clearhead.apps.check.job.differences import RunDifference
from clearhead.apps.check.job.forecast import examine
from clearhead.apps.check.job.job import Kill, KilledRun, compare_divisions, find_faults, without_dropout
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError, RunFailure
from clearhead.training.parallel.engines import StepSums
from clearhead.training.preflight import Preflight
from clearhead.training.runfile.read import load_run_file
from tests.apps.cli.tiny_run import SIZES, write_run_file

LENGTH = "steps = 40\nvalidate_every = 50\n"
# A resumed training begins the epoch anew: the order of the data is forgotten.
FORGETFUL = """
from clearhead.data.batches import plans

plans.EpochBatches.load_state = lambda self, state: None
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder for temporary files; afterwards it must be empty, and no new process may run."""
    before = {*psutil.Process().children(recursive=True)}
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())
    assert not {*psutil.Process().children(recursive=True)} - before


def test_a_job_passes_and_its_certificate_says_for_what(
    tmp_path: Path, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_run_file(tmp_path, train=f"{LENGTH}early_stop = {{ metric = 'loss', patience = 1 }}\naverage = 2\n")
    assert main(["check", str(file), "--steps", "8", "--kills", "2", "--seed", "3", "--json"]) == 0
    out, err = capfd.readouterr()
    record = json.loads(out.splitlines()[-1])
    assert record["ok"] and not record["faults"] and not record["missed_kills"]
    assert (record["steps"], record["planned_steps"], record["validate_every"], record["seed"]) == (8, 40, 4, 3)
    assert {kill["moment"] for kill in record["kills"]} == {"saving", "validation"}
    assert 0.0 <= record["accumulated"]["distance"] < record["tolerance"]
    assert 0.0 <= record["two_processes"]["distance"] < record["tolerance"]
    assert set(record["certificate"]) == {"versions", "machine", "run file", "data", "weights"}
    assert "the first 8 steps of 40" in err and "validated every 4 instead of 50" in err and "about" in err
    assert not (tmp_path / "run").exists()


def test_a_resume_that_forgets_the_order_of_the_data_is_found(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORGETFUL, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])])
    monkeypatch.setenv("PYTHONPATH", path)
    # One row a batch: they cannot be divided.
    file = write_run_file(tmp_path, train=LENGTH.replace("steps", "batch_tokens = 7\nsteps", 1))
    file.write_text(file.read_text("utf-8").replace("batch_tokens = 101\n", ""), encoding="utf-8")
    assert main(["check", str(file), "--steps", "8", "--kills", "1", "--seed", "5"]) == 1
    lines = capfd.readouterr().out.splitlines()
    resumed = next(number for number, line in enumerate(lines) if line.startswith("resumed"))
    assert "DIFFERENT" in lines[resumed] and "step " in lines[resumed + 1]
    assert any("state: batches.batch" in line for line in lines)
    assert next(line for line in lines if line.startswith("accumulated")).partition("not checked: ")[2]


@pytest.mark.parametrize(
    ("number", "code", "function"),
    [(signal.SIGINT, 130, "job.job.train_undisturbed"), (signal.SIGTERM, 143, "job.job._reach_the_end")],
)
def test_a_check_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, function: str
) -> None:
    def stop(*arguments: object) -> None:
        assert list(temporary.iterdir()) and ("reach" not in function or psutil.Process().children())
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not arrive")

    # On a busy machine the check may take longer to end, and the process that would be ended is that of the tests.
    monkeypatch.setattr("clearhead.apps.cli.stopping.GRACE", 60)
    monkeypatch.setattr("clearhead.apps.check.job.job.compare_divisions", lambda job: (None, None))
    monkeypatch.setattr(f"clearhead.check.{function}", stop)
    before = signal.signal(number, signal.default_int_handler)
    try:
        assert main(["check", str(write_run_file(tmp_path, train=LENGTH))]) == code
    finally:
        signal.signal(number, before)


def test_gradients_that_forget_the_labels_of_earlier_batches_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = examine(write_run_file(tmp_path, train=LENGTH), tmp_path / "folder", steps=8, kills=1)
    job = replace(job, one_process_reason="one process is enough here")

    def add(self: StepSums, num_labels: int, num_tokens: int) -> None:
        self.num_labels, self.num_tokens = num_labels, self.num_tokens + num_tokens

    monkeypatch.setattr(StepSums, "add", add)
    halves, processes = compare_divisions(job)
    assert halves.is_wrong and halves.distance is not None and halves.distance > 0.5
    assert str(processes) == "not checked: one process is enough here"


def test_a_job_of_few_steps_is_checked_whole(tmp_path: Path) -> None:
    job = examine(write_run_file(tmp_path, train="steps = 3\n"), tmp_path / "folder", steps=None, kills=1)
    assert (job.steps, job.planned, job.save_every, job.validate_every) == (3, 3, 1, 1)
    assert job.moments("saving") == job.moments("validation") == [1, 2, 3]


def test_a_disk_without_room_for_both_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = forecast.forecast

    def full(*arguments: Any) -> Preflight:
        report = measured(*arguments)
        return replace(report, disk_free=2 * report.disk_bytes - 1)

    monkeypatch.setattr(forecast, "forecast", full)
    with pytest.raises(InputError, match="set TMPDIR to a folder on a larger one"):
        examine(write_run_file(tmp_path, train=LENGTH), tmp_path / "folder", steps=None, kills=1)


def test_dropout_of_a_spec_file_is_turned_off(tmp_path: Path) -> None:
    job = examine(write_run_file(tmp_path, train=LENGTH), tmp_path, steps=4, kills=1)
    tables = job.file.read_text("utf-8").replace(SIZES, f'[model]\nspec = "{tmp_path}/forecast/spec.json"\n')
    job.file.write_text(tables, encoding="utf-8")
    assert '"dropout": 0.1' in (tmp_path / "forecast" / "spec.json").read_text("utf-8")
    changed = load_run_file(job.file, without_dropout(job))
    assert changed.model.spec is not None and '"dropout": 0.1' not in Path(changed.model.spec).read_text("utf-8")


def test_a_job_that_cannot_go_on_is_a_fault_and_one_that_never_began_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = [Kill("random", 2)]

    def kill(job: object, run: KilledRun, *others: object) -> bool:
        run.kills += came
        return True

    def reach(job: object, process: object) -> None:
        raise RunFailure("the checkpoint is gone")

    monkeypatch.setattr(forecast.CheckedJob, "train", lambda *arguments, **options: contextlib.nullcontext())
    monkeypatch.setattr(job_check, "_reach_the_end", reach)
    monkeypatch.setattr(job_check, "_kill_at_moment", kill)
    job = examine(write_run_file(tmp_path, train=LENGTH), tmp_path, steps=4, kills=1)
    (run,) = job_check.train_with_kills(job, 1, random.Random(1), 1.0)
    assert find_faults(job, tmp_path, run) == [
        "after the kill at a random moment after step 2, --resume: the checkpoint is gone"
    ]
    came.clear()
    with pytest.raises(RunFailure, match="the checkpoint is gone"):
        job_check.train_with_kills(job, 1, random.Random(1), 1.0)


def test_what_differs_before_the_first_kill_is_not_blamed_on_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = examine(write_run_file(tmp_path, train=LENGTH), tmp_path, steps=4, kills=1)
    monkeypatch.setattr(
        "clearhead.apps.check.job.job.find_differences", lambda *arguments: [RunDifference(2, "weights of a")]
    )
    run = KilledRun(tmp_path, [Kill("saving", 2)])
    assert "step 2: weights of a; before the first kill, so two runs differ" in find_faults(job, tmp_path, run)[0]
    assert find_faults(job, tmp_path, KilledRun(tmp_path, [Kill("saving", 1)])) == ["step 2: weights of a"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.toml"], "missing.toml"),
        (["run.toml", "--against", "transformers"], "run.toml is a run file"),
        (["run.toml", "--tolerance", "0.1"], "run.toml is a run file (.toml): --tolerance would"),
        (["run.toml", "--hint", "1"], "--hint would have no effect"),
        (["mine.py", "--tolerance", "0.1"], "mine.py is a Python file"),
        (["run", "--steps", "4"], "run is a checkpoint or a run: --steps would have no effect"),
        (["run.toml", "--kills", "0"], "--kills expects a number of at least 1"),
        (["broken.toml"], "broken.toml:1: not valid TOML"),
        (["elsewhere.toml"], "train.source"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path, capfd: pytest.CaptureFixture[str],
    arguments: list[str], expected: str,
) -> None:  # fmt: skip
    file = write_run_file(tmp_path, train=LENGTH)
    (tmp_path / "elsewhere.toml").write_text(file.read_text("utf-8").replace("/train.source", "/no/train.source"))
    (tmp_path / "broken.toml").write_text("[task\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) == 2
    out, err = capfd.readouterr()
    assert expected in err and not out and "Traceback" not in err
