"""Denoising runs learn both kinds of noise; a tokenizer without the needed tokens is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.data.objectives.spans import num_sentinels
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.text_run import WORDS, parts_from, run_file

SPANS = 'kind = "denoise"\nnoise_share = 0.3\nmean_span = 2.0'
INFILL = 'kind = "denoise"\nnoise = "infill"'


@pytest.mark.parametrize(("task", "least"), [(SPANS, 35), (INFILL, 30)])
def test_it_learns_what_is_missing(tmp_path: Path, task: str, least: int) -> None:
    path = run_file(tmp_path, task, "encoder-decoder")
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["valid_score"] > least
    model = ch.load(tmp_path / "run", device="cpu")
    assert (model.task.kind, model.task.max_length) == ("denoise", 13)
    assert (model.tokenizer.mask_id is None) == (task == SPANS)
    needed = num_sentinels(11, share=0.3, mean_span=2.0)
    assert len(model.tokenizer.sentinel_ids) == (needed if task == SPANS else 0)


@pytest.mark.parametrize("task", [SPANS, INFILL])
def test_validation_is_the_same_every_time(tmp_path: Path, task: str) -> None:
    parts = parts_from(run_file(tmp_path, task, "encoder-decoder"))
    module = build(parts.spec).eval()
    with torch.no_grad():
        assert parts.validate(module) == parts.validate(module)
    assert {side.name for side in parts.sides} == {"source", "target"}


def test_too_few_sentinels_are_refused_before_training(tmp_path: Path) -> None:
    few = train_tokenizer("word", WORDS, vocab_size=71, sentinels=1)
    path = run_file(tmp_path, SPANS, "encoder-decoder")
    with pytest.raises(InputError, match="max_length 13 can have 2 spans, but the tokenizer has 1 sentinels"):
        parts_from(path, few)
