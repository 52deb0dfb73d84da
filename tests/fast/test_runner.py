"""The tree of a model is made once, and anew when the model has changed in any way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.fast.runner import Runner
from tests.laws.tiny import tiny


def logits(module: Transformer) -> Tensor:
    with torch.inference_mode():
        actual = module(torch.arange(1, 15).view(2, 7)).logits
    assert actual is not None
    return actual


def layer(module: Transformer) -> Any:
    assert module.decoder is not None
    return module.decoder.layers[0]


def write_to_weight(module: Transformer) -> None:
    with torch.no_grad():
        layer(module).steps[1].branches[0].function.up.weight.mul_(3.0)


def move_weight(module: Transformer) -> None:
    weight = layer(module).steps[0].branches[0].function.value.weight
    weight.data = weight.data * 3.0


def replace_weight(module: Transformer) -> None:
    up = layer(module).steps[1].branches[0].function.up
    up.weight = nn.Parameter(up.weight.detach() * 3.0)


def replace_part(module: Transformer) -> None:
    layer(module).steps[1].branches[0].function.down = nn.Linear(19, 14)


def drop_part(module: Transformer) -> None:
    del layer(module).steps[1]


def scale_branch(module: Transformer) -> None:
    layer(module).steps[0].branches[0].scale = 0.25


def take_forward(module: Transformer) -> None:
    norm = layer(module).steps[0].branches[0].pre
    norm.forward = lambda x: 2.0 * type(norm).forward(norm, x)


def hook(module: Transformer) -> None:
    layer(module).register_forward_hook(lambda *call: 2.0 * call[2])


CHANGES = [write_to_weight, move_weight, replace_weight, replace_part, drop_part, scale_branch, take_forward, hook]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_has_another_tree(change: Callable[[Transformer], None]) -> None:
    torch.manual_seed(3)
    module = tiny("decoder/pre-grouped/learned").eval()
    runner = Runner(module)
    before = logits(runner.tree())
    torch.testing.assert_close(before, logits(module))
    change(module)
    after = logits(runner.tree())
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(after, logits(module))
    torch.testing.assert_close(logits(runner.tree()), logits(module))


def test_a_model_that_has_not_changed_keeps_its_tree() -> None:
    module = tiny("decoder/pre-grouped/learned").eval()
    runner = Runner(module)
    tree = runner.tree()
    assert runner.tree() is tree
    module.train()
    assert runner.tree() is tree and not any(submodule.training for submodule in tree.modules())
    module.eval()
    layer(module).steps[0].branches[0].scale = float("1.0")  # an equal number, another object
    assert runner.tree() is tree and runner.tree() is tree
