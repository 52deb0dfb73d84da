"""The loss of answers against the same sums written out one by one; what cannot be an answer does not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.tasks.answer.train import answer_loss
from tests.tasks.labelled_models import character_tokenizer, model

QUESTIONS, CONTEXTS = [[5, 6], [7]], [[8, 9, 6], [5, 6, 7, 8, 9, 10]]
# First and last token of the answer; the second window has none.
ANSWERS = [(1, 2), None]


def batch_of(collator: InputCollator) -> tuple[Batch, list[list[int]]]:
    inputs = collator.collate(QUESTIONS, CONTEXTS)
    labels = torch.full((*inputs.ids.shape, 2), NO_LABEL)
    possible = []
    for row, answer in enumerate(ANSWERS):
        front = collator.second_place(len(QUESTIONS[row]))
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
            scores = {place: float(logits[row, place, side]) for place in places}
            total = math.log(math.fsum(map(math.exp, scores.values())))
            (right,) = (batch.labels[row, :, side] == 1).nonzero()[:, 0].tolist()
            uniform = sum(total - score for score in scores.values()) / len(scores)
            expected += ((1 - smoothing) * (total - scores[right]) + smoothing * uniform) / 2
    loss, count = answer_loss(module, batch, label_smoothing=smoothing)
    assert count == 2 and loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(part.grad is None or torch.isfinite(part.grad).all() for part in module.parameters())
    wider = replace(
        batch,
        ids=torch.nn.functional.pad(batch.ids, (0, 3)),
        mask=torch.nn.functional.pad(batch.mask, (0, 3)),
        labels=torch.nn.functional.pad(batch.labels, (0, 0, 0, 3), value=NO_LABEL),
    )
    assert answer_loss(module, wider, label_smoothing=smoothing)[0].item() == pytest.approx(expected, rel=1e-5)
