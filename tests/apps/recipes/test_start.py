"""Fine-tuning modes: all weights, or low-rank matrices if memory or time is too short."""

from __future__ import annotations

import pytest
import torch

from clearhead.apps.recipes import from_checkpoint
from clearhead.apps.recipes.fit import FittedRunFile
from clearhead.base.errors import InputError


@pytest.mark.parametrize(
    ("parameters", "whole", "low_rank", "rank"),
    [
        (1_000, 1.0, 0.5, None),  # 290 steps of the whole model in 5 minutes, and a pass has 100
        (1_000, 10.0, 5.0, from_checkpoint.LORA_RANK),
        (1_000, 10.0, 9.9, None),
        (10**15, 1.0, 0.5, from_checkpoint.LORA_RANK),
        (1_000, None, 0.5, from_checkpoint.LORA_RANK),
    ],
)
def test_low_rank_matrices_where_memory_or_time_is_short(
    parameters: int, whole: float | None, low_rank: float, rank: int | None
) -> None:
    def try_rank(tried_rank: int | None, why: str) -> from_checkpoint.FineTuneMode:
        seconds = whole if tried_rank is None else low_rank
        if seconds is None:
            raise InputError("too large") from torch.OutOfMemoryError("too large")
        assert (why == "") is (tried_rank is None)
        return from_checkpoint.FineTuneMode(seconds, 100, lambda: FittedRunFile(f"rank {tried_rank}", 1, 1.0))

    assert from_checkpoint.choose_mode(try_rank, parameters, 5.0).write().text == f"rank {rank}"
