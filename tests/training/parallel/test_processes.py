"""Training on several processes: equal losses, each token once, a common end, and exact resumption."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.metrics import read_metrics
from tests.checkpoints.runs.test_checkpoint import same
from tests.training.parallel.groups import (
    PAIRS,
    TEXT,
    Groups,
    train_alone,
    watch_validations,
    write_data,
    write_run_file,
)
from tests.training.small import Recorder
from tests.training.test_snapshots import snapshots

pytestmark = pytest.mark.slow
# Each is compared with one process.
FAMILIES = {
    "generate": 'accumulate = 3\noptimizer = "muon"\nema = 0.9',
    "translate": "average = 2\nbleu_sentences = 7",
    "fill": 'early_stop = { metric = "loss", patience = 1 }',
    "lora": "accumulate = 2",
    "stream": "accumulate = 2",
    "own": "accumulate = 2",
}
OWN_PART = f"""
parts = "{Path(__file__).parents[2] / "core/extensions/own.py"}"
mixer = {{ kind = "last_tokens", count = 2 }}"""
GROUPS = [
    ("generate", "ddp", 2), ("generate", "ddp", 4), ("translate", "ddp", 2), ("fill", "ddp", 2), ("lora", "ddp", 2),
    ("stream", "ddp", 2),
    ("generate", "fsdp", 2), ("translate", "fsdp", 2), ("lora", "fsdp", 2), ("own", "ddp", 2), ("own", "fsdp", 2),
]  # fmt: skip
RESUMED = [("ddp", 4), ("fsdp", 2)]
LATE = [("translate", "ddp"), ("translate", "fsdp"), ("generate", "fsdp")]  # the last one by Muon
OWN_DISKS = ["translate", "lora"]
DROPOUT = ["model.dropout=0.2", "train.ema=0.9"]
WATCHED = ["train.steps=12", "train.validate_every=12"]  # after which sentences are translated to several words


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Return a context manager in which a folder is the current directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Recorder]]:
    """Return the folder of the run files, and their trainings by one process."""
    folder = tmp_path_factory.mktemp("groups")
    write_data(folder)
    write_data_of_another(folder / "elsewhere")
    write_own_disk(folder / "second")
    recorders = {}
    with inside(folder):
        for name, more in FAMILIES.items():
            task, family, data = {
                "generate": ('kind = "generate"', "decoder", TEXT),
                "translate": ('kind = "translate"', "encoder-decoder", PAIRS),
                "fill": ('kind = "fill"', "encoder", TEXT),
                "stream": ('kind = "generate"', "decoder", TEXT),
                "own": ('kind = "generate"', "decoder", TEXT),
                "lora": (f'kind = "generate"\ninit = "{folder}/generate/run"', "", TEXT),
            }[name]
            more += "\n[lora]\nrank = 3" if name == "lora" else ""
            file = write_run_file(folder, name, task, family, data, more, rate=0.2 if name == "fill" else 1e-2)
            if name == "stream":
                keys = "max_length = 13\nstream = true\nshuffle_buffer = 501"
                file.write_text(file.read_text().replace("max_length = 13", keys))
            if name == "own":
                file.write_text(file.read_text().replace("dropout = 0.0", f"dropout = 0.0{OWN_PART}"))
            recorders[name] = train_alone(file)
    return folder, recorders


def write_data_of_another(folder: Path) -> None:
    """Write files with the same names and other lines to another folder."""
    folder.mkdir()
    write_data(folder, seed=4)


def write_own_disk(folder: Path) -> None:
    """Write the same data for a second machine, which has folders with the names of runs that are not the runs."""
    folder.mkdir()
    write_data(folder)
    for family in OWN_DISKS:
        stale = folder / f"apart-{family}" / "checkpoints" / "step-2"
        stale.mkdir(parents=True)
        (stale / files.WEIGHTS).write_text("not the weights of the first machine")


@pytest.fixture(scope="session")
def groups(alone: tuple[Path, dict[str, Recorder]]) -> Groups:
    """Run all trainings of this file with several processes."""
    folder = alone[0]
    boxes = [str(folder), str(folder / "second")]

    def training(name: str, family: str, size: int, *changes: str, **more: Any) -> dict[str, Any]:
        run = f"train.run={folder}/{more.pop('run', name)}"
        return {"name": name, "file": f"{folder}/{family}.toml", "size": size, "changes": [run, *changes], **more}

    trainings = [
        training(f"{family}-{engine}-{size}", family, size, f"train.parallel={engine}")
        for family, engine, size in GROUPS
    ]
    for engine, size in RESUMED:
        changes = [*DROPOUT, f"train.parallel={engine}"]
        trainings += [
            training(f"whole-{engine}", "generate", size, *changes),
            training(f"first-{engine}", "generate", size, *changes, "train.steps=2", run=f"parts-{engine}"),
            training(f"rest-{engine}", "generate", size, *changes, run=f"parts-{engine}", resume=True),
        ]
    trainings += [
        training("four", "translate", 4, "train.steps=2", "train.parallel=fsdp", run="other"),
        training("two", "translate", 2, "train.parallel=ddp", run="other", resume=True),
        training("changed", "generate", 2, changes_by_rank={"1": ["train.seed=5"]}),
        training("unseen", "generate", 2, "train.run=apart", "train.parallel=fsdp", folders=boxes),
        training("lost-shard", "generate", 2, "train.run=astray", "train.parallel=fsdp", folders=boxes, is_blind=True),
        training(
            "copied",
            "generate",
            2,
            *DROPOUT,
            "train.run=parts-fsdp",
            "train.parallel=fsdp",
            folders=boxes,
            is_blind=True,
            resume=True,
        ),
        training("turned", "generate", 2, "train.run=parts-ddp", folders=boxes[::-1], resume=True),
        training("other-data", "generate", 2, folders=[str(folder), str(folder / "elsewhere")]),
        *(
            training(f"late-{family}-{engine}", family, 2, f"train.parallel={engine}", "train.ema=0.9", reads_late=True)
            for family, engine in LATE
        ),
        training("small", "generate", 4, "train.batch_tokens=39"),
        training("lonely", "generate", 2, absent=[1], arrival=1.0),
        training("watched", "translate", 2, *WATCHED, "train.parallel=fsdp", is_watched=True),
    ]
    for family in OWN_DISKS:
        changes = ["train.parallel=ddp", f"train.run=apart-{family}"]
        trainings += [
            training(f"begun-{family}", family, 2, *changes, "train.steps=2", folders=boxes),
            training(f"ended-{family}", family, 2, *changes, folders=boxes, resume=True),
        ]
    groups = Groups(folder)
    groups.run(trainings)
    return groups


@pytest.mark.parametrize(("family", "engine", "size"), GROUPS)
def test_the_losses_are_those_of_one_process(
    alone: tuple[Path, dict[str, Recorder]], groups: Groups, family: str, engine: str, size: int
) -> None:
    expected, result = alone[1][family], groups.result(f"{family}-{engine}-{size}")
    assert result["losses"] == pytest.approx([step.loss for step in expected.steps], rel=2e-5)
    assert result["tokens"] == [step.tokens for step in expected.steps]
    for (step, loss, score), report in zip(result["validations"], expected.validations, strict=True):
        assert (step, loss, score) == (
            report.step,
            pytest.approx(report.loss, rel=2e-5),
            pytest.approx(report.score, abs=1e-3),
        )


@pytest.mark.parametrize(("family", "engine", "size"), GROUPS)
def test_every_process_ends_with_the_same_result_and_one_of_them_writes(
    alone: tuple[Path, dict[str, Recorder]], groups: Groups, family: str, engine: str, size: int
) -> None:
    results = [groups.result(f"{family}-{engine}-{size}", rank) for rank in range(size)]
    assert all(result["result"] == results[0]["result"] for result in results)
    assert not any(result["losses"] or result["messages"] for result in results[1:])
    run = groups.folder / f"{family}-{engine}-{size}"
    expected = [row.step for row in read_metrics(groups.folder / family / "run" / "metrics.jsonl")]
    assert [row.step for row in read_metrics(run / "metrics.jsonl")] == expected
    assert not (run / "lock").exists() and not list(run.rglob(".*"))


def test_captures_of_a_shared_model_see_what_they_see_of_a_whole_one(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture the training tree around a validation by BLEU and inside; the plain tree refuses to run."""
    seen = watch_validations(monkeypatch)
    with inside(groups.folder):
        (expected,) = train_alone(Path("translate.toml"), "train.run=watched-alone", *WATCHED).validations
    assert expected.score and not any(seen["plain"])
    for rank in range(2):
        records = groups.result("watched", rank)["seen"]
        for (address, values), (other, others) in zip(records["activations"], seen["activations"], strict=True):
            assert address == other and len(values) == len(others) > 1
            for value, like in zip(values, others, strict=True):
                assert value == pytest.approx(like, rel=1e-3), address
        assert len(records["plain"]) == 2 and set(records["plain"]) == {
            "this module cannot run: its weights are sharded over processes; run the training tree instead"
        }
    ((_, loss, score),) = groups.result("watched")["validations"]
    assert (loss, score) == (pytest.approx(expected.loss, rel=1e-4), expected.score)


@pytest.mark.parametrize("family", ["generate", "translate", "lora"])
def test_gradients_are_added_up_once_for_each_update(groups: Groups, family: str) -> None:
    """The number of accumulated batches does not matter: 3, 1 and 2."""
    result = groups.result(f"{family}-ddp-2")
    counts = result["communication"]
    passes = len(result["losses"]) + 3  # two of the forecast, and one that settles the order
    assert counts["allreduce_.default"] == passes, counts
    if family != "translate":
        counts = groups.result(f"{family}-fsdp-2")["communication"]
        assert counts["_reduce_scatter_base_.default"] == passes * (3 if family == "generate" else 2), counts


@pytest.mark.parametrize(("family", "engine"), LATE)
def test_losses_that_are_read_late_are_those_of_one_process(
    alone: tuple[Path, dict[str, Recorder]], groups: Groups, family: str, engine: str
) -> None:
    expected, result = alone[1][family], groups.result(f"late-{family}-{engine}")
    assert result["losses"] == pytest.approx([step.loss for step in expected.steps], rel=2e-5)
    assert result["tokens"] == [step.tokens for step in expected.steps]


@pytest.mark.parametrize(("engine", "size"), RESUMED)
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(groups: Groups, engine: str, size: int) -> None:
    for rank in range(size):
        for name in ("whole", "first", "rest"):
            groups.result(f"{name}-{engine}", rank)
    runs = [groups.folder / f"{name}-{engine}" for name in ("whole", "parts")]
    ends = [files.load_checkpoint(files.checkpoint_folder(run, 4)) for run in runs]
    for file_name in ("weights", "ema", "optimizer"):
        assert same(dict(getattr(ends[0], file_name)), dict(getattr(ends[1], file_name))), file_name
    for key in ("random", "random_of_others", "batches", "schedule"):
        assert ends[0].state[key] == ends[1].state[key], key
    states = [state["torch"] for state in (ends[0].state["random"], *ends[0].state["random_of_others"])]
    assert len(set(states)) == size, "each process draws its own dropout"


@pytest.mark.parametrize("family", OWN_DISKS)
def test_machines_with_their_own_disks_resume_to_the_bits_of_a_shared_folder(groups: Groups, family: str) -> None:
    """Only the first machine reads and writes the run; a folder with the same name on the other is not touched."""
    for rank in range(2):
        for name in ("begun", "ended"):
            groups.result(f"{name}-{family}", rank)
    runs = [groups.folder / name for name in (f"{family}-ddp-2", f"apart-{family}")]
    ends = [files.load_checkpoint(files.checkpoint_folder(run, 4)) for run in runs]
    assert same(dict(ends[0].weights), dict(ends[1].weights)) and same(ends[0].optimizer, ends[1].optimizer)
    if family == "translate":
        averages = [(run / "checkpoints/averaged/weights.safetensors").read_bytes() for run in runs]
        assert averages[0] == averages[1]
    (weights,) = [path for path in (groups.folder / "second" / f"apart-{family}").rglob("*") if path.is_file()]
    assert weights.read_text() == "not the weights of the first machine"
    assert not list(runs[1].rglob(".*")), "no file that was to be seen is left"


def test_a_run_goes_on_with_another_number_of_processes(
    alone: tuple[Path, dict[str, Recorder]], groups: Groups
) -> None:
    result = groups.result("two")
    assert any("processes 4 -> 2" in message for message in result["messages"]), result["messages"]
    expected = [step.loss for step in alone[1]["translate"].steps]
    assert result["losses"] == pytest.approx(expected[2:], rel=2e-5)


@pytest.mark.parametrize(
    ("name", "size", "kind", "words"),
    [
        ("changed", 2, "InputError", ("another run file", "train.seed is 5 in process 1", "1 in process 0")),
        ("unseen", 2, "InputError", ("process 1", "does not see the run directory apart", "train.parallel=ddp")),
        ("lost-shard", 2, "RunFailure", ("could not be saved", "the 1 files of 2 processes hold", "machines share")),
        ("copied", 2, "InputError", ("process 1 reads another checkpoint in parts-fsdp", "all machines share")),
        ("turned", 2, "InputError", ("process 0 has no checkpoint in parts-ddp, but process 1 has", "--node-rank 0")),
        ("other-data", 2, "InputError", ("process 1", "another training data", "same files")),
        ("small", 4, "InputError", ("train.batch_tokens is 39", "3 rows of 13 tokens", "at least 52", "at most 3")),
    ],
)
def test_what_does_not_fit_is_said_by_one_process(
    groups: Groups, name: str, size: int, kind: str, words: tuple[str, ...]
) -> None:
    errors = [groups.read_record(name, rank)["error"] for rank in range(size)]
    reported = [error for error in errors if error[0] != "FailedElsewhere"]
    assert len(reported) == 1 and reported[0][0] == kind, errors
    assert all(word in reported[0][1] for word in words), reported
    assert {groups.read_record(name, rank)["code"] for rank in range(size)} == {None, 2 if kind == "InputError" else 1}
    assert not (groups.folder / name).exists() and not list(groups.folder.rglob("apart"))


def test_a_process_that_never_arrives_is_not_waited_for_without_end(groups: Groups) -> None:
    kind, sentence = groups.read_record("lonely")["error"]
    assert kind == "RunFailure" and "1 s" in sentence, sentence


def test_the_weights_of_a_run_are_loaded_like_any_other(groups: Groups) -> None:
    from clearhead import load

    model = load(f"{groups.folder}/generate-fsdp-2", device="cpu")
    expected = load(f"{groups.folder}/generate/run", device="cpu")
    ids = torch.arange(4, 17)[None]
    logits, others = (loaded.module(ids).logits for loaded in (model, expected))
    torch.testing.assert_close(logits, others, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["generate", "lora"])
def test_the_files_of_a_shared_model_are_those_of_a_whole_one(groups: Groups, family: str) -> None:
    folders = [files.checkpoint_folder(groups.folder / f"{family}-{engine}-2", 4) for engine in ("ddp", "fsdp")]
    for name in (files.WEIGHTS, files.OPTIMIZER):
        first, second = (files.load_tensors(folder / name) for folder in folders)
        assert {key: (value.shape, value.dtype) for key, value in first.items()} == {
            key: (value.shape, value.dtype) for key, value in second.items()
        }
        assert all(torch.equal(value, second[key]) for key, value in first.items() if not value.ndim)
    snapshot_files = [snapshots(folder.parent.parent) for folder in folders]
    assert [list(by_step) for by_step in snapshot_files] == [[0, 1, 2], [0, 1, 2]], "step 1 has no checkpoint"
