"""Batches made ahead of their use: a thread makes the next batches and copies them to a GPU while the GPU computes.

`Prepared` feeds a training. `compute_each` feeds predictions, whose results it reads late. On a CPU neither starts a
thread, because it would take processors from the computation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from functools import partial
from itertools import chain, islice, pairwise
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from clearhead.base.host_copy import HostCopy
from clearhead.data.batches.base import Batches, CountedBatch, DeviceBatch

# Number of batches that a thread makes ahead. With two, the thread makes the second while the device copies the first.
_AHEAD: Final = 2

# Number of results that wait on the device together, such as 64 MiB of float32.
_MOST_WAITING: Final = 2**24

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
BatchT = TypeVar("BatchT")
DeviceBatchT = TypeVar("DeviceBatchT", bound=DeviceBatch)
CountedT = TypeVar("CountedT", bound=CountedBatch)

KeyedBatches = Iterator[tuple[KeyT, DeviceBatchT]]
Run = Callable[[KeyT, DeviceBatchT], Sequence[Tensor]]
_Group = Iterable[tuple[KeyT, Sequence[HostCopy]]]
# A batch, the event of its copy, the position of the source after it, and its number of batches per epoch.
_Sent = tuple[CountedT, torch.cuda.Event | None, dict[str, Any], int]


class Ahead(Generic[ItemT]):
    """Iterator whose items a thread makes ahead of their use.

    The thread ends after `close`, after an error of `make`, when the iterator is no longer used, and when the program
    ends. It runs in the context of the caller, so messages reach the same display.

    Args:
        make: the function that returns the next item. Its errors are raised by `next`; StopIteration ends the items.
        ahead: the maximum number of items that are made before they are taken, at least 1.
    """

    def __init__(self, make: Callable[[], ItemT], ahead: int = _AHEAD) -> None:
        self._items: SimpleQueue[tuple[ItemT | None, BaseException | None]] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._error: BaseException | None = None
        stopped = threading.Event()
        # Neither the thread nor the finalizer refers to this object: otherwise it would never be collected.
        work = partial(copy_context().run, _fill, make, self._items, self._room, stopped)
        thread = threading.Thread(target=work, name="clearhead feed", daemon=True)
        self._end = weakref.finalize(self, _stop, thread, self._room, stopped)
        thread.start()

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        """Return the next item, and wait for it if it is not made yet.

        Raises:
            StopIteration: the items have ended, or the iterator is closed.
        """
        if not self._end.alive:
            raise StopIteration
        if self._error is not None:
            raise self._error
        item, self._error = self._items.get()
        if self._error is not None:
            raise self._error
        self._room.release()
        assert item is not None, "an item without an error was made"
        return item

    def close(self) -> None:
        """End the thread, after the item that it is making."""
        self._end()


def _fill(
    make: Callable[[], ItemT],
    items: SimpleQueue[tuple[ItemT | None, BaseException | None]],
    room: threading.Semaphore,
    stopped: threading.Event,
) -> None:
    """Make items while there is room, until the iterator is closed or an error ends the items."""
    error = None
    while error is None:
        room.acquire()
        if stopped.is_set():
            return
        item = None
        try:
            item = make()
        except BaseException as raised:  # noqa: BLE001 the thread that takes the items raises it
            error = raised
        items.put((item, error))


def _stop(thread: threading.Thread, room: threading.Semaphore, stopped: threading.Event) -> None:
    stopped.set()
    room.release()
    # The garbage collector may call this function in any thread, or before the thread was started.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()


class DeviceCopies:
    """Copies batches to a device; to a GPU from pinned memory on a separate stream, without waiting.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: BatchT) -> tuple[BatchT, torch.cuda.Event | None]:
        """Return a batch on the device, and the event of its copy, which may still run.

        Args:
            batch: the batch; one that is no `DeviceBatch` is returned unchanged.
        """
        if not isinstance(batch, DeviceBatch):
            return batch, None
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.stream(self._stream):
            copied = batch.pin_memory().to(self.device, non_blocking=True)
            return copied, self._stream.record_event()

    def receive(self, batch: BatchT, copied: torch.cuda.Event | None) -> BatchT:
        """Return a batch of `send`; the current stream of the device waits for its copy, the host does not."""
        if copied is not None and isinstance(batch, DeviceBatch):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in batch.tensors().values():
                # Otherwise the next copy could reuse the memory while the current stream still reads it.
                tensor.record_stream(stream)
        return batch


class Prepared(Generic[CountedT]):
    """Training batches that a thread makes ahead and copies to a device; the same batches in the same order.

    Close it at the end. Use the batches of the source only through this object: they are ahead of its position.

    Args:
        batches: the source of the batches.
        device: the device of the returned batches.
        ahead: the maximum number of batches that are made before they are taken, at least 1.

    Attributes:
        batches_per_epoch: the number of batches in one pass over the data, after the last batch that was taken.
    """

    def __init__(self, batches: Batches[CountedT], device: torch.device, ahead: int = _AHEAD) -> None:
        self._batches, self._ahead = batches, ahead
        self._copies = DeviceCopies(device)
        self._feed: Ahead[_Sent[CountedT]] | None = None
        self._state: dict[str, Any] = batches.state()
        self.batches_per_epoch: int = batches.batches_per_epoch

    def __iter__(self) -> Iterator[CountedT]:
        return self

    def __next__(self) -> CountedT:
        """Return the next batch, on the device; errors of the source are raised here, and end the thread."""
        try:
            if self._feed is None:
                self._batches.load_state(self._state)  # a closed thread may have passed it
                self._feed = Ahead(partial(_make, self._batches, self._copies), self._ahead)
            sent, copied, state, per_epoch = next(self._feed)
            batch = self._copies.receive(sent, copied)
            self._state, self.batches_per_epoch = state, per_epoch
        except BaseException:  # also a signal, which may have interrupted the wait
            self.close()
            raise
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken, as JSON values."""
        return self._state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state` returned; batches that were made ahead are dropped.

        Raises:
            InputError: the position belongs to other data or to another plan.
        """
        self.close()
        self._batches.load_state(dict(state))
        self._state, self.batches_per_epoch = self._batches.state(), self._batches.batches_per_epoch

    def close(self) -> None:
        """End the thread, after the batch that it is making; the next batch would start another."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()


def _make(batches: Batches[CountedT], copies: DeviceCopies) -> _Sent[CountedT]:
    """Make the next batch of the source, start its copy, and return both with the position of the source after it."""
    return *copies.send(next(batches)), batches.state(), batches.batches_per_epoch


def computes_late(device: torch.device) -> bool:
    """Return whether a device computes while the host goes on, so that the host should read its results late."""
    return device.type == "cuda"


def compute_each(
    batches: KeyedBatches[KeyT, DeviceBatchT], run: Run[KeyT, DeviceBatchT], device: torch.device
) -> Iterator[tuple[KeyT, Sequence[Tensor]]]:
    """Run a function on batches, and yield the key and the results of each batch, on the CPU and in order.

    On a GPU, a thread makes the next batches. Results stay on the device until many are computed, and are copied
    together while the device goes on. On other devices, batches are made and computed in turn.

    Args:
        batches: an iterator over keys and batches, which may run in another thread.
        run: a function of a key and its batch on the device. It must not read values of the device.
        device: the device.
    """
    if not computes_late(device):
        for key, batch in batches:
            yield key, [result.cpu() for result in run(key, batch.to(device))]
        return
    # The host waits for a group after the next one was launched, so that the device is never idle.
    for group, _ in pairwise(chain(_launch(batches, run, DeviceCopies(device)), [()])):
        for key, results in group:
            yield key, [result.read() for result in results]


def _launch(
    batches: KeyedBatches[KeyT, DeviceBatchT], run: Run[KeyT, DeviceBatchT], copies: DeviceCopies
) -> Iterator[_Group[KeyT]]:
    """Launch the computation of all batches; yield groups of results, which are copied to the CPU together."""
    waiting: list[tuple[KeyT, Sequence[Tensor]]] = []
    for key, batch, copied in _make_ahead((key, *copies.send(batch)) for key, batch in batches):
        waiting.append((key, run(key, copies.receive(batch, copied))))
        if sum(result.numel() for _, results in waiting for result in results) >= _MOST_WAITING:
            yield _fetch(waiting)
            waiting = []
    yield _fetch(waiting)


def _fetch(results: Iterable[tuple[KeyT, Sequence[Tensor]]]) -> _Group[KeyT]:
    return [(key, [*map(HostCopy, tensors)]) for key, tensors in results]


def _make_ahead(items: Iterator[ItemT]) -> Iterator[ItemT]:
    """Yield items that a thread makes, but for the first: it is not delayed by the start of the thread."""
    yield from islice(items, 1)
    with closing(Ahead(items.__next__)) as rest:
        yield from rest
