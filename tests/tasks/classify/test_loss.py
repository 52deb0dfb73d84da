"""The loss of labels against the same sums written out one by one, and its gradient against differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.tasks.classify.train import label_loss
from tests.tasks.labelled_models import FAMILIES, character_tokenizer, model

TEXTS = [[5, 6, 7], [8, 5], [9, 9, 6, 5, 7], [10]]


def batch_for(module: Transformer, labels: Any) -> Batch:
    rectangle = InputCollator.of(module.spec, character_tokenizer()).collate(TEXTS)
    return Batch(
        ids=rectangle.ids,
        mask=rectangle.mask,
        labels=torch.tensor(labels),
        num_labels=4,
        num_tokens=rectangle.num_tokens,
        rows=np.arange(4),
        target_ids=rectangle.target_ids,
    )


def outputs(module: Transformer, batch: Batch) -> list[list[float]]:
    with torch.no_grad():
        logits = module(batch.ids, batch.target_ids, mask=batch.mask).logits
    assert logits is not None
    rows: list[list[float]] = logits.double().tolist()
    return rows


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(value) for value in row))
    return [value - total for value in row]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("family", "pool"), FAMILIES)
def test_one_class(family: str, pool: str, smoothing: float) -> None:
    module = model(family, character_tokenizer(), count=3, pool=pool).eval()
    labels = [0, 2, 1, 2]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="single_label", label_smoothing=smoothing)
    expected = sum(
        -(1 - smoothing) * logs[label] - smoothing * sum(logs) / 3
        for logs, label in zip(map(log_softmax, outputs(module, batch)), labels, strict=True)
    )
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_several_classes(smoothing: float) -> None:
    module = model("encoder", character_tokenizer(), count=3, pool="mean").eval()
    labels = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="multi_label", label_smoothing=smoothing)
    expected = 0.0
    for row, wanted in zip(outputs(module, batch), labels, strict=True):
        for value, yes in zip(row, wanted, strict=True):
            share = yes * (1 - smoothing) + smoothing / 2
            expected += share * math.log1p(math.exp(-value)) + (1 - share) * math.log1p(math.exp(value))
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 12)


def test_a_number() -> None:
    module = model("encoder", character_tokenizer(), count=1, pool="mean").eval()
    labels = [0.5, -1.0, 2.0, 0.0]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="regression")
    expected = sum((row[0] - label) ** 2 for row, label in zip(outputs(module, batch), labels, strict=True))
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 4)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_the_gradient_reaches_every_stack(family: str) -> None:
    module = model(family, character_tokenizer(), count=3, pool="mean" if family == "encoder" else "last")
    loss, _ = label_loss(module, batch_for(module, [0, 2, 1, 2]), kind="single_label")
    loss.backward()
    for name, parameter in module.named_parameters():
        # A decoder that reads one token has nothing to choose from; and a bias on keys never changes a softmax.
        is_idle = family == "encoder-decoder" and name.startswith("decoder") and ".steps.0." in name
        if "key" not in name and not (is_idle and "query" in name):
            assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


def test_the_loss_of_a_batch_is_the_sum_of_its_texts() -> None:
    module = model("decoder", character_tokenizer(), count=3, pool="last").eval()
    batch = batch_for(module, [0, 2, 1, 2])
    parts = 0.0
    for row in range(4):
        alone = InputCollator.of(module.spec, character_tokenizer()).collate([TEXTS[row]])
        one = Batch(alone.ids, alone.mask, batch.labels[row : row + 1], 1, alone.num_tokens, np.array([row]))
        parts += float(label_loss(module, one, kind="single_label")[0].detach())
    assert float(label_loss(module, batch, kind="single_label")[0].detach()) == pytest.approx(parts, rel=1e-5)
