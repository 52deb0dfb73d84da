"""Recordings of a step that are replayed without Python: CUDA graphs, and on a CPU a list of operations."""

from __future__ import annotations

import gc
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.base.errors import RunFailure

LEAST_STEPS: Final = 32
"""Number of expected steps from which a step is recorded: recording takes as long as several steps."""
MOST_GRAPHS: Final = 64
"""Maximum number of recordings; each takes some megabytes of memory. The least recently used one is dropped."""
_LOGGER: Final = logging.getLogger("clearhead.fast")
REFUSED: Final = threading.Event()
"""Set by `refuse_recordings`: nothing more is recorded in this process."""
_CAPTURE: Final = threading.Lock()
_HOST_READS: Final = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2")

Step = Callable[[], None]


def refuse_recordings(error: RuntimeError) -> None:
    """Record nothing more in this process after a failure, such as too little memory, and log the reason once."""
    if not REFUSED.is_set():
        REFUSED.set()
        reason = f"{error}".strip().partition("\n")[0]
        _LOGGER.warning("steps of decoding run without CUDA graphs from now on: %s", reason)


class Graph(ABC):
    """A recorded step."""

    @abstractmethod
    def record(self, step: Step) -> None:
        """Run a step once and record it. All tensors that it reads or writes must keep their addresses."""

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded operations again, on the same tensors."""


class CudaGraph(Graph):
    """A step as a CUDA graph.

    Args:
        pool: memory pool that all graphs of one `Graphs` share.
        stream: stream on which they are recorded.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._stream = pool, stream

    def record(self, step: Step) -> None:
        """Record a step, then replay it: a capture itself computes nothing."""
        # A collection during the capture could free memory of another graph, which ends the capture with an error.
        with _CAPTURE, _without_collection():
            graph = torch.cuda.graph(
                self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
            with graph:
                step()
        self._graph.replay()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class Recording(TorchDispatchMode, Graph):
    """A step as a list of operations with their tensors; what a CUDA graph does, for devices without such graphs.

    A replay computes each operation again, and copies results into the tensors of the first time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it.

        Raises:
            RunFailure: the operation reads the host or makes a tensor from a list, so that a GPU would wait for it.
        """
        name = func.overloadpacket.__name__
        reads_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in _HOST_READS or reads_mask or (name == "lift_fresh" and args[0].dim()):
            raise RunFailure(f"a recorded step cannot run {name}: its result depends on the host")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def record(self, step: Step) -> None:
        """Run a step and record its operations."""
        with self:
            step()

    def replay(self) -> None:
        """Run the operations again; results that are views, or that were computed in place, need no copy."""
        for func, args, kwargs, out in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)


class Graphs:
    """Recordings by key, in one memory pool.

    Args:
        device: device of the steps: CUDA graphs on a GPU, a `Recording` elsewhere.
        most: maximum number of recordings.
    """

    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self.most: int = most
        self.num_replays: int = 0
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()  # None: ran once, which was the warm-up

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
            while len(self._graphs) > self.most:
                self._graphs.popitem(last=False)
            return
        self._graphs.setdefault(key, None)
        step()

    def _record(self, step: Step) -> Graph | None:
        """Record a step and run it; if that fails, run it eagerly, and record nothing more in this process."""
        if not self._is_cuda:
            recording = Recording()
            recording.record(step)
            return recording
        assert self._stream is not None
        graph = CudaGraph(self._pool, self._stream)
        try:
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
