"""Laws of hook points: captured values are the computed ones, and outside the block nothing has changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.interpret.maps.hook_points import capture, edit, matching_addresses


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def doublings(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(Doubling()) for _ in range(count)))


def test_patterns_name_paths_in_order() -> None:
    assert matching_addresses(doublings(), "*.0") == ["0.0", "1.0", "2.0"]
    assert matching_addresses(doublings(), "[02]") == ["0", "2"]
    assert matching_addresses(doublings(), "*") == ["0", "1", "2"]
    assert matching_addresses(doublings(), ["1.**", "**.0"]) == ["1.0", "0", "0.0", "2.0"]
    assert matching_addresses(doublings(), "**") == ["0", "0.0", "1", "1.0", "2", "2.0"]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"has the address 'layer2' \(did you mean 'layer1'\?\)"):
        matching_addresses(nn.ModuleDict({"layer1": Doubling()}), "layer2")
    with pytest.raises(InputError, match=r"did you mean '\*\*.layer1'\? \* matches no dot"):
        matching_addresses(nn.ModuleDict({"layer1": Doubling()}), "*.layer1")
    with pytest.raises(InputError, match="no activation"), capture(doublings(), ["0", "x"]):
        pass


def test_capture_returns_the_output_of_each_module() -> None:
    module, x = doublings(), torch.arange(5.0)
    with capture(module, ["0.0", "2"]) as seen:
        module(x)
    assert set(seen) == {"0.0", "2"}
    assert torch.equal(seen.tensor("0.0"), 2 * x)
    assert torch.equal(seen.tensor("2"), 8 * x)
    module(x + 1)
    assert torch.equal(seen.tensor("2"), 8 * x), "outside the context nothing is observed"


def test_every_call_leaves_a_record() -> None:
    module = doublings(1)
    with capture(module, "0") as seen:
        module(torch.tensor(3.0))
        module(torch.tensor(5.0))
    assert [(record.tensor.item(), record.depth, record.step) for record in seen["0"]] == [(6, 0, 0), (10, 0, 1)]
    with pytest.raises(InputError, match="'0' has 2 records, not one"):
        seen.tensor("0")
    with pytest.raises(InputError, match="'00' was not captured"):
        seen.tensor("00")


def test_an_edit_affects_later_modules_and_ends_with_the_context() -> None:
    module, x = doublings(), torch.arange(5.0)
    with edit(module, {"1.*": lambda output, at: output - 1}), capture(module, "1") as seen:
        assert torch.equal(module(x), 2 * (4 * x - 1))
        assert torch.equal(seen.tensor("1"), 4 * x - 1)
    assert torch.equal(module(x), 8 * x)


def test_edits_of_one_module_apply_in_order() -> None:
    module = doublings(1)
    with edit(module, {"0": lambda output, at: output + 1, "**": lambda output, at: output * 3}):
        assert module(torch.tensor(2.0)) == 3 * (3 * 4 + 1)  # "**" names 0.0 too, which comes first


def test_an_edit_of_another_shape_is_refused() -> None:
    module = doublings()
    with (
        pytest.raises(InputError, match=r"the edit of '1' must return a tensor of \[5\], got the shape \[3\]"),
        edit(module, {"1": lambda o, at: o[:3]}),
    ):
        module(torch.arange(5.0))
    assert torch.equal(module(torch.ones(5)), 8 * torch.ones(5)), "the hooks are gone after a failure too"


def test_an_edit_takes_a_tensor_alone_or_with_its_place() -> None:
    module, x = doublings(1), torch.arange(-2.0, 3.0)
    functions = {
        "relu": (torch.relu, torch.relu(2 * x)),
        "module": (nn.Threshold(1.0, 7.0), torch.where(2 * x > 1, 2 * x, 7.0)),
        "alone": (lambda tensor: tensor + 1, 2 * x + 1),
        "place": (lambda tensor, at: tensor + len(at.address), 2 * x + 1),
        "place by default": (lambda tensor, at=None: tensor + len(at.address), 2 * x + 1),
        "any": (lambda *arguments: arguments[0] + len(arguments), 2 * x + 2),
        "bound in a loop": (lambda tensor, size=3: tensor + size, 2 * x + 3),
        "both": (lambda tensor, at, size=3: tensor + size, 2 * x + 3),
        "of another type": (lambda tensor: tensor.double(), 2 * x),
    }
    for name, (function, expected) in functions.items():
        with edit(module, {"0": function}):
            assert torch.equal(module(x), expected), name
    for function, taken in {
        (lambda: x): r"function\(\)",
        (lambda tensor, at, more: x): r"function\(tensor, at, more\)",
        (lambda tensor, *, more: x): r"function\(tensor, more\)",
    }.items():
        message = rf"the edit of '0' must be function\(tensor\) or function\(tensor, at\), got {taken}"
        with pytest.raises(InputError, match=message), edit(module, {"0": function}):
            pass
    assert torch.equal(module(x), 2 * x)


def test_only_single_tensors_can_be_captured() -> None:
    module = nn.Sequential(Pairs())
    with pytest.raises(InputError, match="'0' must return one tensor, got tuple"), capture(module, "0"):
        module(torch.ones(2))


def test_an_edit_that_is_no_function_is_refused() -> None:
    with pytest.raises(InputError, match="edits: expected a dictionary in which each value is a function, got"):
        edit(doublings(), {"0": 3})  # type: ignore[dict-item]


def test_gradients_flow_through_captures_and_edits() -> None:
    module, x = doublings(), torch.ones(5, requires_grad=True)
    with capture(module, "0") as seen, edit(module, {"1": lambda output, at: output * seen.tensor("0")}):
        module(x).sum().backward()
    assert torch.allclose(x.grad, torch.full((5,), 2 * 2 * 2 * 2 * 2.0))  # d/dx 2 * (4x * 2x) = 32x
