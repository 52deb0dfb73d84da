"""Equal budgets: as many tokens by the steps, as many parameters by the width, and the same for all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clearhead.apps.sweeps.api import plan_runs
from clearhead.apps.sweeps.budgets import PlannedRun, budget_of, prepare_run
from clearhead.apps.sweeps.variations import Equal, Variation
from clearhead.base.printing import num_parameters
from clearhead.core import build
from clearhead.training.runfile.sections import RunFile
from tests.apps.cli.tiny_run import write_run_file


def budgets(
    file: Path, grid: Mapping[str, Sequence[Any]], equal: Equal, *words: str
) -> list[tuple[PlannedRun, RunFile]]:
    """Return the runs of a sweep, each with its run file at the equal budget."""
    variation = Variation(grid)
    runs = plan_runs(file.read_text("utf-8"), str(file), words, variation)
    changes = budget_of(variation.keys, runs, equal)
    return [(run, run.reread(texts)) for run, texts in zip(runs, changes, strict=True)]


def test_as_many_tokens_for_batches_of_any_size(tmp_path: Path) -> None:
    grid = {"train.batch_tokens": [211, 53], "train.seed": [1, 2]}
    runs = budgets(
        write_run_file(tmp_path), grid, "tokens", "train.steps=60", "train.warmup=6", "train.validate_every=30"
    )
    (_, large), _, (_, small), (_, other_seed) = runs
    tokens = [prepare_run(each).mean_tokens * (each.train.steps or 0) for each in (large, small)]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.02)
    assert small.train.steps == other_seed.train.steps == 180, "all seeds have the same, for they are one row"
    assert (small.train.warmup, small.train.validate_every) == (18, 90), "they keep their share of the run"


def test_passes_over_one_text_have_as_many_tokens(tmp_path: Path) -> None:
    runs = budgets(write_run_file(tmp_path), {"train.batch_tokens": [211, 53]}, "tokens", "train.epochs=7")
    assert all(run.run_file == run_file for run, run_file in runs)


def test_batches_alike_need_no_change(tmp_path: Path) -> None:
    runs = budgets(write_run_file(tmp_path), {"model.norm_place": ["pre", "post"]}, "tokens")
    assert all(run.run_file == run_file for run, run_file in runs)


@pytest.mark.parametrize(
    "grid", [{"model.layers": [2, 1, 5]}, {"model.family": ["encoder-decoder"], "model.heads": [2, 1]}]
)
def test_as_many_parameters_by_the_width(tmp_path: Path, grid: dict[str, list[Any]]) -> None:
    runs = budgets(write_run_file(tmp_path), grid, "parameters", "model.width=48")
    counts = [num_parameters(build(prepare_run(run_file).spec, device="meta")) for _, run_file in runs]
    assert runs[0][1].model.width == 48
    assert counts == pytest.approx([counts[0]] * len(counts), rel=0.06)
    for (run, run_file), count in zip(runs, counts, strict=True):
        # No other width is nearer.
        width, heads = run_file.model.width or 0, run_file.model.heads or 1
        for other in (width - 2 * heads, width + 2 * heads):
            there = num_parameters(build(prepare_run(run.reread([f"model.width={other}"])).spec, device="meta"))
            assert abs(there - counts[0]) >= abs(count - counts[0])
