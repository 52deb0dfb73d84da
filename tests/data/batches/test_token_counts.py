"""The work of a batch, counted again token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data.batches.base import Batch, count_batch, count_tokens
from clearhead.spec.token_counts import TokenCounts
from clearhead.tasks.embed.batches import ContrastiveBatch


def mask(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def batch(mask_BT: torch.Tensor | None = None, **changes: Any) -> Batch:
    mask_BT = mask(5, 2, 3) if mask_BT is None else mask_BT
    plain = Batch(
        ids=torch.zeros(mask_BT.shape, dtype=torch.int64),
        mask=mask_BT,
        labels=torch.zeros(len(mask_BT), dtype=torch.int64),
        num_labels=7,
        num_tokens=17,
        rows=np.arange(len(mask_BT)),
    )
    return replace(plain, **changes)


def test_one_stack() -> None:
    work = count_batch(batch())
    assert work == TokenCounts(tokens=17, first_tokens=10, first_pairs=25 + 4 + 9, outputs=7, sequences=3)


def test_two_stacks() -> None:
    target_mask = mask(1, 7, 2)
    work = count_batch(batch(target_ids=torch.zeros(3, 7, dtype=torch.int64), target_mask=target_mask))
    assert (work.second_tokens, work.second_pairs) == (10, 1 + 49 + 4)
    assert work.memory_pairs == 5 * 1 + 2 * 7 + 3 * 2


def test_two_texts_of_one_stack() -> None:
    first, other = mask(5, 2, 3), mask(3, 1, 1)
    pairs = ContrastiveBatch(
        ids=torch.zeros(first.shape, dtype=torch.int64),
        mask=first,
        other_ids=torch.zeros(other.shape, dtype=torch.int64),
        other_mask=other,
        groups=torch.arange(3),
        num_labels=3,
        num_tokens=15,
        rows=np.arange(3),
    )
    expected = TokenCounts(tokens=15, first_tokens=10 + 5, first_pairs=38 + 9 + 1 + 1, outputs=3, sequences=6)
    assert count_batch(pairs) == expected


@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_do_not_see_each_other(padded: bool) -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    mask_BT = mask(5, 3, 5) if padded else torch.ones(3, 5, dtype=torch.bool)
    work = count_batch(batch(mask_BT, documents=documents))
    visible = (documents[:, :, None] == documents[:, None]) & mask_BT[:, :, None] & mask_BT[:, None]
    assert work.first_pairs == int(visible.sum())
    assert work.first_tokens == int(mask_BT.sum())


def test_no_mask_means_all_real() -> None:
    whole = torch.ones(3, 5, dtype=torch.bool)
    assert count_batch(batch(whole, mask=None)) == count_batch(batch(whole))
    documents = torch.tensor([[0, 0, 1, 1, 1]] * 3)
    assert count_batch(batch(whole, mask=None, documents=documents)) == count_batch(batch(whole, documents=documents))


class Listed:
    """Batches from a list, of which an epoch has three."""

    batches_per_epoch = 3

    def __init__(self) -> None:
        self.position = 0
        self.all = [batch(), batch(num_tokens=13, mask_BT=mask(7, 1)), batch(num_tokens=10, mask_BT=mask(3))]

    def __next__(self) -> Batch:
        self.position += 1
        return self.all[(self.position - 1) % 3]

    def state(self) -> dict[str, int]:
        return {"place": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        self.position = state["place"]


@pytest.mark.parametrize(("most", "count"), [(2, 2), (100, 3)])
def test_it_adds_up_and_stays_in_place(most: int, count: int) -> None:
    batches = Listed()
    work = count_tokens(batches, most)
    assert work == sum((count_batch(item) for item in batches.all[:count]), TokenCounts())
    assert work.tokens == 17 + 13 + (10 if count == 3 else 0)
    assert batches.position == 0, "training begins with the batches that were looked at"
    assert work.scale_to(3 * work.tokens) == work + work + work


def test_choices_give_it_back() -> None:
    work = count_batch(batch())
    assert TokenCounts.from_choices({"tokenizer": "t", **work.choices()}) == work
    assert TokenCounts.from_choices({"tokenizer": "t"}) is None
    assert all(type(value) in (int, float) for value in work.choices().values())
