"""A recipe fitted to data and machine: the model and the steps that a given time allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from clearhead.apps.recipes import fit
from clearhead.apps.recipes.run_file import DataPlan
from clearhead.apps.recipes.survey import survey
from clearhead.base.errors import InputError
from clearhead.base.progress import use_display
from clearhead.core import build
from clearhead.model.facade import Model
from clearhead.spec.presets.task_heads import label_head, token_head, vector_head
from clearhead.spec.tasks.base import Architecture, Recipe, Size
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.spec.tasks.registry import find_task, list_tasks
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.record import STARTUP_SECONDS
from clearhead.training.runfile.model_table import resolve_spec
from clearhead.training.runfile.read import parse_run_file
from clearhead.training.runfile.sections import ModelSection
from clearhead.training.task_setup import one_sided
from tests.apps.cli.tiny_run import PAIRS, write_pairs
from tests.parity.architectures.harness import outputs_of
from tests.recording_display import RecordingDisplay

SIZES = tuple(Size(1, 16 * width, 2, 32, 0.1, least_tokens=1_000 * width - 1_000) for width in (1, 2, 3))


def chosen_width(tokens_in_a_minute: list[int]) -> int:
    """Return the chosen width, given the tokens that each size reads in a minute; 0 means that it lacks memory."""

    def candidate(size: Size) -> Any:
        count = tokens_in_a_minute[SIZES.index(size)]
        if not count:
            raise InputError("too large") from torch.OutOfMemoryError("too large")
        step_seconds = 10 * 60.0 / count
        return Mock(spec=fit.Candidate, size=size, step_seconds=step_seconds, step_tokens=10.0)

    minutes = 1 + STARTUP_SECONDS / 60
    recipe = Recipe(None, "bpe", 100, 32, SIZES, find_task("tag").recipes[0].model, {}, 3)
    best = fit.choose_size(recipe, candidate, minutes)
    return best.size.width


@pytest.mark.parametrize(
    ("tokens", "width"),
    [
        ([100, 90, 80], 16),
        ([9_000, 1_100, 1_050], 32),
        ([9_000, 5_000, 2_100], 48),
        ([9_000, 0, 2_100], 16),
    ],
)
def test_the_largest_model_that_reads_enough(tokens: list[int], width: int) -> None:
    assert chosen_width(tokens) == width


def test_no_model_fits_into_memory() -> None:
    with pytest.raises(InputError, match="too large"):
        chosen_width([0, 0, 0])


@pytest.mark.parametrize("minutes", [1.0, 5.0, 61.0])
@pytest.mark.parametrize("validation", [0.1, 7.0])
def test_steps_and_validations_fill_the_time(minutes: float, validation: float) -> None:
    length = fit.RunLength.fit_minutes(minutes, step=0.3, validation=validation, most=10**9)
    assert 60 * minutes - 0.3 < length.seconds <= 60 * minutes
    assert 2 <= length.validations <= 10
    assert fit.RunLength.fit_minutes(minutes, step=0.3, validation=validation, most=17).steps == 17


@pytest.mark.parametrize(
    ("minutes", "most", "advised"), [(0.4, 1000, 5), (9.0, 1000, None), (0.4, 3, None), (0.4, 9, 1)]
)
def test_too_little_time_is_said_with_what_is_enough(minutes: float, most: int, advised: int | None) -> None:
    def length(minutes: float) -> fit.RunLength:
        return fit.RunLength.fit_minutes(minutes, step=2.4, validation=1.0, most=most)

    advice = fit.advise_more_minutes(length(minutes), most, step=2.4)
    if advised is None:
        assert advice == ""
        return
    assert advice.endswith(f"--minutes {advised}")
    assert length(float(advised)).steps >= min(most, fit.LEAST_STEPS) - 8, "validations may take a little more"


def test_a_recipe_is_measured_on_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, pairs in (("train", PAIRS[7:]), ("valid", PAIRS[:7])):
        write_pairs(tmp_path, name, pairs)
    tables = [{"source": f"{name}.source", "target": f"{name}.target"} for name in ("train", "valid")]
    plan = DataPlan("embed", tables[0], tables[1], "", "pairs", "runs/x", len(PAIRS), survey(PAIRS))
    recipe, state, display = find_task("embed").recipe(len(PAIRS)), torch.get_rng_state(), RecordingDisplay()
    with use_display(display):
        fitted_run = fit.fit_run_file(plan, 60.0)
    assert torch.equal(torch.get_rng_state(), state)
    written = parse_run_file(fitted_run.text, "run.toml")
    # A batch holds all pairs, and an hour is more than their data is worth.
    assert written.train.steps == fitted_run.steps == recipe.most_epochs and "more data would" in fitted_run.text
    assert written.train.planned_minutes is None, "the steps do not fill the time"
    assert written.model.width == recipe.sizes[0].width and any("a step" in line for line in display.messages)
    # Three words of one letter, whatever their tokens.
    assert "The longest text has" in fitted_run.text and written.data.max_length == 16


def saved_models() -> list[tuple[str, Architecture]]:
    pairs: list[tuple[str, Architecture]] = []
    for task in list_tasks():
        models = [row.model for row in task.recipes if row.model.saved_as]
        pairs += [(task.kind, model) for model in models if (task.kind, model) not in pairs]
    return pairs


@pytest.mark.parametrize(("task", "model"), saved_models())
def test_a_model_is_saved_as_the_run_file_says(task: str, model: Architecture, tmp_path: Path) -> None:
    """Check that transformers computes the same outputs."""
    options: dict[str, Any] = {"mask": task == "fill", "sentinels": 3 if task == "denoise" else 0}
    tokenizer = train_tokenizer("word", [source for source, _ in PAIRS], vocab_size=53, **options)
    families = {"generate": "decoder", "translate": "encoder-decoder", "denoise": "encoder-decoder"}
    family = families.get(task, "encoder")
    section = ModelSection(family=family, layers=1, width=16, heads=2, feedforward=22, dropout=0.1, **model.keys)  # type: ignore[arg-type]
    head = {
        "classify": label_head(16, 3, pool="mean", inner="gelu"),
        "tag": token_head(3),
        "answer": token_head(2),
        "embed": vector_head(pool="mean"),
    }.get(task)
    size = tokenizer.vocab_size
    spec = resolve_spec(section, kind=task, source_vocab=size, target_vocab=size, joint=True, head=head)
    record = TaskRecord(
        kind=task,  # type: ignore[arg-type]
        labels=("a", "b", "c") if task in ("classify", "tag") else (),
        label_kind="single_label" if task == "classify" else None,
        noise=Noise(kind="spans", share=0.15) if task == "denoise" else None,
    )
    torch.manual_seed(3)
    module = build(spec).eval()
    Model(module, one_sided(tokenizer), record).save(tmp_path / "out", format="hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == model.saved_as
    other = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out").eval()
    ids, target = torch.randint(6, size, (3, 7)), torch.randint(6, size, (3, 5))
    read, reference_inputs = (
        ((ids, target), {"decoder_input_ids": target}) if family == "encoder-decoder" else ((ids,), {})
    )
    with torch.no_grad():
        ours, theirs = module(*read), other(input_ids=ids, attention_mask=torch.ones_like(ids), **reference_inputs)
    our_output = ours.hidden if task == "embed" else ours.logits
    torch.testing.assert_close(our_output, outputs_of(theirs), rtol=0, atol=2e-5)
