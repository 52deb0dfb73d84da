"""A recorded step for devices without CUDA graphs: a list of operations that is run again without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from clearhead.fast.slots import graph
from tests.laws.host_reads import HostRead, HostReads


def record_steps(patch: pytest.MonkeyPatch, least: int, device: str = "cpu") -> None:
    """Let slots record steps, on a device without CUDA graphs too.

    Args:
        patch: undoes the changes.
        least: number of expected steps from which a step is recorded.
        device: kind of the device, such as "cpu".
    """
    patch.setattr(graph, "LEAST_STEPS", least)
    if device != "cuda":
        patch.setattr(graph, "prepare_graphs", lambda _: Recording)


class Recording(HostReads, graph.CudaGraph):
    """A step as a list of operations with their tensors; a host read, or a tensor made from a list, is refused.

    A replay computes each operation again, and copies results into the tensors of the first time.
    """

    def __init__(self) -> None:
        super().__init__(refuses=True)
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.lift_fresh and args[0].dim():
            raise HostRead("a tensor is made from a list")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def record(self, step: Callable[[], Any]) -> None:
        """Run a step and record its operations."""
        with self:
            step()

    def replay(self) -> None:
        """Run the operations again; results that are views, or that were computed in place, need no copy."""
        for func, args, kwargs, out in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)
