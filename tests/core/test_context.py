"""The mask algebra: True = may attend, masks combine with "and", None masks nothing."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.core.context import Masking

CPU = torch.device("cpu")


def brute_force(mask: spec.Full | spec.Causal | spec.Window, query: int, key: int) -> bool:
    if isinstance(mask, spec.Causal):
        return key <= query
    if isinstance(mask, spec.Window):
        return query - mask.before <= key <= query + mask.after
    return True


MASKS = [spec.Full(), spec.Causal(), spec.Window(before=3, after=0), spec.Window(before=0, after=2)]


@pytest.mark.parametrize("mask", [*MASKS, spec.Window(before=2, after=5), spec.Window(before=0, after=0)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 11), (1, 5), (2, 2)])
def test_structure_is_the_rule_pair_by_pair(
    mask: spec.Full | spec.Causal | spec.Window, queries: int, keys: int
) -> None:
    """Windows are inclusive on both sides; queries are aligned with the last keys."""
    actual = Masking(queries, keys).build(mask, CPU)
    expected = [[brute_force(mask, keys - queries + i, j) for j in range(keys)] for i in range(queries)]
    if actual is None:
        assert all(all(row) for row in expected)
    else:
        assert actual[0, 0].tolist() == expected


@pytest.mark.parametrize("mask", MASKS)
def test_every_rule_must_agree(mask: spec.Full | spec.Causal | spec.Window) -> None:
    """Structure, padding, documents and a mask argument, against a loop over rows, queries and keys."""
    batch, queries, keys = 3, 5, 7
    real = torch.arange(keys) < torch.tensor([7, 5, 2])[:, None]
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [4, 4, 5, 5, 5, 6, 6], [3] * 7])
    allowed = torch.rand(batch, 2, queries, keys) > 0.3
    actual = Masking(queries, keys, real, documents, allowed).build(mask, CPU)
    assert actual.shape == (batch, 2, queries, keys)
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                query = keys - queries + i
                if not real[b, query]:
                    continue  # masks of padding queries do not matter
                may = brute_force(mask, query, j) and real[b, j] and documents[b, query] == documents[b, j]
                for head in range(2):
                    assert bool(actual[b, head, i, j]) == bool(may and allowed[b, head, i, j])


def test_without_masking_no_mask_is_built() -> None:
    assert Masking(5, 7).build(spec.Full(), CPU) is None
    assert Masking(1, 7).build(spec.Causal(), CPU) is None, "the newest token sees all that is there"


def test_only_the_plain_causal_mask_is_left_to_the_kernel() -> None:
    real = torch.ones(2, 7, dtype=torch.bool)
    assert Masking(7, 7).is_only_causal(spec.Causal())
    assert not Masking(7, 7).is_only_causal(spec.Full())
    assert not Masking(7, 7).is_only_causal(spec.Window(before=7, after=0))
    assert not Masking(5, 7).is_only_causal(spec.Causal())
    assert not Masking(7, 7, real).is_only_causal(spec.Causal())
    assert not Masking(7, 7, documents=real.long()).is_only_causal(spec.Causal())
    assert not Masking(7, 7, allowed=real[:, None, None]).is_only_causal(spec.Causal())
