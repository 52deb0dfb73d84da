"""What "auto" stands for, and names that this machine cannot honour."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import InputError
from clearhead.machine import choose_device, choose_precision


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, False, "cuda"), (True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_best_device(cuda: bool, mps: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto").type == chosen
    assert choose_device("cpu").type == "cpu"


def test_mps_may_be_named_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="there is no device 'mps'"):
        choose_device("mps")


def test_a_device_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="there is no device 'cuda:2'"):
        choose_device("cuda:2")
    with pytest.raises(InputError, match="'toaster' is not a device"):
        choose_device("toaster")


@pytest.mark.parametrize(
    ("device", "supported", "chosen"), [("cpu", True, "fp32"), ("cuda", True, "bf16"), ("cuda", False, "fp32")]
)
def test_auto_precision_follows_the_hardware(
    device: str, supported: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_precision("auto", torch.device(device)) == chosen


def test_a_named_precision_is_taken_or_refused() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("fp32", cpu) == "fp32"
    assert choose_precision("bf16", cpu) == "bf16"
    with pytest.raises(InputError, match="precision must be auto, fp32 or bf16; got 'int4'"):
        choose_precision("int4", cpu)
