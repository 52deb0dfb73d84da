"""Recordings of a step that are replayed without Python: CUDA graphs."""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Final

import torch

LEAST_STEPS: Final = 32
"""Number of expected steps from which a step is recorded: recording takes as long as several steps."""
MOST_GRAPHS: Final = 64
"""Maximum number of recordings; each takes some megabytes of memory. The least recently used one is dropped."""
_LOGGER: Final = logging.getLogger("clearhead.fast")
REFUSED: Final = threading.Event()
"""Set by `refuse_recordings`: nothing more is recorded in this process."""
_CAPTURE: Final = threading.Lock()

Step = Callable[[], None]


def refuse_recordings(error: RuntimeError) -> None:
    """Record nothing more in this process after a failure, such as too little memory, and log the reason once."""
    if not REFUSED.is_set():
        REFUSED.set()
        reason = f"{error}".strip().partition("\n")[0]
        _LOGGER.warning("steps of decoding run without CUDA graphs from now on: %s", reason)


class CudaGraph:
    """A recorded step, as a CUDA graph.

    Args:
        pool: memory pool that all graphs of one `Graphs` share.
        stream: stream on which they are recorded.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._stream = pool, stream

    def record(self, step: Step) -> None:
        """Run a step once and record it. All tensors that it reads or writes must keep their addresses."""
        # A collection during the capture could free memory of another graph, which ends the capture with an error.
        with _CAPTURE, _without_collection(), torch.cuda.device(self._stream.device):
            before = torch.cuda.current_stream()
            capture = torch.cuda.graph(
                self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
            try:
                with capture:
                    step()
            finally:
                torch.cuda.set_stream(before)  # a failed capture does not restore the stream
        self._graph.replay()  # a capture itself computes nothing

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


def prepare_graphs(device: torch.device) -> Callable[[], CudaGraph]:
    """Return a function that makes graphs, which share a memory pool."""
    return partial(CudaGraph, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


class Graphs:
    """Recordings by key, in one memory pool.

    Args:
        device: device of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_replays: int = 0
        self._device = device
        self._graphs: OrderedDict[Hashable, CudaGraph | None] = OrderedDict()  # None: ran once, which was the warm-up

    def run(self, key: Hashable, step: Step, *, expected: int) -> None:
        """Run a step: the first one of a key eagerly, the second one recorded, later ones as a replay.

        Args:
            key: value that is equal for steps with the same operations on the same tensors.
            step: the step.
            expected: number of steps expected; below `LEAST_STEPS` nothing is recorded.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.num_replays += 1
            graph.replay()
            return
        if key in self._graphs and expected >= LEAST_STEPS and not REFUSED.is_set():
            self._graphs[key] = self._record(step)
            self._graphs.move_to_end(key)
            while len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return
        self._graphs.setdefault(key, None)
        step()

    @cached_property
    def _new_graph(self) -> Callable[[], CudaGraph]:
        return prepare_graphs(self._device)

    def _record(self, step: Step) -> CudaGraph | None:
        """Record a step and run it; if that fails, run it eagerly, and record nothing more in this process."""
        try:
            graph = self._new_graph()
            graph.record(step)
        except RuntimeError as error:  # too little memory, or an operation that cannot be captured
            refuse_recordings(error)
            step()
            return None
        return graph


@contextmanager
def _without_collection() -> Iterator[None]:
    """Return a context manager in which no garbage is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
