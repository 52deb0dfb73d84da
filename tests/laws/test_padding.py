"""Padding that no law of `test_invariances.py` has; fully masked rows give zeros, never NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import MultiHeadAttention, build
from tests.laws.tiny import (
    MAX_POSITIONS,
    MODELS,
    TARGET_VOCAB,
    VOCAB,
    Reader,
    difference,
    hparams,
    pad_rows,
    random_rows,
    resolve_spec,
    tiny,
)
from tests.laws.tiny import with_mask as masked

ONE_STACK = [name for name in MODELS if not name.startswith("encoder-decoder")]
LENGTH = 19
"""More than the learned positions, which padding does not use."""


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_the_ids_at_padding_change_nothing(name: str, side: str, prefer: Callable[[str], None]) -> None:
    """`test_invariances.py` compares padded rows with the rows alone; here rows are longer than learned positions."""
    prefer("fused" if side == "left" else "eager")
    reader = Reader.of(tiny(name), 5)
    rows = random_rows(reader.vocab, (7, MAX_POSITIONS, 3, 1, 5))
    ids, mask = pad_rows(rows, side, LENGTH, filler=3)
    actual = reader(ids, mask).logits
    assert difference(reader(*pad_rows(rows, side, LENGTH, filler=17)).logits, actual, mask) <= 1e-5
    alone = reader.row(1)(rows[1][None]).logits[0]
    assert difference(actual[1, mask[1]], alone) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "alibi", "buckets"])
def test_source_and_target_may_be_padded(position: str, side: str) -> None:
    module = tiny(f"encoder-decoder/post/{position}")
    sources, targets = random_rows(VOCAB), random_rows(TARGET_VOCAB, (3, 5, 11, 2, 7))
    ids, mask = pad_rows(sources, side, 13)
    target_ids, target_mask = pad_rows(targets, side, 19)
    actual = module(ids, target_ids, mask=mask, target_mask=target_mask)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = module(source[None], target[None])
        assert difference(actual.logits[index, target_mask[index]], alone.logits[0]) <= 1e-5
        assert difference(actual.memory[index, mask[index]], alone.memory[0]) <= 1e-5


@pytest.mark.parametrize("name", ["encoder/post/learned", "decoder/pre-grouped/buckets", "encoder-decoder/post/alibi"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_gradient(name: str, side: str) -> None:
    module = tiny(name)
    reader = Reader.of(module, 3)
    rows = random_rows(reader.vocab, (7, 2, 11))
    ids, mask = pad_rows(rows, side, 13)
    losses = {"padded": reader(ids, mask).logits[mask].square().sum()}
    losses["alone"] = sum(reader.row(i)(row[None]).logits.square().sum() for i, row in enumerate(rows))
    tables = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    actual, expected = (torch.autograd.grad(loss, tables, allow_unused=True) for loss in losses.values())
    assert sum(gradient is not None for gradient in expected) > len(tables) // 3
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        assert left is None or difference(left, right) <= 3e-5


def pack(rows: list[Tensor], gap: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate documents, each after a gap of padding that has its document number."""
    ids = torch.cat([torch.cat([torch.zeros(gap, dtype=torch.long), row]) for row in rows])[None]
    real = torch.cat([torch.arange(gap + len(row)) >= gap for row in rows])[None]
    numbers = torch.cat([torch.full((gap + len(row),), 7 - index) for index, row in enumerate(rows)])[None]
    return ids, real, numbers


@torch.no_grad()
@pytest.mark.parametrize("name", ONE_STACK)
def test_packed_documents_after_padding_are_the_documents_alone(name: str, prefer: Callable[[str], None]) -> None:
    """Positions restart with each document, and no document attends to another."""
    prefer("fused")
    reader = Reader.of(tiny(name), 1)
    rows = random_rows(reader.vocab)
    ids, real, documents = pack(rows, gap=2)
    actual = reader(ids, real, documents=documents).logits[real]
    for row, alone in zip(actual.split([len(row) for row in rows]), rows, strict=True):
        assert difference(row, reader(alone[None]).logits[0]) <= 1e-5


@torch.no_grad()
def test_packed_documents_with_padding_at_the_end() -> None:
    reader = Reader.of(tiny("decoder/post/learned"), 1)
    rows = random_rows(reader.vocab, (5, 7))
    ids, _, documents = pack(rows)
    real = torch.arange(19)[None] < 12
    ids = torch.cat([ids, torch.zeros(1, 7, dtype=torch.long)], dim=1)
    documents = torch.cat([documents, torch.full((1, 7), -1)], dim=1)
    actual = reader(ids, real, documents=documents).logits
    assert difference(actual[0, :5], reader(rows[0][None]).logits[0]) <= 1e-5
    assert difference(actual[0, 5:12], reader(rows[1][None]).logits[0]) <= 1e-5


@pytest.mark.parametrize("position", [None, spec.Alibi(), spec.RelativeBuckets(num_heads=3, bidirectional=True)])
@pytest.mark.parametrize("structure", [spec.Full(), spec.Causal()])
def test_fully_masked_queries_give_zeros(position: object, structure: object, kernel: str) -> None:
    attention = MultiHeadAttention(15, 3, position=position, mask=structure)
    x = torch.randn(2, 7, 15, requires_grad=True)
    allowed = torch.ones(2, 7, 7, dtype=torch.bool)
    allowed[0, 2], allowed[1] = False, False
    torch.nn.init.normal_(attention.out.bias)
    values = attention(x, mask=allowed)
    torch.testing.assert_close(values[0, 2], attention.out.bias, atol=0, rtol=0)
    torch.testing.assert_close(values[1], attention.out.bias.expand(7, 15), atol=0, rtol=0)
    assert (values[0, 3] - attention.out.bias).abs().max() > 1e-3
    gradients = torch.autograd.grad(values.square().sum(), [x, *attention.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][1].any(), "nothing was read from a row in which nothing could be seen"
    _, weights = attention(x, mask=allowed, return_weights=True)
    assert not weights[0, :, 2].any()
    torch.testing.assert_close(weights[0, :, 3].sum(-1), torch.ones(3))


@pytest.mark.parametrize("name", [name for name in MODELS if "/post/" in name])
def test_a_row_of_padding_only_is_harmless(name: str, kernel: str) -> None:
    """Outputs and gradients are finite, and the other rows are unchanged."""
    module = tiny(name)
    reader = Reader.of(module, 2)
    ids = torch.randint(reader.vocab, (2, 5))
    mask = torch.tensor([[True] * 5, [False] * 5])
    actual = reader(ids, mask).logits
    assert actual.isfinite().all()
    assert difference(actual[:1], reader.row(0)(ids[:1]).logits) <= 1e-5
    actual.square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "buckets"])
def test_an_empty_memory_is_harmless(position: str, kernel: str) -> None:
    module = tiny(f"encoder-decoder/post/{position}")
    mask = torch.tensor([[True] * 7, [False] * 7])
    logits = module(torch.randint(VOCAB, (2, 7)), torch.randint(TARGET_VOCAB, (2, 5)), mask=mask).logits
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@torch.no_grad()
@pytest.mark.parametrize("window", [spec.Window(before=3, after=0), spec.Window(before=1, after=2)])
def test_a_window_counts_real_tokens(window: spec.Window, kernel: str) -> None:
    """Padding in the middle of a row does not count as distance."""
    module = build(masked(resolve_spec(hparams("encoder/post/alibi")), window, "encoder")).eval()
    row = torch.randint(VOCAB, (1, 7))
    real = torch.tensor([[True, True, False, False, True, True, False, True, True, True, False]])
    ids = torch.zeros(1, 11, dtype=torch.long)
    ids[real] = row[0]
    assert difference(module(ids, mask=real).logits[real], module(row).logits[0]) <= 1e-5
