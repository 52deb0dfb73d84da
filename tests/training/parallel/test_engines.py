"""Rows of batches: exactly one process computes each row, for any number of processes."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor, nn

from clearhead.base.signals import StopSignals
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.batches.base import Batch
from clearhead.training.parallel.engines import AgreedStop, BatchLoss, StepSums, take_rank_rows
from clearhead.training.parallel.world import Process


def batch() -> Batch:
    """Return a batch of seven rows with up to five tokens."""
    lengths = torch.tensor([1, 2, 2, 3, 4, 5, 5])
    ids = torch.arange(35).view(7, 5)
    mask = torch.arange(5) < lengths[:, None]
    labels = torch.where(mask, ids + 1, NO_LABEL)
    tokens = int(mask.sum())
    return Batch(ids=ids, mask=mask, labels=labels, num_labels=tokens, num_tokens=tokens, rows=torch.arange(7).numpy())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 11])
def test_every_row_is_computed_by_one_process(size: int) -> None:
    whole = batch()
    shares = [take_rank_rows(whole, Process(rank=rank, size=size)) for rank in range(size)]
    counted = [share for share in shares if share.counts]
    assert sorted(row for share in counted for row in share.batch.rows.tolist()) == list(range(7))
    assert sum(share.num_tokens for share in shares) == whole.num_tokens
    assert sum(share.batch.num_labels for share in counted) == whole.num_labels
    widths = [len(share.batch.rows) for share in counted]
    assert max(widths) - min(widths) <= 1


def test_a_process_without_a_row_takes_part_without_effect() -> None:
    module = nn.Linear(5, 1)

    def loss(module: nn.Module, rows: Batch) -> tuple[Tensor, int]:
        return module(rows.ids.float()).sum(), rows.num_labels

    share = take_rank_rows(batch(), Process(rank=8, size=9))
    total, labels = BatchLoss(module, loss)(share)
    total.backward()
    assert (total.item(), labels, share.num_tokens) == (0.0, 0, 0)
    assert module.weight.grad is not None and not module.weight.grad.any()


def test_sums_are_those_of_all_and_the_clock_is_that_of_the_first() -> None:
    first, second = StepSums(), StepSums()
    first.add(3, 5)
    first.add_losses([2.5])
    second.add(4, 7)
    second.add(1, 1)
    second.add_losses([1.5, float("nan")])
    rows = [[*first.row(), 0.0, 11.0], [*second.row(), 15.0, 13.0]]
    sums = StepSums.of(rows)
    assert (sums.num_labels, sums.num_tokens, sums.not_finite) == (8, 13, 2) and sums.loss != sums.loss
    agreed = AgreedStop.of(rows)
    assert agreed.seconds == 11.0 and agreed.signal is not None and agreed.signal.name == "SIGTERM"


def test_a_process_that_ends_with_the_others_ignores_the_signal_of_torchrun() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals(is_alone=False):
            pass
        assert signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(RuntimeError), StopSignals(is_alone=False):
            raise RuntimeError("connection closed by peer")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
