"""The engine of one model, in which requests of all clients share one running batch; engines take turns in one thread.

Between two steps of the batch it takes in what has come, lets leave who has gone, and reads a piece of a prompt. What
needs no generation (vectors, labels, scores of given texts) waits together and is computed in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch

from clearhead.core import Transformer
from clearhead.errors import RunFailure
from clearhead.generate.continuation import GenerateRequest, Reading, checked_limits, of_candidates
from clearhead.generate.options import SearchOptions
from clearhead.generate.prefill import PIECE_TOKENS
from clearhead.generate.prefixes import Prefixes, can_share
from clearhead.generate.results import Continuation
from clearhead.generate.rows import Row, Sentence
from clearhead.generate.running import Generated, Progress, RunningBatch, Started
from clearhead.generate.translation import TranslationReading
from clearhead.machine import free_memory
from clearhead.serve.api.failures import Busy, Closing, named_failure
from clearhead.serve.api.turns import Turns

MOST_WAITING: Final = 256
"""Requests that wait for their turn; one more is refused."""
MOST_ROWS, MOST_TOKENS = 64, 2**16
"""Of the running batch: rows, and tokens in the cache, prompts and limits together."""
MOST_SHARED_BYTES: Final = 2**30
"""Of kept beginnings of prompts; never more than an eighth of the memory that is free at the start."""


@dataclass(frozen=True)
class Step:
    """One token of a sequence.

    Args:
        number: of the sequence, among those of its request.
        text: that became final.
        token: its id.
        log_probability: of the token.
        alternatives: the most probable ids with their log-probabilities, as many as were asked for.
    """

    number: int
    text: str
    token: int
    log_probability: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ended:
    """The end of a sequence."""

    number: int
    continuation: Continuation


Event = Step | Ended | Exception


@runtime_checkable
class Piecewise(Protocol):
    """A prompt, or a text to be translated, that is read piece by piece, or with others."""

    is_done: bool
    num_shared: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""

    @property
    def kind(self) -> Hashable:
        """What some have in common that may be read together; None: it is read by itself."""

    def step(self, others: Sequence[Any] = ()) -> list[Started] | None:
        """Read the next piece, and all of others of its kind; return the starts of all, in order, after the last."""


@dataclass(eq=False)
class Job:
    """One request for generated text.

    Args:
        begin: starts to read it, in the thread of the engines.
        deliver: receives every event, in the same thread.
        num_sequences: how many ends it has.
        num_rows: how many rows it has in the batch.
        cost: most tokens in the cache.
        alternatives: how many of the most probable ids come with each token.
        is_search: its sequences come from one search.
    """

    begin: Callable[[], Piecewise]
    deliver: Callable[[Event], None]
    num_sequences: int
    num_rows: int
    cost: int
    alternatives: int = 0
    is_search: bool = False
    sequences: list[Generated] = field(default_factory=list)
    has_left: bool = False

    @classmethod
    def of_request(
        cls, engine: Engine, request: GenerateRequest, deliver: Callable[[Event], None], alternatives: int = 0
    ) -> Job:
        """Return the job of one prompt.

        Args:
            engine: that runs it.
            request: one prompt, with how its ids are decoded.
            deliver, alternatives: as of a job.

        Raises:
            InputError: the prompt cannot be read.
        """
        (limit,) = checked_limits(engine.tree, request)
        options = request.options
        is_search = options.method == "beam"
        rows = options.beam_size if is_search else options.num_return_sequences
        cost = rows * (len(request.prompts[0]) + limit)
        begin = partial(Reading, engine.tree, request, engine.prefixes)
        return cls(begin, deliver, options.num_return_sequences, rows, cost, alternatives, is_search)

    @classmethod
    def of_translation(
        cls, reading: TranslationReading, options: SearchOptions, deliver: Callable[[Event], None]
    ) -> Job:
        """Return the job of one translation.

        Args:
            reading: of its text.
            options: of the search.
            deliver: as of a job.
        """
        beams = options.beam_size
        return cls(lambda: reading, deliver, options.n_best, beams, beams * reading.num_cached, is_search=True)


@dataclass(eq=False)
class Call:
    """Inputs that may be computed together with those of other calls of an equal key."""

    key: Hashable
    function: Callable[[list[Any]], Sequence[Any]]
    inputs: list[Any]
    result: Future[list[Any]]


_TURNS: Final = Turns()


class Engine:
    """The running batch of one model, and what waits for it.

    Args:
        tree: the module that runs every request, in evaluation mode.
        shares_prefixes: whether prompts that begin alike share what is read of their beginning, where the model can.
    """

    def __init__(self, tree: Transformer, *, shares_prefixes: bool = True) -> None:
        self.tree = tree
        self.prefixes: Prefixes | None = None
        if shares_prefixes and can_share(tree):
            self.prefixes = Prefixes(min(MOST_SHARED_BYTES, free_memory() // 8))
        self._batch = RunningBatch(tree)
        self._changed = _TURNS.changed
        self._waiting: deque[Job] = deque()
        self._calls: deque[Call] = deque()
        self._left: list[Job] = []
        self._reading: deque[tuple[Job, Piecewise]] = deque()
        self._jobs: dict[int, Job] = {}  # by the identity of a sequence
        self._is_closing = False
        self.num_tokens: int = 0
        self.num_read: int = 0
        self.num_shared: int = 0
        self.step_seconds: float = 0.0
        self._posted: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Event], None], Event]]] = {}
        _TURNS.add(self)

    @property
    def num_waiting(self) -> int:
        """How many requests have not begun."""
        return len(self._waiting) + len(self._calls)

    @property
    def num_running(self) -> int:
        """How many sequences are generated, and prompts read, at this moment."""
        return len(self._jobs) + len(self._reading)

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn.

        Raises:
            Busy: too many wait.
            Closing: the server ends.
        """
        with self._changed:
            self._refuse_more()
            self._waiting.append(job)
            self._changed.notify_all()

    def call(self, key: Hashable, function: Callable[[list[Any]], Sequence[Any]], inputs: list[Any]) -> Future[Any]:
        """Return the results of a function for some inputs; it may get those of other calls of the same key as well.

        Raises:
            Busy: too many wait.
            Closing: the server ends.
        """
        call = Call(key, function, inputs, Future())
        with self._changed:
            self._refuse_more()
            self._calls.append(call)
            self._changed.notify_all()
        return call.result

    def post(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Event], None], event: Event) -> None:
        """Let a function of an event loop receive an event; those of a turn go at once. In the engines' thread."""
        self._posted.setdefault(loop, []).append((receive, event))

    def leave(self, job: Job) -> None:
        """Let a job end, wherever it is."""
        with self._changed:
            self._left.append(job)
            self._changed.notify_all()

    def join(self) -> None:
        """Take no more turns, once the present one has ended."""
        with self._changed:
            self._is_closing = True
        _TURNS.remove(self)

    def _refuse_more(self) -> None:
        if self._is_closing:
            raise Closing("the server ends: try again later")
        if self.num_waiting >= MOST_WAITING:
            raise Busy(f"{self.num_waiting} requests wait already: try again later")

    # --- in the thread of the engines ---

    @property
    def is_due(self) -> bool:
        """Whether there is something for a turn."""
        return bool(self._waiting or self._calls or self._left or self._reading or self._batch.members)

    def turn(self) -> None:
        """Take in what has come, let leave who has gone, read a piece of a prompt, and let the batch make a step."""
        with self._changed:
            left, self._left = self._left, []
            calls = self._taken_calls()
            starting = self._taken_jobs(left)
        for job in left:
            self._drop(job)
        if calls:
            _answer(calls)
        for job in starting:
            self._guarded(job, partial(self._begin, job))
        self._read_piece()
        self._step()
        self._hand_over()

    def fail(self, error: Exception) -> None:
        """Let all that is read or runs fail after a turn that failed."""
        reading, self._reading = self._reading, deque()
        for job, _ in reading:
            job.deliver(named_failure(error))
        self._fail_batch(error)
        self._hand_over()

    def _fail_batch(self, error: Exception) -> None:
        jobs, self._jobs, self._batch = {*self._jobs.values()}, {}, RunningBatch(self.tree)
        for job in jobs:
            job.deliver(named_failure(error))

    def _hand_over(self) -> None:
        """Wake each event loop once, with all that is for it."""
        posted, self._posted = self._posted, {}
        for loop, events in posted.items():
            with contextlib.suppress(RuntimeError):  # it is closed, and nobody waits there
                loop.call_soon_threadsafe(_received, events)

    def _taken_calls(self) -> list[Call]:
        """Return the oldest call, with those of the same key."""
        if not self._calls:
            return []
        first = self._calls[0].key
        taken = [call for call in self._calls if call.key == first]
        self._calls = deque(call for call in self._calls if call.key != first)
        # From here on nobody can take them back, and those that were taken back already are not computed.
        return [call for call in taken if call.result.set_running_or_notify_cancel()]

    def _taken_jobs(self, left: list[Job]) -> list[Job]:
        """Return the oldest jobs for which the batch has room; those that left are not begun."""
        for job in left:
            job.has_left = True
        taken: list[Job] = []
        running = {id(job): job for job in self._jobs.values()} | {id(job): job for job, _ in self._reading}
        tokens, rows = sum(job.cost for job in running.values()), sum(job.num_rows for job in running.values())
        while self._waiting:
            job = self._waiting[0]
            is_full = rows + job.num_rows > MOST_ROWS or tokens + job.cost > MOST_TOKENS
            if is_full and not job.has_left and (running or taken):
                break
            self._waiting.popleft()
            if not job.has_left:
                taken.append(job)
                tokens, rows = tokens + job.cost, rows + job.num_rows
        return taken

    def _begin(self, job: Job) -> None:
        self._reading.append((job, job.begin()))

    def _read_piece(self) -> None:
        """Read a piece of the prompt that came first, or of all that fit into a piece together with it."""
        some = self._next_readings()
        if not some:
            return
        started = self._read(some)
        if started is None:
            return
        self._reading = deque(one for one in self._reading if one not in some)
        of_jobs = iter([sequence for start in started for sequence in start.member.sequences])
        for job, reading in some:
            if job.has_left:  # it failed
                continue
            self.num_read += reading.num_tokens - reading.num_shared
            self.num_shared += reading.num_shared
            job.sequences = list(itertools.islice(of_jobs, 1 if job.is_search else job.num_sequences))
            for sequence in job.sequences:
                if isinstance(sequence, Row):
                    sequence.num_alternatives = job.alternatives
                self._jobs[id(sequence)] = job
        if started:
            self._advance(partial(self._batch.join, started))

    def _next_readings(self) -> list[tuple[Job, Piecewise]]:
        """Return the first prompt, with those behind it that may be read together with it."""
        self._reading = deque(one for one in self._reading if not one[0].has_left)
        some, tokens = list[tuple[Job, Piecewise]](), 0
        for job, reading in self._reading:
            is_alike = not some or (reading.kind is not None and reading.kind == some[0][1].kind)
            if is_alike and (not some or tokens + reading.num_tokens <= PIECE_TOKENS):
                some.append((job, reading))
                tokens += reading.num_tokens
        return some

    def _read(self, some: list[tuple[Job, Piecewise]]) -> list[Started] | None:
        """Read some prompts together; where that fails, each alone, so that each fails alone."""
        (job, first), others = some[0], [reading for _, reading in some[1:]]
        if not others:
            return cast("list[Started] | None", self._guarded(job, first.step))
        try:
            with torch.inference_mode():
                return first.step(others)
        except Exception:  # noqa: BLE001 - what fails by itself is told to its job
            return [start for one in some for start in self._read([one]) or ()]

    def _step(self) -> None:
        if self._batch.members:
            self._advance(self._batch.step)

    def _advance(self, move: Callable[[], list[Progress]]) -> None:
        """Let the batch move; where that fails, all its requests fail, and the thread goes on with an empty one."""
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                progress = move()
        except Exception as error:  # noqa: BLE001 - it is the failure of the batch, not of the thread
            self._fail_batch(error)
            return
        self.step_seconds += time.perf_counter() - begun
        self.num_tokens += len(progress)
        self._tell(progress)

    def _tell(self, progress: list[Progress]) -> None:
        for one in progress:
            sequence, job = one.sequence, self._jobs.get(id(one.sequence))
            if job is None:
                continue
            if isinstance(sequence, Row):
                if sequence.ids and sequence.failure is None:
                    job.deliver(_step_of(sequence, one.text))
                if one.is_done:
                    job.deliver(sequence.failure or Ended(sequence.number, sequence.continuation()))
            elif one.is_done:
                for event in _of_sentence(sequence):
                    job.deliver(event)
            if one.is_done:
                del self._jobs[id(sequence)]

    def _drop(self, job: Job) -> None:
        for sequence in job.sequences:
            if self._jobs.pop(id(sequence), None) is not None:
                with torch.inference_mode():
                    self._batch.drop(sequence)

    def _guarded(self, job: Job, function: Callable[[], Any]) -> Any:
        """Return what a function returns; what it raises is the failure of its job alone."""
        try:
            with torch.inference_mode():
                return function()
        except Exception as error:  # noqa: BLE001 - it is the failure of a request, not of the thread
            job.has_left = True
            job.deliver(named_failure(error))
            return None


def _received(events: list[tuple[Callable[[Event], None], Event]]) -> None:
    for receive, event in events:
        receive(event)


def _step_of(row: Row, text: str) -> Step:
    alternatives = row.alternatives[-1] if row.num_alternatives else ()
    return Step(row.number, text, row.ids[-1], row.log_probabilities[-1], tuple(alternatives))


def _of_sentence(sentence: Sentence) -> Iterator[Event]:
    try:
        found = of_candidates(sentence.ranked())
    except RunFailure as error:
        yield error
        return
    for number, continuation in enumerate(found):
        yield Ended(number, continuation)


def _answer(calls: list[Call]) -> None:
    """Compute the inputs of calls of one key together; where that fails, each alone, so that each fails alone."""
    try:
        results = list(calls[0].function([one for call in calls for one in call.inputs]))
    except Exception as error:  # noqa: BLE001 - it is the failure of a request, not of the thread
        if len(calls) > 1:
            for call in calls:
                _answer([call])
        else:
            calls[0].result.set_exception(named_failure(error))
        return
    first = 0
    for call in calls:
        call.result.set_result(results[first : first + len(call.inputs)])
        first += len(call.inputs)


async def events(engine: Engine, job_of: Callable[[Callable[[Event], None]], Job]) -> Any:
    """Yield the events of a job until all its sequences have ended; a client that leaves takes it along.

    Args:
        engine: of the model.
        job_of: makes the job, given where its events go.

    Raises:
        InputError, RunFailure, Busy, Closing: it cannot be begun or ended.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
        engine.post(loop, queue.put_nowait, event)

    job = job_of(deliver)
    engine.submit(job)
    missing = job.num_sequences
    try:
        while missing:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            missing -= isinstance(event, Ended)
            yield event
    finally:
        engine.leave(job)
