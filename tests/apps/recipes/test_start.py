"""The way to train a checkpoint: all weights, or low-rank matrices where memory or time is too short."""

from __future__ import annotations

import pytest
import torch

from clearhead.apps.recipes import start
from clearhead.apps.recipes.fit import Fitted
from clearhead.base.errors import InputError


@pytest.mark.parametrize(
    ("parameters", "whole", "low_rank", "rank"),
    [
        (1_000, 1.0, 0.5, None),  # 290 steps of the whole model in 5 minutes, and a pass has 100
        (1_000, 10.0, 5.0, start.LORA_RANK),
        (1_000, 10.0, 9.9, None),
        (10**15, 1.0, 0.5, start.LORA_RANK),
        (1_000, None, 0.5, start.LORA_RANK),
    ],
)
def test_low_rank_matrices_where_memory_or_time_is_short(
    parameters: int, whole: float | None, low_rank: float, rank: int | None
) -> None:
    def tried(one: int | None, why: str) -> start.Way:
        seconds = whole if one is None else low_rank
        if seconds is None:
            raise InputError("too large") from torch.OutOfMemoryError("too large")
        assert (why == "") is (one is None)
        return start.Way(seconds, 100, lambda: Fitted(f"rank {one}", 1, 1.0))

    assert start.choose_way(tried, parameters, 5.0).write().text == f"rank {rank}"
