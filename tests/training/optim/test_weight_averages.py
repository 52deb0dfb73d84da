"""Laws of averaged weights: the formula, ties, restoring bit by bit, exact resumption, and the mean of checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.training.optim.weight_averages import ExponentialAverage, average_checkpoints, weights_in_place


class Model(nn.Module):
    """Two tied tables, a norm with an integer buffer, and a linear layer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11)
        self.head.weight = self.table.weight


def move(model: Model, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw))
        assert model.norm.num_batches_tracked is not None
        model.norm.num_batches_tracked.add_(1)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_long_average_follows_the_decay() -> None:
    torch.manual_seed(41)
    model = Model()
    average = ExponentialAverage(model, 0.3)
    expected = model.head.bias.detach().double()
    for step in range(1, 8):
        move(model, step)
        average.update(model)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.head.bias.detach().double()
    torch.testing.assert_close(average.weights["head.bias"].double(), expected, rtol=1e-5, atol=1e-6)


def test_an_average_of_equal_weights_is_those_weights_and_nothing_older() -> None:
    model = Model()
    average = ExponentialAverage(model, 0.9)
    move(model, 1)
    for _ in range(400):
        average.update(model)
    torch.testing.assert_close(average.weights["table.weight"], model.table.weight.detach())


def test_tied_weights_stay_tied_and_integers_are_the_last() -> None:
    model = Model()
    average = ExponentialAverage(model, 0.5)
    for step in range(3):
        move(model, step)
        average.update(model)
    with weights_in_place(model, average.weights):
        assert model.head.weight is model.table.weight
        assert torch.equal(average.weights["head.weight"], model.table.weight)
        assert model.norm.num_batches_tracked == 3


def test_applying_changes_the_module_and_gives_its_weights_back_bit_by_bit() -> None:
    model = Model()
    average = ExponentialAverage(model, 0.9)
    move(model, 1)
    average.update(model)
    before, addresses = copy_weights(model), [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(KeyError), weights_in_place(model, average.weights):
        assert torch.equal(model.head.bias, average.weights["head.bias"])
        assert not torch.equal(model.head.bias, before["head.bias"])
        raise KeyError("anything")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_the_average_is_its_own_copy_and_carries_no_gradient() -> None:
    model = Model()
    average = ExponentialAverage(model, 0.9)
    before = {name: value.clone() for name, value in average.weights.items()}
    move(model, 1)
    assert all(torch.equal(value, before[name]) for name, value in average.weights.items())
    assert not any(value.requires_grad for value in average.weights.values())


def test_a_stored_average_continues_bit_by_bit() -> None:
    torch.manual_seed(42)
    whole_model, model = Model(), Model()
    model.load_state_dict(whole_model.state_dict())
    whole, first = ExponentialAverage(whole_model, 0.9), ExponentialAverage(model, 0.9)
    for step in range(8):
        move(whole_model, step)
        whole.update(whole_model)
    for step in range(3):
        move(model, step)
        first.update(model)
    second = ExponentialAverage(Model(), 0.9)
    second.load({name: value.clone() for name, value in first.weights.items()}, first.num_updates)
    for step in range(3, 8):
        move(model, step)
        second.update(model)
    for name, value in whole.weights.items():
        assert torch.equal(second.weights[name], value), name


def test_weights_of_another_model_are_refused() -> None:
    average = ExponentialAverage(Model(), 0.9)
    with pytest.raises(KeyError, match=r"head\.bias"):
        average.load({name: value for name, value in average.weights.items() if name != "head.bias"}, 1)
    with pytest.raises(RuntimeError):
        average.load(ExponentialAverage(Model(width=7), 0.9).weights, 1)
    other = Model(width=7)
    before = copy_weights(other)
    with pytest.raises(RuntimeError), weights_in_place(other, average.weights):
        pass
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mean_is_that_of_the_exact_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(43)
    values = (torch.randn(7, 3, 5) * 10.0 ** torch.arange(-3, 4).view(7, 1, 1)).to(dtype)
    mean = average_checkpoints({"weight": value} for value in values)["weight"]
    assert mean.dtype == dtype
    assert torch.equal(mean, values.double().mean(0).to(dtype))


def test_the_mean_of_equal_checkpoints_is_bitwise_the_checkpoint_and_a_copy() -> None:
    model = Model()
    state = copy_weights(model)
    mean = average_checkpoints([state, state, state])
    assert mean.keys() == state.keys()
    assert all(torch.equal(mean[name], value) for name, value in state.items())
    mean["norm.num_batches_tracked"].add_(1)
    mean["head.bias"].add_(1)
    assert torch.equal(state["head.bias"], model.head.bias)
    assert state["norm.num_batches_tracked"] == 0


def test_integers_come_from_the_last_checkpoint() -> None:
    checkpoints = [{"count": torch.tensor([step]), "used": torch.tensor([step > 1])} for step in range(3)]
    mean = average_checkpoints(checkpoints)
    assert mean["count"].item() == 2 and mean["used"].item() is True


def test_checkpoints_of_different_models_are_refused() -> None:
    first = {"weight": torch.zeros(3)}
    for other in ({"weight": torch.zeros(5)}, {"other": torch.zeros(3)}, {}, {"weight": torch.zeros(3).double()}):
        with pytest.raises(InputError, match="checkpoint 2"):
            average_checkpoints([first, other])
    with pytest.raises(InputError, match="no checkpoint"):
        average_checkpoints([])
