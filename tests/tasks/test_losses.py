"""The loss of a batch is the cross-entropy of its labelled tokens, summed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.core import Transformer, build
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.train import token_loss

VOCABULARY = 53


def distance(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


def make_model() -> Transformer:
    torch.manual_seed(23)
    sizes = Hyperparameters(
        layers=1, width=12, heads=2, feedforward=17, dropout=0.0, output_transform=True, output_bias=True
    )
    return build(build_spec(sizes, source_vocab=VOCABULARY, target_vocab=VOCABULARY)).double()


def make_batch() -> Batch:
    torch.manual_seed(22)
    mask, target_mask = (torch.arange(max(n)) < torch.tensor(n)[:, None] for n in ([5, 2, 3], [4, 7, 1]))
    draw = torch.randint(0, VOCABULARY, (3, 19))
    return Batch(
        ids=draw[:, :5],
        mask=mask,
        labels=draw[:, 12:].masked_fill(~target_mask, NO_LABEL),
        num_labels=int(target_mask.sum()),
        num_tokens=int(mask.sum() + target_mask.sum()),
        rows=np.arange(3),
        target_ids=draw[:, 5:12],
        target_mask=target_mask,
    )


def test_the_loss_of_a_batch_is_that_of_its_real_labels() -> None:
    model, batch = make_model(), make_batch()
    total, count = token_loss(model, batch, label_smoothing=0.1)
    logits = model(batch.ids, batch.target_ids, mask=batch.mask).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=0.1, reduction="sum")
    assert distance(total, expected) < 1e-12
    assert count == 4 + 7 + 1
    mine = torch.autograd.grad(total, list(model.parameters()))
    for actual, wanted in zip(mine, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        assert (actual - wanted).abs().max() < 1e-10


def test_sums_of_micro_batches_are_the_sum_of_the_batch() -> None:
    model, whole = make_model(), make_batch()
    total, count = token_loss(model, whole, label_smoothing=0.1)
    sums = []
    for rows in ([0, 1], [2]):
        names = ("ids", "mask", "labels", "target_ids", "target_mask")
        batch_rows = replace(whole, **{name: getattr(whole, name)[rows] for name in names})
        sums.append(token_loss(model, batch_rows, label_smoothing=0.1))
    assert count == sum(number for _, number in sums)
    assert distance(sums[0][0] + sums[1][0], total) < 1e-12
