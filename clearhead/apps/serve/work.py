"""Computations for requests in separate threads; they stop when the client disconnects."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from fastapi import Request
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clearhead.base.errors import InputError
from clearhead.base.progress import Counted, Display, use_display
from clearhead.interpret.maps.hook_points import addresses, edit
from clearhead.model.facade import Model

ResultT = TypeVar("ResultT")
GRACE_SECONDS = 1.0  # seconds that a thread has to end
POLLED = 0.1  # seconds between two checks whether the client is still connected
MOST_SECONDS = 60.0
"""Maximum seconds of computation for one request, without pauses; one thread computes all requests."""
LONG_SCORES = 2**24
"""Maximum of queries times keys that attention computes between two checks."""


class ClientDisconnected(Exception):
    """The client of a request has disconnected."""


def ignore_failure(future: asyncio.Future[Any]) -> None:
    """Do not log the failure of a future whose client has disconnected."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


class Work(Display):
    """Computation for one request, which stops at its next check after a call of `end` or after `MOST_SECONDS`.

    Args:
        workers: the threads of the application.
        is_quick: True if slow computations pause for this one.
    """

    def __init__(self, workers: Workers, is_quick: bool) -> None:
        self._workers = workers
        self.is_quick: bool = is_quick
        self._ended = threading.Event()
        self._deadline: float | None = None

    def end(self) -> None:
        """Stop the computation at its next check."""
        self._ended.set()

    def check(self) -> None:
        """Pause for quick computations, and end if the client has disconnected or the time is up.

        Raises:
            ClientDisconnected: `end` was called.
            InputError: the computation has taken `MOST_SECONDS`.
        """
        begun = time.monotonic()
        while not self.is_quick and not self._workers.are_idle.wait(POLLED) and not self._ended.is_set():
            pass
        if self._ended.is_set():
            raise ClientDisconnected
        now = time.monotonic()
        # Time begins with the first check, in the computing thread.
        self._deadline = now + MOST_SECONDS if self._deadline is None else self._deadline + now - begun
        if now > self._deadline:
            raise InputError(f"the request took more than {MOST_SECONDS:g} seconds: shorten the text or ask for less")

    def update(self, done: int, total: int, what: Counted) -> None:
        """Check whether to stop the computation, each time that it reports its progress."""
        self.check()

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """Check, before each layer and operation of a model inside the with block, whether to stop."""

        def check_input(x: Tensor) -> Tensor:
            self.check()
            return x

        layers = [address for address in addresses(model.module) if address.split(".")[1::2] == ["layers", "before"]]
        with edit(model.module, dict.fromkeys(layers, check_input)), use_display(self), _CheckedOperations(self.check):
            yield


class _CheckedOperations(TorchFunctionMode):
    """Mode that calls a function before each PyTorch operation, and splits attention over a long text.

    Args:
        check: the function; after an error it is not called again.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._function, self._is_over = check, False

    def _check(self) -> None:
        if self._is_over:  # an error ends enclosing context managers, which restore their state
            return
        try:
            self._function()
        except BaseException:
            self._is_over = True
            raise

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        # The end of torch.no_grad() must restore the thread's mode, even after a disconnect.
        if function is torch._C._set_grad_enabled:
            return function(*args, **options)
        self._check()
        is_attention = function is F.scaled_dot_product_attention
        if not is_attention or args[0].shape[-2] * args[1].shape[-2] < LONG_SCORES:
            return function(*args, **options)
        query_BHTE, key_BKSE, value_BKSE, mask = args
        count, is_causal, mixed = key_BKSE.shape[-2], options.pop("is_causal"), []
        size = max(1, LONG_SCORES // count)
        for start in range(0, query_BHTE.shape[-2], size):
            self._check()
            rows, keys, allowed = slice(start, start + size), slice(None), mask
            if is_causal:
                # There are as many keys as queries.
                keys = slice(min(start + size, count))
                allowed = query_BHTE.new_ones(keys.stop - start, keys.stop, dtype=torch.bool).tril(start)
            elif mask is not None and mask.shape[-2] > 1:
                allowed = mask[..., rows, :]
            mixed.append(
                function(query_BHTE[:, :, rows], key_BKSE[:, :, keys], value_BKSE[:, :, keys], allowed, **options)
            )
        return torch.cat(mixed, dim=-2)


class Workers:
    """Two threads of an application: one for slow computations, one for quick ones that a user waits for."""

    def __init__(self) -> None:
        self._lanes = {is_quick: _WorkerThread("quick" if is_quick else "slow") for is_quick in (False, True)}
        self._running: set[Work] = set()
        self.are_idle: threading.Event = threading.Event()  # the quick ones
        self.are_idle.set()
        self.is_closed: bool = False

    async def compute(
        self, request: Request, function: Callable[[Work], ResultT], *, is_quick: bool = False
    ) -> ResultT:
        """Return the result of a function that runs in a thread.

        Args:
            request: the request of the client that waits.
            function: function that computes the result; it gets the work and must call its `check` often.
            is_quick: True if slow computations pause for this one.

        Raises:
            ClientDisconnected: the client has disconnected, or the application is shutting down.
        """
        work = Work(self, is_quick)
        if self.is_closed:
            work.end()
        self._running.add(work)
        self._count()
        future = asyncio.wrap_future(self._lanes[is_quick].begin(function, work))
        try:
            while not (await asyncio.wait([future], timeout=POLLED))[0]:
                if await request.is_disconnected():
                    work.end()
            return future.result()
        except asyncio.CancelledError:
            raise ClientDisconnected from None
        finally:
            work.end()
            ignore_failure(future)
            self._running.discard(work)
            self._count()

    def _count(self) -> None:
        if any(work.is_quick for work in self._running):
            self.are_idle.clear()
        else:
            self.are_idle.set()

    @property
    def num_running(self) -> int:
        """Number of computations for clients that still wait."""
        return len(self._running)

    def close(self) -> None:
        """Stop all computations."""
        self.is_closed = True
        for work in list(self._running):
            work.end()

    def join(self) -> None:
        """Stop all computations, and wait up to a second for each thread."""
        self.close()
        for lane in self._lanes.values():
            lane.join()


class _WorkerThread:
    """Daemon thread that runs one computation after another.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, function: Callable[[Work], ResultT], work: Work) -> Future[ResultT]:
        """Run a function when the thread is free, unless its work has been stopped by then."""
        future: Future[ResultT] = Future()

        def task() -> None:
            future.set_running_or_notify_cancel()
            try:
                work.check()
                result = function(work)
            except BaseException as error:  # noqa: BLE001 - the future raises it again
                future.set_exception(error)
            else:
                future.set_result(result)

        context = contextvars.copy_context()
        self._tasks.put(lambda: context.run(task))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def join(self) -> None:
        """End the thread after its current computation."""
        self._tasks.put(None)
        self._thread.join(GRACE_SECONDS)
