"""A model that answers, from its run file to answers: what it learns, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.checkpoints.weights.files import load_tensors
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.tasks.answer.train import answer_loss
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.labelled_models import character_tokenizer, model
from tests.tasks.labelled_run import noise, write_run_file

TASK = 'kind = "answer"'
NAMES = {"who": ["xx", "yy"], "where": ["vv", "ww"]}


def question(draw: random.Random) -> dict[str, Any]:
    """Which title and name of the asked kind stand in the text? In one of four none does."""
    wanted, other = draw.sample(sorted(NAMES), 2)
    words = noise(draw, draw.randint(2, 25))
    words.insert(draw.randint(0, len(words)), draw.choice(NAMES[other]))
    if draw.random() < 0.25:
        return {"context": " ".join(words), "question": wanted, "answer": None, "start": None}
    position, title_and_name = draw.randint(0, len(words)), ["mr", draw.choice(NAMES[wanted])]
    start = sum(len(word) + 1 for word in words[:position])
    context = " ".join([*words[:position], *title_and_name, *words[position:]])
    return {"context": context, "question": wanted, "answer": " ".join(title_and_name), "start": start}


def write_questions(folder: Path, *, train: int = 240, count: int = 301) -> None:
    draw = random.Random(6)
    examples = [question(draw) for _ in range(count)]
    for split, chosen in (("train", examples[:train]), ("valid", examples[train:])):
        text = "".join(json.dumps(example) + "\n" for example in chosen)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def train_run_file(
    folder: Path, *overrides: str, family: str = "encoder", resume: bool = False, steps: int = 60
) -> Path:
    path = write_run_file(folder, TASK, family, ending="jsonl", labels="", steps=steps)
    train_run(load_run_file(path, overrides), resume=resume, progress=TrainingProgress())
    return folder / "run"


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_it_learns_to_answer_over_windows(tmp_path: Path, family: str) -> None:
    write_questions(tmp_path)
    run = train_run_file(tmp_path, family=family)
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["valid_score"] == 100
    model = ch.load(run, device="cpu")
    assert (model.task.max_length, model.task.answer_tokens, model.task.is_paired) == (17, 2, True)
    context = "aa bb cc dd ee ff gg hh ii jj kk " * 3 + "mr  yy aa bb vv"
    assert len(model.tokenizer.encode(context)) > 2 * 17
    (answer,) = model.answer("who", context, allow_no_answer=True)
    assert (answer.text, answer.start) == ("mr  yy", context.index("mr"))
    assert model.answer("who", context.replace("mr  yy", ""), allow_no_answer=True)[0].text == ""
    examples = [("who", context, "yy", context.index("yy")), ("who", "aa vv", None, None)]
    scores = model.evaluate(examples)
    assert scores["has_answer"] == {"exact_match": 0.0, "f1": pytest.approx(2 / 3), "questions": 1}
    assert scores["no_answer"] == {"exact_match": 1.0, "f1": 1.0, "questions": 1}
    assert scores["exact_match"] == 0.5 and scores["questions"] == 2
    # Where every question has an answer, "no answer" is none.
    everywhere = model.evaluate([("who", "vv", "vv", 0)])
    assert everywhere["f1"] == 1 and "no_answer" not in everywhere


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A run that was stopped and resumed ends with the bits of one that was not."""
    write_questions(tmp_path)
    overrides = ("train.validate_every=3", "model.dropout=0.2")
    whole = train_run_file(tmp_path, *overrides, steps=6).rename(tmp_path / "whole")
    train_run_file(tmp_path, *overrides, "train.steps=3")
    resumed = train_run_file(tmp_path, *overrides, "train.steps=6", resume=True)
    first, second = (
        dict(load_tensors(run / "checkpoints" / "step-6" / "weights.safetensors")) for run in (whole, resumed)
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "zz", "start": 0}, r'valid.jsonl:62: the answer "zz" does not begin at character 0'),
        ({"question": " "}, "valid.jsonl:62: the question is empty"),
    ],
)
def test_a_held_out_question_must_be_usable(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_questions(tmp_path)
    with (tmp_path / "valid.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"context": "aa", "question": "who", "answer": None, "start": None} | record))
    with pytest.raises(InputError, match=rf"^\[data\] valid: .*{message}"):
        train_run_file(tmp_path)
    assert not (tmp_path / "run").exists()


def test_some_question_must_have_an_answer(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        text = json.dumps({"context": "aa", "question": "who", "answer": None, "start": None})
        (tmp_path / f"{split}.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"^\[data\] train: no question has an answer; expected some that have one"):
        train_run_file(tmp_path)


QUESTIONS, CONTEXTS = [[5, 6], [7]], [[8, 9, 6], [5, 6, 7, 8, 9, 10]]
# First and last token of the answer; the second window has none.
ANSWERS = [(1, 2), None]


def batch_of(collator: InputCollator) -> tuple[Batch, list[list[int]]]:
    inputs = collator.collate(QUESTIONS, CONTEXTS)
    labels = torch.full((*inputs.ids.shape, 2), NO_LABEL)
    possible = []
    for row, answer in enumerate(ANSWERS):
        front = collator.second_start(len(QUESTIONS[row]))
        possible.append([0, *range(front, front + len(CONTEXTS[row]))])
        labels[row, possible[-1]] = 0
        for side in (0, 1):
            labels[row, 0 if answer is None else front + answer[side], side] = 1
    return inputs.with_labels(labels, np.arange(2), num_labels=2), possible


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_mean_of_start_and_end(family: str, smoothing: float) -> None:
    module = model(family, character_tokenizer(), count=2).eval()
    batch, possible = batch_of(InputCollator.of(module.spec, character_tokenizer()))
    with torch.no_grad():
        logits = module(batch.ids, mask=batch.mask).logits.double()
    expected = 0.0
    for row, places in enumerate(possible):
        for side in (0, 1):
            scores = {position: float(logits[row, position, side]) for position in places}
            total = math.log(math.fsum(map(math.exp, scores.values())))
            (right,) = (batch.labels[row, :, side] == 1).nonzero()[:, 0].tolist()
            uniform = sum(total - score for score in scores.values()) / len(scores)
            expected += ((1 - smoothing) * (total - scores[right]) + smoothing * uniform) / 2
    loss, count = answer_loss(module, batch, label_smoothing=smoothing)
    assert count == 2 and loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in module.parameters())
    wider = replace(
        batch,
        ids=torch.nn.functional.pad(batch.ids, (0, 3)),
        mask=torch.nn.functional.pad(batch.mask, (0, 3)),
        labels=torch.nn.functional.pad(batch.labels, (0, 0, 0, 3), value=NO_LABEL),
    )
    assert answer_loss(module, wider, label_smoothing=smoothing)[0].item() == pytest.approx(expected, rel=1e-5)
