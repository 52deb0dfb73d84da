"""What "auto" stands for, and names that this machine cannot honour."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.base import machine
from clearhead.base.errors import InputError
from clearhead.base.machine import choose_device, choose_precision, free_memory, refuse_memory, total_memory


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


def test_free_memory_is_plausible() -> None:
    assert 10**6 < free_memory() < total_memory() < 10**14


@pytest.mark.parametrize(
    ("groups", "limit", "used"),
    [
        ("0::/pod/task", "memory.max", "memory.current"),
        ("3:cpu:/other\n4:cpu,memory:/pod/task", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
@pytest.mark.parametrize("subfolder", ["", "pod", "pod/task"])
def test_the_limit_of_a_container_counts(
    groups: str, limit: str, used: str, subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 2 and 1; that of any group around the process; files that the system can drop are free."""
    (tmp_path / "own").write_text(groups + "\n", encoding="ascii")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    host = free_memory()
    folder, name = (tmp_path / limit).parent / subfolder, Path(limit).name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / Path(used).name).write_text("700000\n", encoding="ascii")
    (folder / "memory.stat").write_text("anon 400000\nactive_file 100000\ninactive_file 200000\n", encoding="ascii")
    (folder / name).write_text("max\n", encoding="ascii")
    assert free_memory() == pytest.approx(host, rel=0.5)
    (folder / name).write_text("1000000\n", encoding="ascii")
    assert total_memory() == 1000000
    assert free_memory() == 1000000 - 700000 + 300000
    refuse_memory(600_000, "This")
    with pytest.raises(InputError, match=r"This needs about 600 kB of memory, but only 600 kB is free: mend it"):
        refuse_memory(600_001, "This", advice="mend it")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_is_freed_is_kept_for_what_comes_next(is_kept: bool) -> None:
    code = """
import ctypes, resource, sys, torch
from clearhead.base.machine import keep_freed_memory
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # gives all larger blocks back
if sys.argv[1] == "True": keep_freed_memory()
def work(): return [torch.ones(size << 18) for size in (3, 5, 23, 29, 31, 17)].clear()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(9)))  # where blocks lie changes at first
"""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code, str(is_kept)], env=settings, capture_output=True, check=True)
    assert (int(done.stdout) < 25) == is_kept  # pages
