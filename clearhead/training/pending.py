"""Values of training steps on their way from the device to the host, which does not wait for the newest step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

ItemT = TypeVar("ItemT")


class Pending(Generic[ItemT]):
    """Queue of steps with the values that the device computes for them.

    On CUDA, values are copied to pinned memory without waiting. An event marks the end of each copy.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[ItemT, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, item: ItemT, values: Float[Tensor, " values"]) -> None:
        """Add a step that has been launched.

        Args:
            item: what the host knows about the step.
            values: the values that the device computes, which nothing changes later.
        """
        on_cuda = values.device.type == "cuda"
        copied = torch.empty_like(values, device="cpu", pin_memory=on_cuda).copy_(values, non_blocking=True)
        event = None
        if on_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
        self._steps.append((item, copied, event))

    def ready(self, *, waits: bool) -> Iterator[tuple[ItemT, list[float]]]:
        """Remove and return steps with their values, in the order of their launches.

        Args:
            waits: True returns all steps; False leaves the newest one, so that the device always has work.
        """
        while len(self._steps) > (0 if waits else 1):
            item, values, event = self._steps.popleft()
            if event is not None:
                event.synchronize()
            yield item, values.tolist()
