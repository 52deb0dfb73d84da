"""Runs that start from published checkpoints learn, are self-contained, and convert back to the checkpoint's format."""

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
from clearhead.checkpoints.hf.saving import module_to_hf_tensors
from clearhead.data.batches.inputs import shift_right
from clearhead.training.assemble import train_run
from clearhead.training.init_from import find_initial_model, take_weights
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from clearhead.training.task_setup import TaskSetup, prepare_task
from tests import hf_models as checkpoints
from tests.parity.architectures.harness import outputs_of
from tests.tasks import fine_tuning

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")]

Make = Callable[[Path], Path]
# What makes the checkpoint, the task, its data, the class that is written, and what is new.
CASES: dict[str, tuple[Make, str, str, str, str]] = {
    "labels": (fine_tuning.encoder, 'kind = "classify"', "classify", "BertForSequenceClassification", "head.layers.3"),
    "labels of a decoder": (
        checkpoints.language_model, 'kind = "classify"', "classify", "GPT2ForSequenceClassification", "head.layers.1",
    ),
    "labels of two stacks": (
        lambda folder: fine_tuning.bart(folder, "BartForConditionalGeneration"), 'kind = "classify"', "classify",
        "BartForSequenceClassification", "head.layers.3",
    ),
    "tags": (fine_tuning.roberta, 'kind = "tag"', "tag", "RobertaForTokenClassification", "head.layers.0"),
    "answers": (fine_tuning.encoder, 'kind = "answer"', "answer", "BertForQuestionAnswering", "head.layers.0"),
    "answers of a classifier": (
        lambda folder: fine_tuning.encoder(folder, "BertForSequenceClassification", num_labels=3), 'kind = "answer"',
        "answer",
        "BertForQuestionAnswering", "head.layers.0",
    ),
    "answers of two stacks": (
        lambda folder: fine_tuning.bart(folder, "BartForConditionalGeneration"), 'kind = "answer"', "answer",
        "BartForQuestionAnswering", "head.layers.0",
    ),
    "blanks": (fine_tuning.encoder, 'kind = "fill"', "text", "BertForMaskedLM", ""),
    "text": (checkpoints.language_model, 'kind = "generate"', "text", "GPT2LMHeadModel", ""),
    "translation": (checkpoints.translator, 'kind = "translate"', "pairs", "MarianMTModel", ""),
    "translation that starts with padding": (
        fine_tuning.t5, 'kind = "translate"', "pairs", "T5ForConditionalGeneration", "",
    ),
    "spans": (fine_tuning.t5, 'kind = "denoise"\nnoise = "spans"', "text", "T5ForConditionalGeneration", ""),
}  # fmt: skip


def train(path: Path, *overrides: str, resume: bool = False) -> list[str]:
    log = fine_tuning.MessageLog()
    train_run(load_run_file(path, overrides), resume=resume, progress=log)
    return log.messages


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("loss") is not None]


def outputs(model: Any, module: ch.Transformer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of transformers and of clearhead for the same ids."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (3, 7), generator=draw)
    with torch.no_grad():
        if module.encoder is None or module.decoder is None:
            return outputs_of(model(ids, attention_mask=torch.ones_like(ids))), module(ids).logits
        if isinstance(model, transformers.BartForQuestionAnswering) or (module.head and module.head.is_pooled):
            # Its decoder reads the text again, which must end.
            ids[:, -1] = 2
            shifted = shift_right(ids, torch.ones_like(ids, dtype=torch.bool), start=2)
            return outputs_of(model(ids)), module(ids, shifted).logits
        other = torch.randint(5, 100, (3, 5), generator=draw)
        return model(ids, decoder_input_ids=other).logits, module(ids, other).logits


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_is_whole_and_goes_back(case: str, tmp_path: Path) -> None:
    make, task, data, written, new = CASES[case]
    start = make(tmp_path / "start")
    path = fine_tuning.write_run(tmp_path, start, task, data, steps=20)
    report = next(line for line in train(path, "train.validate_every=5") if "tensors copied" in line)
    assert " 0 new (none)" in report if not new else f"({new}.weight" in report or f", {new}.weight" in report
    loss_values = losses(tmp_path / "run")
    assert loss_values[-1] < loss_values[0]
    shutil.rmtree(start)
    run = ch.load(tmp_path / "run@last", device="cpu", precision="fp32")
    run.save(tmp_path / "back", format="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [written]
    other, loading_info = getattr(transformers, written).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert (
        not loading_info["missing_keys"] and not loading_info["unexpected_keys"] and not loading_info["mismatched_keys"]
    )
    theirs, ours = outputs(other.eval(), run.module)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    again = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    pairs = zip(run.module.state_dict().values(), again.module.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert again.tokenizers.fingerprint == run.tokenizers.fingerprint
    # The run goes on without what it began from.
    train(path, "train.steps=25", "train.validate_every=5", resume=True)
    assert len(losses(tmp_path / "run")) == len(loss_values) + 1


def first_step(path: Path, folder: Path) -> tuple[Any, Any, torch.Tensor, dict[str, torch.Tensor]]:
    """The first batch of a run, the model as the other library has it, and its mean loss and gradients."""
    run_file = load_run_file(path)
    start = find_initial_model(run_file.task.init, None, None)
    assert start is not None and start.hf_checkpoint is not None
    tokenizers = start.tokenizers
    setup = TaskSetup(run_file, lambda train: tokenizers, start, TrainingProgress(), torch.device("cpu"))
    parts = prepare_task(setup)
    torch.manual_seed(5)
    module = ch.build(parts.spec).eval()
    take_weights(module, start, parts.record, TrainingProgress())
    loss, count = parts.loss(module, parts.largest)
    (loss / count).backward()
    model = ch.Model(module, parts.tokenizers, parts.record, start.hf_checkpoint.with_module(module, parts.record))
    model.save(folder, format="hf")
    family = model.hf_checkpoint.loaded
    gradients = {name: tensor.grad for name, tensor in module.state_dict(keep_vars=True).items()}
    named = module_to_hf_tensors(module, family.family, family.variant, family.prefix, gradients)
    other = getattr(transformers, family.config["architectures"][0]).from_pretrained(folder).eval()
    return parts.largest, other, (loss / count).detach(), named


def mean_loss(batch: Any, logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize(
    "case", ["labels", "tags", "answers", "text", "translation", "translation that starts with padding"]
)
def test_the_first_step_is_that_of_the_other_library(case: str, tmp_path: Path) -> None:
    make, task, data, _, _ = CASES[case]
    path = fine_tuning.write_run(tmp_path, make(tmp_path / "start"), task, data)
    if case == "text":
        # The other library does not part the documents of a row.
        path.write_text(path.read_text().replace("max_length = 20", "max_length = 20\npack = false"))
    batch, other, loss, gradients = first_step(path, tmp_path / "hf")
    mask = None if batch.mask is None else batch.mask.long()
    if case == "labels":
        expected = other(batch.ids, attention_mask=mask, labels=batch.labels).loss
    elif case == "answers":
        # The other library also offers the question and the padding as answers.
        other_outputs = other(batch.ids, attention_mask=mask, token_type_ids=batch.segments)
        places = (batch.labels == 1).int().argmax(1)
        logits = outputs_of(other_outputs).masked_fill(batch.labels == -100, -torch.inf)
        sides = (torch.nn.functional.cross_entropy(logits[..., side], places[:, side]) for side in (0, 1))
        expected = sum(sides) / 2
    elif batch.target_ids is None:
        expected = mean_loss(batch, other(batch.ids, attention_mask=mask).logits)
    else:
        shifted = other.prepare_decoder_input_ids_from_labels(batch.labels)
        assert torch.equal(shifted[batch.target_mask], batch.target_ids[batch.target_mask])
        read = {"decoder_input_ids": batch.target_ids, "decoder_attention_mask": batch.target_mask.long()}
        expected = mean_loss(batch, other(batch.ids, attention_mask=mask, **read).logits)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    expected.backward()
    # The other library never trains what its embedding has for padding, which is where some decoders start.
    silent = {
        f"{name}.weight": child.padding_idx
        for name, child in other.named_modules()
        if getattr(child, "padding_idx", None) is not None
    }
    compared = 0
    for name, parameter in other.named_parameters():
        if name in gradients and parameter.grad is not None:
            compared += 1
            theirs, ours = parameter.grad, gradients[name]
            rows = [row for row in range(len(theirs)) if row != silent.get(name)]
            assert float((ours - theirs)[rows].abs().max()) <= 1e-4 * float(theirs.abs().max()) + 1e-7, name
    assert compared >= len(gradients) - 2


def test_vectors_are_written_with_the_files_that_make_them(tmp_path: Path) -> None:
    """A checkpoint without a head learns vectors, and is written as its stacks with a pool beside them."""
    start = fine_tuning.encoder(tmp_path / "start", "BertModel")
    path = fine_tuning.write_run(tmp_path, start, 'kind = "embed"', "pairs", steps=20)
    train(path, "train.validate_every=5")
    loss_values = losses(tmp_path / "run")
    assert loss_values[-1] < loss_values[0]
    run = ch.load(tmp_path / "run@last", device="cpu", precision="fp32")
    run.save(tmp_path / "back", format="hf")
    texts = ["the cat sat", "a small dog", ""]
    other = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    read = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = other(**read).last_hidden_state * read["attention_mask"][:, :, None]
    pooled = torch.nn.functional.normalize(states.sum(1) / read["attention_mask"].sum(1, keepdim=True), dim=1)
    torch.testing.assert_close(torch.from_numpy(run.embed(texts)), pooled, rtol=0, atol=1e-5)
    again = ch.load(tmp_path / "back", device="cpu", precision="fp32")
    torch.testing.assert_close(torch.from_numpy(again.embed(texts)), pooled, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("max_length", "expected"), [(20, 61), (83, 83)])
def test_training_on_longer_texts_extends_the_declared_length(max_length: int, expected: int, tmp_path: Path) -> None:
    """Of the run, and of the checkpoint that it is saved as."""
    start = checkpoints.rotary_model(tmp_path / "start")
    train(fine_tuning.write_run(tmp_path, start, 'kind = "generate"', "text", steps=1, max_length=max_length))
    trained = ch.load(tmp_path / "run")
    assert trained.spec.position_limit == expected
    trained.save(tmp_path / "saved", format="hf")
    assert json.loads((tmp_path / "saved/config.json").read_text())["max_position_embeddings"] == expected
