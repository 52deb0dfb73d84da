"""Tensors are read from a file unchanged, and tied tensors stay tied; a module is filled completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clearhead.base import machine
from clearhead.base.errors import InputError
from clearhead.checkpoints.weights import files
from clearhead.checkpoints.weights.files import fill, load_tensors, save_tensors
from tests.laws.tiny import tiny
from tests.training.small import NextToken, equal_states


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, NextToken().state_dict())
    assert set(load_file(path)) == {"table.weight", "mix.weight", "mix.bias"}
    loaded = load_tensors(path)
    assert loaded["head.weight"] is loaded["table.weight"]
    NextToken().load_state_dict(loaded)


def test_views_of_one_storage_keep_their_own_values(tmp_path: Path) -> None:
    whole = torch.arange(30.0).view(5, 6)
    tensors = {"whole": whole, "row": whole[2], "turned": whole.T, "empty": whole[:0], "other_empty": whole[:0]}
    save_tensors(tmp_path / "t.safetensors", tensors)
    assert equal_states(load_tensors(tmp_path / "t.safetensors"), tensors)


def test_loaded_tensors_are_aligned_as_torch_aligns_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tensors(path, {f"odd{size}": torch.zeros(size, dtype=torch.int8) for size in (1, 3, 5)} | {"w": torch.ones(5)})
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_tensors(path).values())


def test_too_many_tensors_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "weights", {name: torch.ones(1) for name in "abc"})
    monkeypatch.setattr(files, "MOST_TENSORS", 2)
    with pytest.raises(InputError, match="has 3 tensors; expected at most 2"):
        load_tensors(tmp_path / "weights")


def test_weights_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "weights", {"a": torch.ones(1000)})
    monkeypatch.setattr(machine, "free_memory", lambda: 3999)
    with pytest.raises(InputError, match=r"to load it needs about 4\.1 kB of memory, but only 4\.0 kB is free"):
        load_tensors(tmp_path / "weights")


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
        "  - 'frist.bias' is not a tensor of the model (did you mean 'first.bias'?)",
        "  - 'first.weight' has the shape [3, 5], the model needs [5, 3]",
    ]
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def test_tied_tables_are_filled_once() -> None:
    module = tiny("encoder-decoder/post/sinusoidal", tie="decoder")
    twin = tiny("encoder-decoder/post/sinusoidal", tie="decoder")
    fill(twin, {name: tensor.clone() for name, tensor in module.state_dict().items()}, source="here")
    assert twin.head.projection().weight_VD is twin.decoder.embedding.table.weight
    assert torch.equal(twin.head.projection().weight_VD, module.decoder.embedding.table.weight)
