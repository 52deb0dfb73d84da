"""A run directory belongs to one process and one configuration, and its checkpoints are found by reference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.checkpoints.reference import ModelReference
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.directory import (
    differing_keys,
    find_files,
    find_weights,
    is_run_directory,
    open_run,
    refuse_altered,
    retry_while_checkpoints_change,
)
from clearhead.checkpoints.runs.extra_weights import save_averaged
from clearhead.checkpoints.weights.files import load_tensors
from tests.checkpoints.runs.test_checkpoint import alter, listing, some_checkpoint

CONFIGURATION = '[model]\nwidth = 128\nheads = 4\n[train]\nrun = "here"\nsteps = 100\n'


def weights_of(reference: str) -> Path:
    return find_weights(ModelReference.parse(reference))


def test_a_new_run_keeps_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first"
    with open_run(path, configuration=CONFIGURATION) as run:
        run.write_text("spec.json", "{}")
        assert listing(path) == ["format.json", "lock", "run.toml", "spec.json"]
    assert listing(path) == ["format.json", "run.toml", "spec.json"]
    assert (path / "run.toml").read_text() == CONFIGURATION


@pytest.mark.parametrize("name", ["lock", "plots", "checkpoints/recent", "metrics.jsonl"])
def test_a_run_writes_through_no_link(name: str, tmp_path: Path) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    with open_run(path, configuration=CONFIGURATION):
        (path / "checkpoints").mkdir()
    outside.write_text("kept")
    (path / name).symlink_to(outside)
    with pytest.raises(InputError, match="is a link"):
        open_run(path, configuration=CONFIGURATION)
    assert outside.read_text() == "kept"


def test_the_same_configuration_may_come_back(tmp_path: Path) -> None:
    for _ in range(2):
        with open_run(tmp_path / "run", configuration=CONFIGURATION):
            pass


def test_another_configuration_is_refused_and_every_key_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, configuration=CONFIGURATION):
        files.save_checkpoint(path, some_checkpoint(5))
    other = '[model]\nwidth = 256\ndropout = 0.1\n[train]\nrun = "here"\nsteps = 100\n'
    with pytest.raises(InputError) as caught:
        open_run(path, configuration=other)
    message = str(caught.value)
    assert "model.width is 128 there and 256 here" in message
    assert "model.heads is 4 there and not set here" in message
    assert "model.dropout is not set there and 0.1 here" in message
    assert "steps" not in message
    assert (path / "run.toml").read_text() == CONFIGURATION
    assert listing(path) == ["checkpoints", "format.json", "run.toml"]


@pytest.mark.parametrize("steps", [[], [0]])
def test_a_run_that_took_no_step_blocks_nothing(tmp_path: Path, steps: list[int]) -> None:
    """Killed before its first checkpoint, or failed in its first step."""
    path = tmp_path / "run"
    with open_run(path, configuration=CONFIGURATION):
        for step in steps:
            files.save_checkpoint(path, some_checkpoint(step))
    other = CONFIGURATION.replace("steps = 100", "steps = 200")
    with open_run(path, configuration=other):
        assert (path / "run.toml").read_text() == other


def test_resuming_without_a_checkpoint_says_so_before_it_blames_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, configuration=CONFIGURATION):
        (path / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"has no checkpoint yet: .*without --resume"):
        open_run(path, configuration=CONFIGURATION.replace("steps = 100", "steps = 200"), resume=True)


def test_some_keys_may_change(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, configuration=CONFIGURATION):
        files.save_checkpoint(path, some_checkpoint(5))
    longer = CONFIGURATION.replace("steps = 100", "steps = 200")
    with pytest.raises(InputError, match=r"train\.steps is 100 there and 200 here"):
        open_run(path, configuration=longer, resume=True)
    with open_run(path, configuration=longer, resume=True, may_differ=["train.steps"]):
        assert (path / "run.toml").read_text() == longer


def test_differing_keys_are_dotted_and_sorted() -> None:
    before = {"b": {"x": 1, "y": [1, 2]}, "a": 1, "same": {"deep": {"er": 0}}}
    now = {"b": {"x": 1, "y": [2, 1]}, "c": {"z": None}, "same": {"deep": {"er": 0}}}
    assert differing_keys(before, now) == ["a", "b.y", "c.z"]


def test_a_run_that_exists_is_not_begun_again(tmp_path: Path) -> None:
    with open_run(tmp_path, configuration=CONFIGURATION):
        files.save_checkpoint(tmp_path, some_checkpoint(5))
    with pytest.raises(InputError, match="reached step 5: add --resume"):
        open_run(tmp_path)
    with open_run(tmp_path, resume=True):
        pass


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_resuming_nothing_is_refused_and_leaves_nothing(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "run"
    if folder == "empty":
        path.mkdir()
    with pytest.raises(InputError, match="without --resume"):
        open_run(path, configuration=CONFIGURATION, resume=True)
    assert not path.exists()


def test_an_empty_folder_lacks_the_files_of_every_kind_of_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"spec\.json, or config\.json as in a Hugging Face checkpoint, is missing"):
        find_files(ModelReference(tmp_path))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(InputError, match="holds no run"):
        open_run(tmp_path)
    assert listing(tmp_path) == ["letters.txt"]
    with pytest.raises(InputError, match="is a file"):
        open_run(tmp_path / "letters.txt")
    with pytest.raises(InputError, match="cannot be written"):
        open_run(tmp_path / "letters.txt" / "run")


def test_a_late_mistake_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(InputError, match="late"), open_run(path, configuration=CONFIGURATION) as run:
        run.write_text("spec.json", "{}")
        raise InputError("found late")
    assert not path.exists()


def test_a_mistake_never_removes_what_was_trained(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(InputError), open_run(path, configuration=CONFIGURATION):
        files.save_checkpoint(path, some_checkpoint(5))
        raise InputError("found late")
    assert files.checkpoint_steps(path) == [5]
    with pytest.raises(InputError), open_run(path, configuration=CONFIGURATION, resume=True):
        raise InputError("again")
    assert files.checkpoint_steps(path) == [5] and (path / "run.toml").exists()


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path), pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
        open_run(path)
    with open_run(path):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from clearhead.checkpoints.runs.directory import open_run
run = open_run(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"in use by process {holder.pid}"):
            open_run(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
    assert (path / "lock").exists()
    with open_run(path):
        assert f"process {os.getpid()} " in (path / "lock").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run@home"
    with open_run(path, configuration=CONFIGURATION):
        files.save_checkpoint(path, some_checkpoint(10, ema=False))
        files.save_checkpoint(path, some_checkpoint(20))
        files.save_checkpoint(path, some_checkpoint(30, ema=False))
    return path


def test_references_find_their_weights(run: Path) -> None:
    files.write_best(run, 20)
    save_averaged(run, {"w": torch.ones(3)}, {"steps": [10, 20]})
    folder = run / "checkpoints"
    expected = {
        "": folder / "step-20" / "ema.safetensors",
        "@best": folder / "step-20" / "ema.safetensors",
        "@last": folder / "step-30" / "weights.safetensors",
        "@step-10": folder / "step-10" / "weights.safetensors",
        "@averaged": folder / "averaged" / "weights.safetensors",
    }
    for suffix, weights in expected.items():
        assert weights_of(f"{run}{suffix}") == weights and weights.exists()
    assert is_run_directory(run) and not is_run_directory(folder)


def test_a_run_without_validation_means_its_last_checkpoint(run: Path) -> None:
    assert weights_of(str(run)).parent.name == "step-30"
    with pytest.raises(InputError, match="no step was validated"):
        weights_of(f"{run}@best")


def test_a_name_of_the_best_that_cannot_be_read_is_not_passed_over(run: Path) -> None:
    for text in ("nonsense", "step-" + "9" * 5000):
        (run / "best").write_text(text)
        with pytest.raises(InputError, match="best does not name a checkpoint"):
            weights_of(str(run))


def test_the_last_one_is_the_newest_sound_one(run: Path) -> None:
    alter(run / "checkpoints" / "step-30" / "weights.safetensors")
    with pytest.warns(UserWarning, match=r"weights\.safetensors was altered .* step-20 is used in its place"):
        assert weights_of(f"{run}@last").parent.name == "step-20"
    with pytest.raises(InputError, match=r"weights\.safetensors was altered"):
        weights_of(f"{run}@step-30")


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("@bset", r"did you mean 'best'.*use @best, @last, @averaged or @step-N"),
        ("@step-15", "steps it kept are: 10, 20, 30"),
        ("@step-x", "is not a checkpoint"),
        (f"@step-{'9' * 60}", "is not a checkpoint"),
        ("@averaged", "no averaged weights yet"),
        ("/elsewhere", "there is no such run directory: .* has no 'run' .*did you mean 'run@home'"),
    ],
)
def test_a_reference_to_nothing_says_what_there_is(run: Path, suffix: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        weights_of(f"{run}{suffix}")


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/averaged"])
def test_a_folder_that_is_a_link_out_of_the_run_is_refused(name: str, run: Path) -> None:
    save_averaged(run, {"w": torch.ones(3)}, {"steps": [10, 20]})
    (run / name).rename(run.parent / "elsewhere")
    (run / name).symlink_to(run.parent / "elsewhere")
    with pytest.raises(InputError, match=f"{name}: a link out of the folder is not followed"):
        weights_of(f"{run}@{'last' if name == 'checkpoints' else 'averaged'}")


def test_a_checkpoint_that_is_a_link_is_none(run: Path) -> None:
    (run / "checkpoints" / "step-30").rename(run.parent / "elsewhere")
    (run / "checkpoints" / "step-30").symlink_to(run.parent / "elsewhere")
    assert weights_of(f"{run}@last").parent.name == "step-20"
    with pytest.raises(InputError, match="steps it kept are: 10, 20"):
        weights_of(f"{run}@step-30")


def test_a_reference_is_split_at_its_last_sign(run: Path) -> None:
    assert ModelReference.parse(str(run)) == ModelReference(run)
    assert ModelReference.parse(f"{run}@last") == ModelReference(run, "last")
    assert ModelReference.parse("runs/plain") == ModelReference(Path("runs/plain"))
    assert ModelReference.parse("@last") == ModelReference(Path("@last")), "a label alone names no run"


@pytest.mark.parametrize("name", ["spec.json", "task.json", "tokenizer.json", "origin/config.json"])
def test_what_the_weights_mean_is_sealed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, configuration=CONFIGURATION) as locked:
        (path / "origin").mkdir()
        for file in ("spec.json", "task.json", "tokenizer.json", "origin/config.json"):
            locked.write_text(file, '{"epsilon": 1e-5}')
        locked.seal()
        files.save_checkpoint(path, some_checkpoint(5))
    path = path.rename(tmp_path / "moved")
    refuse_altered(path)
    (path / name).write_text('{"epsilon": 1e-1}')
    with pytest.raises(InputError, match=rf"{name} was altered .* delete .*manifest\.json"):
        refuse_altered(path)
    with pytest.raises(InputError, match=rf"{name} was altered"):
        open_run(path, configuration=CONFIGURATION, resume=True)


def test_a_file_that_was_put_into_a_sealed_folder_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", configuration=CONFIGURATION) as locked:
        locked.write_text("spec.json", "{}")
        locked.seal()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refuse_altered(tmp_path / "run")
    (tmp_path / "run" / "source.tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"does not list source\.tokenizer\.json"):
        refuse_altered(tmp_path / "run")


def test_reading_while_checkpoints_rotate_never_fails(tmp_path: Path) -> None:
    """Whatever is deleted while it is read is read again, and a fault that stays is raised at once."""
    steps, done = iter(range(1, 400)), threading.Event()
    files.save_checkpoint(tmp_path, some_checkpoint(0))

    def rotate() -> None:
        for step in steps:
            files.save_checkpoint(tmp_path, some_checkpoint(step, ema=False))
            files.prune_checkpoints(tmp_path, newest=step, keep=1, best=None)
            if done.is_set():
                return

    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(rotate)
        for _ in range(60):
            assert retry_while_checkpoints_change(tmp_path, lambda: load_tensors(weights_of(f"{tmp_path}@last")))
        done.set()
    written.result()
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise InputError("still so")

    with pytest.raises(InputError, match="still so"):
        retry_while_checkpoints_change(tmp_path, fails)
    assert len(tries) == 1
