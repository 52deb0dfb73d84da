"""Runs that start from published checkpoints: they learn, they are whole, and they go back where they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.train.assemble import train_run
from clearhead.train.runfile import load_run_file
from tests import published_models as checkpoints
from tests.train.tasks import fine_tuning as made

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

Make = Callable[[Path], Path]
# What makes the checkpoint, the task, its data, the class that is written, and what is new.
CASES: dict[str, tuple[Make, str, str, str, str]] = {
    "labels": (made.encoder, 'kind = "classify"', "classify", "BertForSequenceClassification", "head.layers.3"),
    "labels of a decoder": (
        checkpoints.language_model, 'kind = "classify"', "classify", "GPT2ForSequenceClassification", "head.layers.1",
    ),
    "tags": (made.roberta, 'kind = "tag"', "tag", "RobertaForTokenClassification", "head.layers.0"),
    "blanks": (made.encoder, 'kind = "fill"', "text", "BertForMaskedLM", ""),
    "text": (checkpoints.language_model, 'kind = "generate"', "text", "GPT2LMHeadModel", ""),
    "translation": (checkpoints.translator, 'kind = "translate"', "pairs", "MarianMTModel", ""),
    "translation that starts with padding": (made.t5, 'kind = "translate"', "pairs", "T5ForConditionalGeneration", ""),
    "spans": (made.t5, 'kind = "denoise"\nnoise = "spans"', "text", "T5ForConditionalGeneration", ""),
}  # fmt: skip


def train(path: Path, *overrides: str, resume: bool = False) -> list[str]:
    told = made.Told()
    train_run(load_run_file(path, overrides), resume=resume, progress=told)
    return told.said


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("loss") is not None]


def outputs(model: Any, module: ch.Transformer) -> tuple[torch.Tensor, torch.Tensor]:
    """What the other library and ours make of the same ids."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (3, 7), generator=draw)
    with torch.no_grad():
        if module.encoder is None or module.decoder is None:
            return model(ids, attention_mask=torch.ones_like(ids)).logits, module(ids).logits
        other = torch.randint(5, 100, (3, 5), generator=draw)
        return model(ids, decoder_input_ids=other).logits, module(ids, other).logits


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_is_whole_and_goes_back(case: str, tmp_path: Path) -> None:
    make, task, data, written, new = CASES[case]
    start = make(tmp_path / "start")
    path = made.write_run(tmp_path, start, task, data, steps=20)
    said = next(line for line in train(path, "train.validate_every=5") if "tensors taken" in line)
    assert " 0 new (none)" in said if not new else f"({new}.weight" in said or f", {new}.weight" in said
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    shutil.rmtree(start)
    run = ch.load(tmp_path / "run@last", device="cpu", precision="fp32")
    run.save(tmp_path / "back", format="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [written]
    other, told = getattr(transformers, written).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    theirs, ours = outputs(other.eval(), run.module)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    again = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    pairs = zip(run.module.state_dict().values(), again.module.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert again.tokenizers.fingerprint == run.tokenizers.fingerprint
    # The run goes on without what it began from.
    train(path, "train.steps=25", "train.validate_every=5", resume=True)
    assert len(losses(tmp_path / "run")) == len(found) + 1
