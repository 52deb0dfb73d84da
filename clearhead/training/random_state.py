"""Random states to save and restore, and settings for deterministic results."""

from __future__ import annotations

import base64
import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from clearhead.fast.probe import processor


def seed_everything(seed: int) -> None:
    """Seed the random generators of torch (all devices), Python and numpy; numpy gets the seed modulo 2**32."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_process(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators of a process by its rank; rank 0 gets the random numbers of a run with a single process.

    Args:
        seed: the seed of the run.
        rank: the rank of the process.
        step: the step from which the random numbers are used.
    """
    mixed = np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    seed_everything(seed if rank == 0 else int(mixed))


def random_state() -> dict[str, Any]:
    """Return the states of the random generators of torch (all devices), Python and numpy as JSON values."""
    name, keys, *position = cast(tuple[Any, ...], np.random.get_state())
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "mps": _encode(torch.mps.get_rng_state()) if torch.backends.mps.is_available() else None,
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *position],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random generators from the result of `random_state`, which may have been stored as JSON."""
    torch.set_rng_state(_decode(state["torch"]))
    devices = [_decode(text) for text in state["cuda"]]
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)
    if torch.backends.mps.is_available() and state["mps"] is not None:
        torch.mps.set_rng_state(_decode(state["mps"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Return a context manager that restores the random states at its end."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Return a context manager in which torch uses deterministic algorithms.

    Raises:
        RuntimeError: raised by torch in the with block if an operation has no deterministic algorithm on the device.
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    # cuBLAS needs this to be deterministic; it reads the variable when its first handle is created.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        # torch.use_deterministic_algorithms would import torch's compiler, which takes a second.
        torch.set_deterministic_debug_mode("error")
        # Filling every new tensor with NaN costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def preserve_threads() -> Iterator[None]:
    """Return a context manager that restores the number of threads of torch at its end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def environment(processes: int = 1, *, is_sharded: bool = False) -> dict[str, str | int]:
    """Return the facts that can change the bits of a result: versions, processor, threads, accelerator, processes.

    Args:
        processes: the number of processes that train together.
        is_sharded: True if the model is sharded over them (fsdp); else each process holds a copy (ddp).
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    kind = {"parallel": "fsdp" if is_sharded else "ddp"}
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor features": processor().torch_kernels,
        "threads": torch.get_num_threads(),
        "accelerator": device,
        "processes": processes,
        **(kind if processes > 1 else {}),
    }


def environment_changes(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> str | None:
    """Return a message about the differences between two environments, or None if there are none."""
    changes = [f"{name} {before[name]} -> {value}" for name, value in now.items() if before.get(name, value) != value]
    if not changes:
        return None
    changed = ", ".join(changes)
    return f"changed since the checkpoint was written: {changed}; results may differ from an uninterrupted run"


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
