"""Count or refuse host reads: operations that make a GPU's host wait for a value or for a copy.

`count_host_reads` runs code on any device and lists its reads. `refuse_host_reads` raises `HostRead` at the first one;
with tensors of `meta`, which have no values, it shows on a CPU that a step of a GPU never waits:

    module, batch = module.to("meta"), to_meta(batch)
    with refuse_host_reads():
        module(**batch).hidden.square().mean().backward()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.allclose, aten.nonzero, aten.nonzero_numpy,
    aten.masked_select, aten.bincount, aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive,
    aten.tensor_split,
}  # fmt: skip
"""Operations whose result, or its shape, depends on values: `item`, `bool`, `nonzero`, `masked_select` and others."""
COPIES = {aten._to_copy, aten.copy_, aten._copy_from, aten._copy_from_and_resize}
METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Methods of tensors that read values and call no operation that a dispatch mode sees."""
FACTORIES = ("tensor", "as_tensor", "asarray")
"""Functions that copy values of the host to a device, if the call names one."""


class HostRead(AssertionError):
    """A host read where none is allowed."""


class HostReads(TorchDispatchMode):
    """Dispatch mode that lists host reads as "operation at file:line", or raises `HostRead` at the first one.

    Args:
        refuses: True raises at a read, and where operands lie on two devices.
    """

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.refuses, self.reads = refuses, list[str]()

    def add(self, operation: str) -> None:
        """Add one read by the code that runs now."""
        read = f"{operation} at {_caller()}"
        if self.refuses:
            raise HostRead(f"the host waits for the device: {read}")
        self.reads.append(read)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, values = func.overloadpacket, kwargs or {}
        if packet in READS or _has_boolean_index(packet, args) or _counts_repeats(func, values):
            self.add(packet.__name__)
        tensors = [leaf for leaf in _pytree.tree_leaves((args, values)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        target = values.get("device")
        if packet in COPIES:
            devices |= set() if target is None else {torch.device(target).type}
            is_late = values.get("non_blocking", False) or (packet is aten.copy_ and True in args[2:])
            if len(devices) > 1 and not is_late:
                self.add(f"copy between {' and '.join(sorted(devices))}")
        # A number on the host may meet tensors of a device: it goes there as an argument of the kernel.
        elif self.refuses and len({tensor.device for tensor in tensors if tensor.dim() > 0}) > 1:
            raise HostRead(f"{packet.__name__} has operands on {' and '.join(sorted(devices))} at {_caller()}")
        return func(*args, **values)


@contextmanager
def count_host_reads() -> Iterator[list[str]]:
    """Return a context manager that yields a list, which grows by "operation at file:line" for each host read."""
    with _watch(refuses=False) as reads:
        yield reads


@contextmanager
def refuse_host_reads() -> Iterator[None]:
    """Return a context manager in which a host read, or an operation on tensors of two devices, raises `HostRead`."""
    with _watch(refuses=True):
        yield


def to_meta(tree: Any) -> Any:
    """Replace each tensor of a tree of lists, tuples and dictionaries by one of device `meta`."""
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)


@contextmanager
def _watch(*, refuses: bool) -> Iterator[list[str]]:
    mode = HostReads(refuses=refuses)
    with ExitStack() as stack:
        for name in METHODS:
            method = partial(_count_method, mode, name, getattr(Tensor, name))
            stack.enter_context(mock.patch.object(Tensor, name, _as_method(method)))
        for name in FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, partial(_count_copy, mode, name, getattr(torch, name))))
        stack.enter_context(mode)
        yield mode.reads


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _count_method(mode: HostReads, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode.add(name)
    return original(*args, **kwargs)


def _count_copy(mode: HostReads, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create a tensor; with a device named in the call, this is a copy of values from the host, for which it waits."""
    if kwargs.get("device") is not None and not isinstance(args[0], Tensor):
        mode.add(f"{name} on a device")
    return original(*args, **kwargs)


def _has_boolean_index(packet: Any, args: Any) -> bool:
    """Return whether an index is a mask, whose true values are counted; filling with one value counts nothing."""
    if packet not in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        return False
    is_filling = packet is not aten.index and args[2].numel() == 1
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and not is_filling


def _counts_repeats(func: Any, values: dict[str, Any]) -> bool:
    """Return whether `repeat_interleave` adds up the numbers of repeats, to know the size of its result."""
    return func is aten.repeat_interleave.Tensor and values.get("output_size") is None


def _caller() -> str:
    """Return the innermost line of clearhead, otherwise of the tests, that runs now, as "file:line"."""
    frame, lines = sys._getframe(1), list[str]()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.name != Path(__file__).name and ".venv" not in path.parts:
            lines.append(f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return next((line for line in lines if line.startswith("clearhead")), lines[0] if lines else "unknown")
