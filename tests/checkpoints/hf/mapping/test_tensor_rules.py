"""Every step between a checkpoint's tensors and ours can be undone, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.checkpoints.hf.mapping.tensor_rules import (
    GroupedQKV,
    OneRow,
    RotaryHalves,
    Slots,
    SplitRows,
    StackNumbered,
    Transform,
    Transpose,
    bind,
    module_rule,
    tensor_rule,
)

ATTENTION = spec.Attention(num_heads=6, num_kv_heads=3, head_size=10, position=spec.Rotary(size=4))
HEADS, KEYS, WIDTH = torch.Size([60, 7]), torch.Size([30, 7]), torch.Size([7, 11])

CASES = {
    "turned": (Transpose(), [torch.randn(11, 7)], [WIDTH]),
    "turned vector": (Transpose(), [torch.randn(7)], [torch.Size([7])]),
    "rows": (SplitRows(), [torch.randn(120, 7)], [HEADS, KEYS, KEYS]),
    "rows of an axis": (SplitRows(axis=1), [torch.randn(3, 10, 7)], [torch.Size([3, 4, 7]), torch.Size([3, 6, 7])]),
    "grouped": (GroupedQKV(), [torch.randn(120, 7)], [HEADS, KEYS, KEYS]),
    "grouped bias": (GroupedQKV(), [torch.randn(120)], [torch.Size([60]), torch.Size([30]), torch.Size([30])]),
    "halves": (RotaryHalves(), [torch.randn(60, 7)], [HEADS]),
    "halves of a norm": (RotaryHalves(axis=1), [torch.randn(6, 10)], [torch.Size([6, 10])]),
    "stacked": (StackNumbered(), [torch.randn(5, 7) for _ in range(3)], [torch.Size([3, 5, 7])]),
    "wrapped": (OneRow(), [torch.randn(1, 7)], [torch.Size([7])]),
}


@pytest.mark.parametrize(("change", "theirs", "shapes"), CASES.values(), ids=CASES)
def test_a_change_is_undone_bit_by_bit(change: Transform, theirs: list[Tensor], shapes: list[torch.Size]) -> None:
    slots = Slots(tuple(shapes), ATTENTION)
    ours = change.load(theirs, slots)
    assert [tensor.shape for tensor in ours] == shapes
    again = change.save(ours, slots)
    assert len(again) == len(theirs)
    assert all(torch.equal(actual, expected) for actual, expected in zip(again, theirs, strict=True))


def test_grouped_puts_each_group_where_its_heads_are() -> None:
    numbers = torch.arange(120)
    query, key, value = GroupedQKV().load([numbers], Slots((torch.Size([60]),), ATTENTION))
    assert query[:10].tolist() == list(range(10)) and query[20:30].tolist() == list(range(40, 50))
    assert key[:10].tolist() == list(range(20, 30)) and value[:10].tolist() == list(range(30, 40))


def test_halves_puts_even_before_odd_and_leaves_the_rest() -> None:
    (tensor,) = RotaryHalves().load([torch.arange(20)], Slots((torch.Size([20]),), ATTENTION))
    assert tensor.tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 10, 12, 11, 13, 14, 15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("change", "theirs"),
    [(SplitRows(), torch.zeros(119, 7)), (GroupedQKV(), torch.zeros(119, 7)), (RotaryHalves(), torch.zeros(59))],
)
def test_sizes_that_do_not_fit_are_refused(change: Transform, theirs: Tensor) -> None:
    with pytest.raises(ValueError, match="rows"):
        change.load([theirs], Slots((HEADS, KEYS, KEYS), ATTENTION))


def test_rules_are_bound_to_every_place_and_what_is_left_is_named() -> None:
    slots = {f"a.{index}.up.{leaf}": torch.zeros(5) for index in range(2) for leaf in ("weight", "bias")}
    slots |= {"a.0.gate.weight": torch.zeros(5), "sink": torch.zeros(2), "experts": torch.zeros(3, 5)}
    rules = (
        module_rule("x.{layer}.gated", "a.{layer}.up", requires="a.{layer}.gate.weight"),
        module_rule("x.{layer}.plain", "a.{layer}.up"),
        tensor_rule("e.{expert}.w", "experts", StackNumbered()),
    )
    model = spec.Model(decoder=None)
    bounds, left = bind(rules, slots, model)
    named = {bound.ours[0]: [names[0] for names in bound.theirs] for bound in bounds}
    assert named["a.0.up.weight"] == ["x.0.gated.weight"] and named["a.1.up.bias"] == ["x.1.plain.bias"]
    assert named["experts"] == ["e.0.w", "e.1.w", "e.2.w"]
    assert left == ["a.0.gate.weight", "sink"]
