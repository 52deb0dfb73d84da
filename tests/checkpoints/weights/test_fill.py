"""Every slot filled and every tensor used, or one report of all that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.base.errors import InputError
from clearhead.checkpoints.weights.fill import fill
from tests.laws.tiny import tiny


def parts() -> nn.ModuleDict:
    return nn.ModuleDict({"first": nn.Linear(3, 5), "second": nn.Linear(5, 7, bias=False)})


def test_a_module_without_memory_is_filled() -> None:
    source = parts()
    with torch.device("meta"):
        module = parts()
    fill(module, source.state_dict(), source="here")
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_all_faults_are_in_one_report_and_nothing_is_filled() -> None:
    module = parts()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tensors = {"first.weight": torch.zeros(3, 5), "second.weight": torch.zeros(7, 5), "frist.bias": torch.zeros(5)}
    with pytest.raises(InputError) as caught:
        fill(module, tensors, source="weights.safetensors")
    assert str(caught.value).splitlines() == [
        "3 faults in weights.safetensors:",
        "  - 'first.bias' is missing",
        "  - 'frist.bias' has no place in the model (did you mean 'first.bias'?)",
        "  - 'first.weight' has the shape [3, 5], the model needs [5, 3]",
    ]
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def test_tied_tables_are_filled_once() -> None:
    module = tiny("encoder-decoder/post/sinusoidal", tie="decoder")
    twin = tiny("encoder-decoder/post/sinusoidal", tie="decoder")
    fill(twin, {name: tensor.clone() for name, tensor in module.state_dict().items()}, source="here")
    assert twin.head.projection().weight_VD is twin.decoder.embedding.table.weight
    assert torch.equal(twin.head.projection().weight_VD, module.decoder.embedding.table.weight)
