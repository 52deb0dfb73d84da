"""Rows of a comparison: their runs, their names and their numbers."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.apps.compare.runs import count_parameters, read_run
from clearhead.apps.compare.table import ComparisonRow, Spread, differing_values, read_rows
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.spec.cost import training_flops
from clearhead.spec.presets.hyperparameters import Hyperparameters
from clearhead.spec.token_counts import TokenCounts
from tests.apps.compare.run_maker import WORK, RunMaker


def test_seeds_of_one_configuration_are_one_row(tmp_path: Path) -> None:
    run_maker = RunMaker()
    bests = (2.0, 1.25, 3.5)
    paths = [
        replace(run_maker, validations=[(20, 4.0, None), (40, best, None)]).write(tmp_path / name, seed=seed)
        for best, name, seed in zip(bests, ("x", "x-2", "x-3"), (1, 2, 3), strict=True)
    ]
    other = RunMaker(overrides=["model.dropout=0.25"]).write(tmp_path / "y")
    rows = read_rows([paths[0], other, *paths[1:]])
    assert [(row.name, row.seeds) for row in rows] == [("x", [1, 2, 3]), ("y", [1])]
    best = rows[0].best("loss")
    assert best is not None and best.count == 3
    assert best.mean == pytest.approx(statistics.mean(bests))
    assert best.deviation == pytest.approx(statistics.stdev(bests))
    assert rows[1].best("loss") == Spread(2.0, None, 1)
    assert rows[0].best("score") is None


def test_any_other_key_makes_another_row(tmp_path: Path) -> None:
    first = RunMaker().write(tmp_path / "a")
    others = [
        RunMaker(overrides=[change]).write(tmp_path / f"b{number}")
        for number, change in enumerate(["train.threads=1", "train.steps=41", "model.dropout=0.3"])
    ]
    rows = read_rows([first, *others])
    assert len(rows) == 4
    differing = differing_values(rows)
    assert differing["train.steps"] == [40, 40, 41, 40]
    assert differing["train.threads"] == [None, 1, None, None]
    assert next(iter(differing)) == "model.dropout", "keys stand in the order of a run file"
    assert not {"train.run", "train.seed"} & set(differing)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x", "x-2", "x-13"], "x"),
        (["x-2", "x-3", "x"], "x"),
        (["dates-1", "dates-12"], "dates"),
        (["dates-10", "dates-11"], "dates"),
        (["a2", "a2-2"], "a2"),
        (["one-seed1", "one-seed2"], "one"),
        (["p", "q"], "p"),
        (["v2.1-"], "v2.1-"),
    ],
)
def test_rows_of_seeds_are_called_by_what_the_names_share(tmp_path: Path, names: list[str], expected: str) -> None:
    paths = [RunMaker().write(tmp_path / name, seed=seed) for seed, name in enumerate(names)]
    assert [row.name for row in read_rows(paths)] == [expected]


def test_rows_with_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    paths = [
        RunMaker(overrides=[f"model.dropout={dropout}"]).write(tmp_path / folder / "run")
        for folder, dropout in (("wide", 0.1), ("deep", 0.2))
    ]
    assert [row.name for row in read_rows(paths)] == ["wide/run", "deep/run"]


def test_numbers_of_a_run(tmp_path: Path) -> None:
    run = read_run(RunMaker(step_tokens=130, step_seconds=0.25).write(tmp_path / "a"))
    row = ComparisonRow("a", (run,))
    assert (row.tokens.mean, row.steps.mean, row.seconds.mean) == (5200, 40, 10.0)
    assert run.tokens_per_second == pytest.approx(520)
    assert (run.best("loss"), run.best("score")) == (2.0, 7.5), "each by itself"
    assert run.score_name == "BLEU" and run.spec.family == "encoder-decoder"
    work = TokenCounts(*(value * 5.2 for value in vars(WORK).values()))
    assert row.flops is not None and row.flops.mean == pytest.approx(training_flops(run.spec, work))


def test_the_speed_leaves_out_the_time_of_validations(tmp_path: Path) -> None:
    folder = RunMaker(validations=[(10, 3.0, None), (40, 2.0, None)], step_seconds=0.5).write(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # 10 steps at 200 tokens a second, then 30 at 50, whatever the clock on the wall says
    lines[1] = lines[1].replace('"tokens_per_second": 200.0', '"tokens_per_second": 50.0')
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_run(folder).tokens_per_second == pytest.approx(4000 / (1000 / 200 + 3000 / 50))


@pytest.mark.parametrize(
    "hparams",
    [
        Hyperparameters(layers=1, width=14, heads=2, feedforward=22),
        Hyperparameters(
            family="encoder", layers=1, width=14, heads=2, positions="learned", max_positions=19, segments=3
        ),
        Hyperparameters(family="decoder", layers=1, width=14, heads=2, tie="none", embedding_norm=True),
        Hyperparameters(layers=1, width=14, heads=2, tie="decoder", positions="buckets"),
    ],
)
def test_parameters_with_and_without_embeddings(hparams: Hyperparameters) -> None:
    spec = RunMaker(hparams=hparams).spec()
    module = build(spec)
    tables = 0
    for stack in (spec.encoder, spec.decoder):
        if stack is not None:
            position = stack.embedding.position
            rows = 37 if stack.embedding.table.kind == "table" else 0
            rows += stack.embedding.num_segments + (19 if getattr(position, "kind", "") == "learned" else 0)
            tables += rows * stack.width
    counts = count_parameters(spec)
    assert counts.embeddings == tables > 0
    assert counts.total == sum(parameter.numel() for parameter in module.parameters())


# --- what cannot be compared ----------------------------------------------------------------------------------


def refusal_message(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_rows(paths)
    return str(caught.value)


def test_what_is_no_run(tmp_path: Path) -> None:
    assert "there is no such run directory" in refusal_message(tmp_path / "none")
    assert "is not a run directory: it has no run.toml and no spec.json" in refusal_message(tmp_path)
    run = RunMaker().write(tmp_path / "a")
    assert f"a comparison needs whole runs: name {run}" in refusal_message(Path(f"{run}@best"))
    assert f"{run}/checkpoints is not a run directory" in refusal_message(run / "checkpoints")


def test_all_faulty_runs_come_in_one_report(tmp_path: Path) -> None:
    message = refusal_message(tmp_path / "none", RunMaker().write(tmp_path / "a"), tmp_path)
    assert "2 faults" in message and str(tmp_path / "none") in message


def test_no_metrics_yet(tmp_path: Path) -> None:
    run = RunMaker().write(tmp_path / "a")
    (run / "metrics.jsonl").write_text('{"step": 10, "tok', encoding="utf-8")
    assert f"{run} has no metrics yet" in refusal_message(run)
    (run / "metrics.jsonl").unlink()
    assert f"{run} has no metrics yet" in refusal_message(run)


def test_one_run_twice(tmp_path: Path) -> None:
    run = RunMaker().write(tmp_path / "a")
    assert "is named twice" in refusal_message(run, tmp_path / "." / "a")


def test_mixed_tasks(tmp_path: Path) -> None:
    first = RunMaker().write(tmp_path / "a")
    other = RunMaker(replaced={'kind = "translate"': 'kind = "denoise"'}).write(tmp_path / "b")
    message = refusal_message(first, other)
    assert f"{other} has the task 'denoise', but {first} has the task 'translate'" in message


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("run.toml", "[task\n", "is not a valid run file"),
        ("run.toml", "task = 3\n", "has no [task] and [train]"),
        ("spec.json", "{", "spec.json: the spec is not JSON"),
        ("spec.json", '{"colour": 1}', "colour"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, text: str, expected: str) -> None:
    run = RunMaker().write(tmp_path / "a")
    (run / file).write_text(text, encoding="utf-8")
    message = refusal_message(run)
    assert expected in message and str(run / file) in message
