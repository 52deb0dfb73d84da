"""A masked model from its run file to filled blanks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.data.batches.base import NO_LABEL
from clearhead.tasks.fill.use import BLANK, fill
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.text_run import WORDS, parts_from, run_file

TASK = 'kind = "fill"\nmask_share = 0.2'


def test_it_learns_to_fill_blanks(tmp_path: Path) -> None:
    path = run_file(tmp_path, TASK, "encoder", steps=100)
    result = train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    assert result.best == "step-100"
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["valid_score"] > 60, "chance is 4 %"
    model = ch.load(tmp_path / "run", device="cpu")
    assert (model.task.kind, model.task.max_length) == ("fill", 13)
    lines = [[WORDS[(start + position) % len(WORDS)] for position in range(7)] for start in range(len(WORDS))]
    texts = [" ".join([*line[:3], BLANK, *line[4:]]) for line in lines]
    answers = [blanks[0][0] for blanks in fill(model.module, model.tokenizer, texts, top_k=1)]
    right = [answer.text == line[3] for answer, line in zip(answers, lines, strict=True)]
    assert sum(right) > 0.6 * len(lines)
    assert all(
        (answer.filled == " ".join(line)) == hit for answer, line, hit in zip(answers, lines, right, strict=True)
    )


def test_loss_and_score_are_of_the_chosen_tokens_alone(tmp_path: Path) -> None:
    parts = parts_from(run_file(tmp_path, TASK, "encoder"))
    module = build(parts.spec).eval()
    for batch in itertools.islice(parts.batches, 3):
        logits = module(batch.ids, mask=batch.mask).logits
        assert logits is not None
        expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
        loss, count = parts.loss(module, batch)
        loss, expected = loss.detach(), expected.detach()
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
        assert count == batch.num_labels == int((batch.labels != NO_LABEL).sum()) < batch.num_tokens / 3


def test_training_hides_other_tokens_in_every_epoch_and_validation_the_same(tmp_path: Path) -> None:
    parts = parts_from(run_file(tmp_path, TASK, "encoder"))
    module = build(parts.spec).eval()
    with torch.no_grad():
        first, again = parts.validate(module), parts.validate(module)
    assert first == again
    epochs = [
        {
            (tuple(whole.tolist()), tuple(is_labelled.tolist()))
            for _ in range(parts.batches.batches_per_epoch)
            for batch in [next(parts.batches)]
            for labels, ids in zip(batch.labels, batch.ids, strict=True)
            for is_labelled in [labels != NO_LABEL]
            for whole in [torch.where(is_labelled, labels, ids)]
        }
        for _ in range(2)
    ]
    assert {text for text, _ in epochs[0]} & {text for text, _ in epochs[1]}
    assert len(epochs[0] & epochs[1]) < 0.7 * len(epochs[0])


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    plain = train_tokenizer("word", ["aa bb"], vocab_size=17)
    with pytest.raises(InputError, match="the tokenizer has none"):
        parts_from(run_file(tmp_path, TASK, "encoder"), plain)
