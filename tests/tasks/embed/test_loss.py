"""The contrastive loss: the paper's sum written out, pairs that mean the same left out, and a gradient that fits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.tasks.embed.train import contrastive_loss

PAIRS, WIDTH = 7, 5


def vectors(seed: int, count: int = PAIRS) -> Tensor:
    return 3.0 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def written_out(first: Tensor, second: Tensor, groups: list[int], temperature: float) -> float:
    """The sum over pairs and both directions, number by number."""

    def cosine(one: Tensor, two: Tensor) -> float:
        return float(one.double() @ two.double() / (one.double().norm() * two.double().norm()))

    total = 0.0
    for own in range(len(first)):
        wrong = [index for index in range(len(first)) if groups[index] != groups[own]]
        right = cosine(first[own], second[own]) / temperature
        for scores in (
            [cosine(first[own], second[index]) / temperature for index in wrong],
            [cosine(first[index], second[own]) / temperature for index in wrong],
        ):
            total += -right + math.log(math.exp(right) + sum(map(math.exp, scores)))
    return total / 2


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 3, 1, 5, 0], [0] * PAIRS])
def test_it_is_the_sum_written_out(groups: list[int], temperature: float) -> None:
    first, second = vectors(1), vectors(2)
    loss, count = contrastive_loss(first, second, torch.tensor(groups), temperature=temperature)
    assert count == PAIRS
    assert float(loss) == pytest.approx(written_out(first, second, groups, temperature), rel=1e-5, abs=1e-6)


def test_length_does_not_count_and_both_sides_count_alike() -> None:
    first, second, groups = vectors(1), vectors(2), torch.arange(PAIRS)
    loss, _ = contrastive_loss(first, second, groups, temperature=0.1)
    longer, _ = contrastive_loss(7.0 * first, 0.3 * second, groups, temperature=0.1)
    turned, _ = contrastive_loss(second, first, groups, temperature=0.1)
    torch.testing.assert_close(longer, loss)
    torch.testing.assert_close(turned, loss)


def test_the_order_of_pairs_does_not_count() -> None:
    first, second, groups = vectors(1), vectors(2), torch.tensor([0, 1, 0, 3, 1, 5, 0])
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    loss, _ = contrastive_loss(first, second, groups, temperature=0.1)
    other, _ = contrastive_loss(first[order], second[order], groups[order], temperature=0.1)
    torch.testing.assert_close(other, loss)


def test_equal_vectors_give_the_logarithm_of_the_choices() -> None:
    same = vectors(1)[:1].expand(PAIRS, WIDTH)
    loss, count = contrastive_loss(same, same, torch.arange(PAIRS), temperature=0.05)
    assert float(loss) / count == pytest.approx(math.log(PAIRS), rel=1e-4)


def test_a_right_answer_is_never_a_wrong_one_too() -> None:
    """The same text twice: as a wrong answer it would hold the loss at log 2 however good the vectors are."""
    basis = torch.eye(WIDTH)
    twice = basis[[0, 1, 2, 0]]
    known, _ = contrastive_loss(twice, twice, torch.tensor([0, 1, 2, 0]), temperature=0.05)
    unknown, _ = contrastive_loss(twice, twice, torch.arange(4), temperature=0.05)
    assert float(known) < 1e-6
    assert float(unknown) == pytest.approx(2 * math.log(2), rel=1e-4)


def test_one_pair_has_nothing_to_learn() -> None:
    first = vectors(1, 1).requires_grad_()
    loss, count = contrastive_loss(first, vectors(2, 1), torch.zeros(1, dtype=torch.long), temperature=0.05)
    loss.backward()
    assert (loss.item(), count) == (0.0, 1)
    assert first.grad is not None and not first.grad.any()


def test_the_gradient_is_that_of_the_sum() -> None:
    first, second = vectors(1).double().requires_grad_(), vectors(2).double()
    groups = torch.tensor([0, 1, 0, 3, 1, 5, 0])
    contrastive_loss(first, second, groups, temperature=0.5)[0].backward()
    assert first.grad is not None
    step = 1e-3
    for row, column in ((0, 1), (3, 4), (6, 2)):
        moved = []
        for sign in (1, -1):
            shifted = first.detach().clone()
            shifted[row, column] += sign * step
            moved.append(written_out(shifted, second, groups.tolist(), 0.5))
        assert float(first.grad[row, column]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-5)


def test_sixteen_bits_are_widened_before_the_temperature_divides() -> None:
    first, second = vectors(1).bfloat16(), vectors(2).bfloat16()
    groups = torch.arange(PAIRS)
    exact, _ = contrastive_loss(first.float(), second.float(), groups, temperature=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = contrastive_loss(first, second, groups, temperature=0.05)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(InputError, match=r"temperature is .*; expected a positive number"):
        contrastive_loss(vectors(1), vectors(2), torch.arange(PAIRS), temperature=temperature)
