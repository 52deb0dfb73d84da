"""Copy of a tensor to the host, for which the host waits only when it reads the values."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copy of a tensor on the CPU; a copy from a GPU runs after the work that computes the tensor.

    Args:
        tensor: the tensor; work that is launched later may change it.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_cuda = tensor.device.type == "cuda"
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
        self._copied: Tensor = copied.copy_(tensor, non_blocking=is_cuda)
        self._event = torch.cuda.current_stream(tensor.device).record_event() if is_cuda else None

    def read(self) -> Tensor:
        """Wait until the copy has ended, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copied
