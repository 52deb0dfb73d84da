"""Cross-entropy by the compiled kernels, and its gradients, equal the plain computation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.head import Projection
from clearhead.fast.native.abi import UnfitTensor
from clearhead.fast.training import loss as fast_loss
from clearhead.generate.scoring.token_accuracy import projected_cross_entropy

fast_cross_entropy = partial(fast_loss.fast_cross_entropy, plain=projected_cross_entropy)
needs_kernels = pytest.mark.usefixtures("bf16_kernels")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


def tensors(rows: int, entries: int, width: int, size: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    x, weight = torch.randn(rows, width), torch.randn(entries, width) * size / width**0.5
    labels = torch.randint(entries, (rows,))
    return x.bfloat16().float().requires_grad_(), weight.bfloat16().float().requires_grad_(), labels


# Vocabularies that fill blocks or not, rows of several groups, and logits whose exponentials overflow fp32.
@needs_kernels
@pytest.mark.parametrize(
    ("rows", "entries", "width", "size", "room"),
    [(3, 33, 32, 1.0, 1 << 20), (77, 64, 96, 1.0, 1 << 20), (139, 517, 32, 1.0, 40_000), (67, 101, 64, 100.0, 20_000)],
)
@pytest.mark.parametrize(("smoothing", "scale"), [(0.0, 1.0), (0.1, 0.5)])
def test_losses_and_gradients_are_those_of_exact_arithmetic(
    monkeypatch: pytest.MonkeyPatch, rows: int, entries: int, width: int, size: float, room: int, smoothing: float,
    scale: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(fast_loss, "_LEAST_BYTES", room)
    monkeypatch.setattr(fast_loss, "_MOST_BYTES", room)
    x, weight, labels = tensors(rows, entries, width, size)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = F.cross_entropy(exact[0] * scale @ exact[1].T, labels, reduction="sum", label_smoothing=smoothing)
    with torch.autocast("cpu", torch.bfloat16):
        actual = fast_cross_entropy(x, Projection(weight, None, scale), labels, label_smoothing=smoothing)
    assert type(actual.grad_fn).__name__ == "_CrossEntropyBackward"
    assert float(((actual - expected).abs() / expected).detach()) < 1e-5
    ours, theirs = torch.autograd.grad(3.0 * actual, [x, weight]), torch.autograd.grad(3.0 * expected, exact)
    assert all(relative_error(*pair) < 0.005 for pair in zip(ours, theirs, strict=True))


def test_what_the_kernels_do_not_serve_is_computed_by_pytorch() -> None:
    x, weight, labels = tensors(5, 33, 32, 1.0)
    plain = Projection(weight, None, 1.0)
    others = [
        Projection(weight, torch.zeros(33), 1.0),
        Projection(weight, None, 1.0, soft_cap=5.0),
        Projection(weight.detach(), None, 1.0),
    ]
    losses = [fast_cross_entropy(x, plain, labels, label_smoothing=0.0)]  # in fp32
    with torch.autocast("cpu", torch.bfloat16):
        losses += [fast_cross_entropy(x, projection, labels, label_smoothing=0.0) for projection in others]
    assert all(type(loss.grad_fn).__name__ != "_CrossEntropyBackward" for loss in losses)


@needs_kernels
def test_states_that_are_no_numbers_have_no_loss() -> None:
    x, weight, labels = tensors(5, 33, 32, 1.0)
    with torch.no_grad():
        x[2, 3] = torch.nan
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_cross_entropy(x, Projection(weight, None, 1.0), labels, label_smoothing=0.0).isnan()


@needs_kernels
@pytest.mark.parametrize("label", [-100, -1, 33, 2**40])
def test_labels_that_are_no_ids_are_no_places_in_memory(label: int) -> None:
    x, weight, labels = tensors(5, 33, 32, 1.0)
    labels[3] = label
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnfitTensor, match=rf"from 0 to 32, got .*{label}"):
        fast_cross_entropy(x, Projection(weight, None, 1.0), labels, label_smoothing=0.0)
