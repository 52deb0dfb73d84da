"""Laws of the chunked cross-entropy: the values and gradients of the plain one, without its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.core.head import Projection
from clearhead.core.kernels import linear_cross_entropy as loss_file
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL, linear_cross_entropy, select_rows
from clearhead.generate.scoring.token_accuracy import projected_cross_entropy

ROWS, WIDTH, VOCABULARY = 29, 7, 53


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    def gradients(self, total: Tensor) -> list[Tensor]:
        return list(
            torch.autograd.grad(total, [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None])
        )


def make(*, bias: bool = True, dtype: torch.dtype = torch.float64, missing: bool = True, size: float = 1.0) -> Case:
    torch.manual_seed(21)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    if missing:
        labels[[0, 5, 6, ROWS - 1]] = NO_LABEL
    leaves = [(torch.randn(shape) * size).to(dtype).requires_grad_() for shape in ((ROWS, WIDTH), (VOCABULARY, WIDTH))]
    return Case(leaves[0], leaves[1], torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None, labels)


def plain(case: Case, *, label_smoothing: float, scale: float = 1.0) -> Tensor:
    logits = F.linear(case.hidden * scale, case.weight, case.bias)
    return F.cross_entropy(logits, case.labels, label_smoothing=label_smoothing, reduction="sum")


def ours(case: Case, *, label_smoothing: float, scale: float = 1.0) -> Tensor:
    return linear_cross_entropy(
        case.hidden, case.weight, case.bias, case.labels, label_smoothing=label_smoothing, scale=scale
    )


def far(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


@pytest.fixture(params=[3, 1000], ids=["groups of chunks", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    rows: int = request.param
    monkeypatch.setattr(loss_file, "_CHUNK_BYTES", rows * VOCABULARY * 8)
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_value_and_gradients_are_those_of_the_plain_loss(
    chunks: int, bias: bool, label_smoothing: float, scale: float
) -> None:
    case = make(bias=bias)
    expected = plain(case, label_smoothing=label_smoothing, scale=scale)
    actual = ours(case, label_smoothing=label_smoothing, scale=scale)
    assert far(actual, expected) < 1e-13
    for mine, theirs in zip(case.gradients(actual), case.gradients(expected), strict=True):
        assert far(mine, theirs) < 1e-12


def test_gradients_agree_with_finite_differences(chunks: int) -> None:
    case = make()
    assert case.bias is not None

    def total(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, bias, case.labels, label_smoothing=0.1, scale=0.5).square()

    assert torch.autograd.gradcheck(total, (case.hidden, case.weight, case.bias))


def test_single_precision_stays_within_its_rounding() -> None:
    case = make(dtype=torch.float32)
    actual, expected = ours(case, label_smoothing=0.1), plain(case, label_smoothing=0.1)
    assert far(actual, expected) < 1e-6
    for mine, theirs in zip(case.gradients(actual), case.gradients(expected), strict=True):
        assert far(mine, theirs) < 1e-5


def test_large_logits_stay_finite() -> None:
    case = make(dtype=torch.float32, size=300.0)
    actual = ours(case, label_smoothing=0.1)
    assert far(actual, plain(case, label_smoothing=0.1)) < 1e-5
    assert all(torch.isfinite(gradient).all() for gradient in case.gradients(actual))


def test_sixteen_bit_inputs_are_summed_in_single_precision() -> None:
    case = make(dtype=torch.bfloat16)
    wide = Case(
        *(leaf.detach().float().requires_grad_() for leaf in (case.hidden, case.weight, case.bias)), case.labels
    )
    actual, expected = ours(case, label_smoothing=0.1), plain(wide, label_smoothing=0.1)
    assert actual.dtype == torch.float32
    assert far(actual, expected) < 2e-3
    for mine, theirs in zip(case.gradients(actual), wide.gradients(expected), strict=True):
        assert mine.dtype == torch.bfloat16
        assert far(mine.float(), theirs) < 2e-2


def test_under_autocast_products_are_low_precision_and_gradients_have_the_dtype_of_the_weights() -> None:
    case = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = ours(case, label_smoothing=0.1)
        with torch.no_grad():
            forward_only = ours(case, label_smoothing=0.1)
    short = [leaf.bfloat16() for leaf in (case.hidden, case.weight)]
    cast = linear_cross_entropy(*short, case.bias, case.labels, label_smoothing=0.1)
    assert torch.equal(actual, cast), "everything but the products is computed as without autocast"
    exact = ours(case, label_smoothing=0.1)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, forward_only)
    assert 0 < far(actual, exact) < 5e-3
    for mine, theirs in zip(case.gradients(actual), case.gradients(exact), strict=True):
        assert mine.dtype == torch.float32
        assert far(mine, theirs) < 3e-2


def test_a_weight_used_elsewhere_accumulates_both_gradients_and_the_factor_on_the_loss() -> None:
    case = make(missing=False)
    ids = torch.randint(0, VOCABULARY, (ROWS,))

    def tied_gradient(loss: Callable[..., Tensor]) -> Tensor:
        embedded = Case(F.embedding(ids, case.weight) + case.hidden, case.weight, case.bias, case.labels)
        return loss(embedded, label_smoothing=0.1) / 7 + case.weight.square().sum()

    for mine, theirs in zip(case.gradients(tied_gradient(ours)), case.gradients(tied_gradient(plain)), strict=True):
        assert far(mine, theirs) < 1e-12


def test_only_required_gradients_are_computed() -> None:
    case = make()
    frozen = Case(case.hidden, case.weight.detach(), None, case.labels)
    actual = ours(frozen, label_smoothing=0.1)
    (mine,) = torch.autograd.grad(actual, [frozen.hidden])
    (theirs,) = torch.autograd.grad(plain(frozen, label_smoothing=0.1), [frozen.hidden])
    assert far(mine, theirs) < 1e-12


@pytest.mark.parametrize("labels", [torch.full((ROWS,), NO_LABEL), None])
def test_no_labels_give_zero_and_zero_gradients(labels: Tensor | None) -> None:
    case = make()
    if labels is None:
        case = Case(
            torch.empty(0, WIDTH, dtype=torch.float64, requires_grad=True), case.weight, case.bias, case.labels[:0]
        )
    else:
        case.labels = labels
    actual = ours(case, label_smoothing=0.1)
    assert actual.item() == 0.0
    assert not any(gradient.any() for gradient in case.gradients(actual))


def test_rows_without_a_label_cannot_influence_anything() -> None:
    case = make()
    assert case.bias is not None
    poisoned = case.hidden.detach().clone()
    poisoned[case.labels == NO_LABEL] = float("nan")
    other = Case(poisoned.requires_grad_(), case.weight, case.bias, case.labels)
    actual, expected = ours(other, label_smoothing=0.1), ours(case, label_smoothing=0.1)
    assert torch.equal(actual, expected)
    for mine, theirs in zip(other.gradients(actual), case.gradients(expected), strict=True):
        assert torch.equal(mine, theirs)


def test_without_gradients_the_loss_is_the_same_and_nothing_is_saved(chunks: int) -> None:
    case = make()
    with torch.no_grad():
        actual = ours(case, label_smoothing=0.1)
    assert not actual.requires_grad
    assert torch.equal(actual, ours(case, label_smoothing=0.1))


def test_the_same_input_gives_the_same_bits(chunks: int) -> None:
    case = make(dtype=torch.float32)
    first, second = ours(case, label_smoothing=0.1), ours(case, label_smoothing=0.1)
    assert torch.equal(first, second)
    assert all(map(torch.equal, case.gradients(first), case.gradients(second)))


def test_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_file, "_CHUNK_BYTES", 2 * VOCABULARY * 8)
    monkeypatch.setattr(loss_file, "_GROUP_BYTES", 0)
    largest: list[int] = []
    shapes: list[Tensor] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            largest.extend(
                item.numel()
                for item in (result if isinstance(result, tuple | list) else [result])
                if isinstance(item, Tensor)
            )
            return result

    case = make(missing=False)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: shapes.append(tensor) or tensor, lambda tensor: tensor),
        Sizes(),
    ):
        ours(case, label_smoothing=0.1).backward()
    assert max(largest) <= VOCABULARY * WIDTH < ROWS * VOCABULARY
    assert shapes
    assert all(tensor.numel() <= VOCABULARY * WIDTH for tensor in shapes)


def test_a_share_outside_its_range_is_refused() -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(InputError, match="label_smoothing"):
            ours(make(), label_smoothing=wrong)


def test_selected_rows_and_their_gradients() -> None:
    values = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([7, 0, 10])
    assert torch.equal(select_rows(values, rows), values[rows])
    assert torch.autograd.gradcheck(lambda inputs: select_rows(inputs, rows).square(), (values,))


@pytest.mark.parametrize("cap", [None, 0.7])
def test_the_loss_of_a_projection_is_that_of_its_outputs(cap: float | None) -> None:
    """Also with a soft cap between the product and the loss."""
    case = make(missing=False)
    projection = Projection(case.weight, case.bias, 1.3, soft_cap=cap)
    actual = projected_cross_entropy(case.hidden, projection, case.labels, label_smoothing=0.1)
    logits = F.linear(case.hidden * 1.3, case.weight, case.bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, case.labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(actual, expected, check_dtype=False)
    for gradient, other in zip(case.gradients(actual), case.gradients(expected), strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [37, 64])
def test_rows_of_zeros_that_fill_a_sixteen_bit_product_cannot_be_seen(rows: int) -> None:
    """Compare with each row alone, which needs no padding rows; with a bias, padding rows could count."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape).bfloat16().requires_grad_() for shape in ((rows, WIDTH), (VOCABULARY, WIDTH))]
    bias = torch.randn(VOCABULARY, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (rows,))

    def loss(chosen: slice) -> Tensor:
        return linear_cross_entropy(leaves[0][chosen], leaves[1], bias, labels[chosen], label_smoothing=0.1)

    actual, expected = loss(slice(None)), sum(loss(slice(row, row + 1)) for row in range(rows))
    assert isinstance(expected, Tensor) and far(actual, expected) < 1e-5
    inputs = [*leaves, bias]
    for gradient, other in zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert far(gradient.float(), other.float()) < 2e-2


def test_sixteen_bit_products_have_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, other, **out: seen.update(left.shape) or product(left, other, **out))
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16)
    for rows in range(512, 1024, 5):
        hidden = torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        linear_cross_entropy(hidden, weight, None, torch.zeros(rows, dtype=torch.int64))
    many = {size for size in seen if size >= 512}
    assert 10 < len(many) <= 17 and max(many) <= 1024
