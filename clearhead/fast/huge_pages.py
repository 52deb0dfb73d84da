"""Memory for weights in huge pages, which a processor reads faster: it translates one address for 2 MiB, not for 4 KiB.

Without this, Linux gives huge pages only to programs that ask for them (its default mode, "madvise"). Weights share
chunks of memory, because a single weight of a small model is smaller than a huge page.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 2**25
"""Bytes of a chunk; a weight of at least half this size gets a separate mapping."""
_LEAST: Final = 2**14
"""Bytes of the smallest weight that is worth it."""
_ALIGNMENT: Final = 64
"""Every weight begins at a multiple of this number of bytes, as in PyTorch's own memory."""
_IS_SUPPORTED: Final = hasattr(mmap, "MADV_HUGEPAGE")


class _Chunk:
    """The chunk that the next weights share; the weights in it keep its memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: weakref.ref[mmap.mmap] | None = None
        self._end = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Return memory for `size` bytes, and the offset at which they begin."""
        with self._lock:
            memory = None if self._memory is None else self._memory()
            offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
            if memory is None or offset + size > _CHUNK:
                memory, offset = _map(_CHUNK), 0
                self._memory = weakref.ref(memory)
            self._end = offset + size
            return memory, offset


_SHARED: Final = _Chunk()


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # raised by a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor for a weight, in huge pages if it is on a CPU under Linux.

    Args:
        shape: shape of the weight.
        dtype: dtype of the weight.
        device: device of the weight.
    """
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if not _IS_SUPPORTED or device.type != "cpu" or size < _LEAST:
        return torch.empty(shape, dtype=dtype, device=device)
    memory, offset = (_map(size), 0) if size >= _CHUNK // 2 else _SHARED.take(size)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(*shape)


def convert(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as a contiguous tensor of a dtype: itself if it is one, otherwise a copy in huge pages."""
    weight = weight.detach()
    if weight.dtype == dtype and weight.is_contiguous():
        return weight
    return allocate(weight.shape, dtype, weight.device).copy_(weight)
