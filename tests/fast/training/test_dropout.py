"""Laws of dropout: the rate, the mean, the gradient's mask, reproducibility, and no side effects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.fast.training.dropout import RandomBitDropout, dropout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_p_in_every_lane_of_the_random_words(p: float) -> None:
    torch.manual_seed(11)
    lanes = 4
    zeros = (dropout(torch.ones(100_003 * lanes), p) == 0).double().view(-1, lanes).mean(0)
    five_sigma = 5 * (p * (1 - p) / 100_003) ** 0.5
    assert (zeros - p).abs().max() < five_sigma


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.7])
def test_the_mean_is_preserved(p: float) -> None:
    torch.manual_seed(12)
    count = 400_009
    mean = dropout(torch.ones(count, dtype=torch.float64), p).mean()
    assert abs(mean - 1) < 5 * (p / (1 - p) / count) ** 0.5


def test_neighbours_are_independent() -> None:
    torch.manual_seed(13)
    zeros = (dropout(torch.ones(400_009), 0.5) == 0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8):
        correlation = 4 * (zeros[distance:] * zeros[:-distance]).mean()
        assert abs(correlation) < 5 / zeros.numel() ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_uses_the_mask_and_the_scale_of_the_forward_pass(dtype: torch.dtype) -> None:
    values = torch.ones(7, 11, 13, dtype=dtype, requires_grad=True)
    dropped = dropout(values, 0.25)
    dropped.backward(torch.ones_like(dropped))
    assert values.grad is not None
    assert values.grad.dtype == dropped.dtype == dtype
    assert torch.equal(values.grad, dropped)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


def test_gradients_agree_with_finite_differences_to_second_order() -> None:
    values = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def run_seeded(inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(14)
        return dropout(inputs, 0.3).square()

    assert torch.autograd.gradcheck(run_seeded, (values,))
    assert torch.autograd.gradgradcheck(run_seeded, (values,))


def test_at_most_one_byte_per_element_is_kept_for_the_backward_pass() -> None:
    saved: list[torch.Tensor] = []
    values = torch.randn(31, 37, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        dropout(values, 0.3)
    assert sum(tensor.numel() * tensor.element_size() for tensor in saved) <= values.numel()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_seed_or_random_state_gives_the_same_mask(deterministic: bool) -> None:
    values = torch.ones(17, 19)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        torch.manual_seed(15)
        first = dropout(values, 0.5)
        state = torch.get_rng_state()
        second = dropout(values, 0.5)
        torch.manual_seed(15)
        assert torch.equal(dropout(values, 0.5), first)
        torch.set_rng_state(state)
        assert torch.equal(dropout(values, 0.5), second)
        assert not torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(before)


def test_evaluation_and_zero_probability_are_the_identity_and_draw_nothing() -> None:
    values = torch.randn(3, 5)
    state = torch.get_rng_state()
    assert RandomBitDropout(0.5).eval()(values) is values
    assert RandomBitDropout(0.0)(values) is values
    assert torch.equal(torch.get_rng_state(), state)


def test_training_drops_also_without_gradients_and_the_input_stays() -> None:
    values = torch.ones(23, 29)
    with torch.no_grad():
        dropped = RandomBitDropout(0.5).train()(values)
    assert (dropped == 0).any()
    assert (values == 1).all()


def test_every_module_uses_its_dropout_probability() -> None:
    torch.manual_seed(16)
    modules = nn.ModuleList([RandomBitDropout(0.2), RandomBitDropout(0.8)]).train()
    rates = [(module(torch.ones(50_021)) == 0).double().mean().item() for module in modules]
    assert rates == pytest.approx([0.2, 0.8], abs=0.01)
    assert [module.p for module in modules] == [0.2, 0.8]
    assert "p=0.2" in repr(modules)


def test_probability_one_drops_all() -> None:
    values = torch.ones(7, requires_grad=True)
    dropped = dropout(values, 1.0)
    dropped.sum().backward()
    assert not dropped.any()
    assert values.grad is not None and not values.grad.any()


@pytest.mark.parametrize("p", [1e-9, 1 - 1e-9])
def test_probabilities_near_the_ends_stay_finite(p: float) -> None:
    assert torch.isfinite(dropout(torch.ones(101), p)).all()


def test_shapes_that_do_not_fill_a_word_and_strided_inputs() -> None:
    for shape in ((), (0,), (1,), (3, 5, 7), (2, 0, 3)):
        assert dropout(torch.ones(shape), 0.5).shape == torch.Size(shape)
    strided = torch.randn(11, 13).t()
    dropped = dropout(strided, 0.5)
    assert torch.equal(dropped[dropped != 0], 2 * strided[dropped != 0])
