"""Engine of one model: the requests of all clients share one running batch. Engines take turns in one thread.

Between two steps of the batch the engine drops jobs whose client has disconnected, admits new ones, and reads a
chunk of a prompt. Inputs without generation (vectors, labels, scores of texts) are computed in chunks, too.

Memory is shared by two budgets of cached tokens. A job enters the first budget with its prompt and the first
`RESERVED_TOKENS` tokens of its answer. A job that outgrows this needs room in the second budget, for long jobs. The
oldest long jobs run; the others pause with their keys and values. So a new job waits only until other jobs have begun,
not until long ones end. An ordinary job has all its memory when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch

from clearhead.apps.serve.api.refusals import Busy, Closing, to_client_error
from clearhead.base.errors import RunFailure
from clearhead.base.machine import free_memory
from clearhead.base.progress import Counted, Display, use_display
from clearhead.core import Transformer
from clearhead.fast.memory import cache_tokens
from clearhead.generate.batching import GPU_ROWS, device_of
from clearhead.generate.continuation import GenerateRequest, PromptReader, check_limits
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefill import CHUNK_TOKENS, Prefixes, can_share
from clearhead.generate.results import Continuation, GeneratedSequence, Sentence
from clearhead.generate.running import Generated, Paused, PrefilledMember, RunningBatch, SequenceProgress

MOST_WAITING: Final = 256
"""Maximum number of requests that wait; one more is refused. The prompts of a request wait inside it."""
MOST_ROWS, MOST_TOKENS = 64, 2**16
"""Budget of jobs that begin, and budget of long jobs, on a CPU: rows, and tokens in the cache."""
RESERVED_TOKENS: Final = 1024
"""Generated tokens of each row for which a job reserves memory; a long job grows by the same number."""
MOST_PROMPT_TOKENS: Final = 2**13
"""Prompt tokens of all rows of a job; a job that reads more is long from its start."""
MOST_JOB_TOKENS, MOST_SEARCH_TOKENS = 2**17, 2**15
"""Tokens in the cache at which a job ends. A beam search cannot pause, so it has fewer."""
CHUNK_CHARACTERS: Final = 2**13
"""Characters of inputs that are computed between two steps of the batch; a single input may have more."""
MOST_SHARED_BYTES: Final = 2**30
"""Bytes of the cached prefixes of prompts; never more than an eighth of the memory that is free at the start."""


@dataclass(frozen=True)
class TokenEvent:
    """Event for one generated token of a sequence.

    Args:
        number: the number of the sequence in its request, from 0.
        text: the text that became final with this token.
        token: the id of the token.
        log_probability: the log-probability of the token.
        alternatives: the most probable ids with their log-probabilities, as many as the request asks for.
    """

    number: int
    text: str
    token: int
    log_probability: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EndEvent:
    """Event for the end of one generated sequence."""

    number: int
    continuation: Continuation


Event = TokenEvent | EndEvent | Exception


@runtime_checkable
class ChunkedPrompt(Protocol):
    """A prompt, or a text to translate, that is read in chunks, alone or together with others."""

    is_done: bool
    num_shared: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def kind(self) -> Hashable:
        """Key that is equal for prompts that may be read together; None means that this prompt is read alone."""

    def step(self, others: Sequence[Any] = ()) -> list[PrefilledMember] | None:
        """Read the next chunk, with all of `others`; after the last chunk return the prefilled rows of all prompts."""


@dataclass(eq=False)
class EngineJob:
    """Work of an engine: generation for one prompt, or translation of one text.

    Args:
        begin: function that starts to read the prompt, in the thread of the engines.
        num_sequences: the number of generated sequences; each delivers one `EndEvent`.
        num_rows: the number of rows that the job takes in the batch.
        num_read: the number of prompt tokens in each row.
        limit: the maximum number of tokens generated in each row.
        alternatives: the number of the most probable ids that come with each token.
        is_search: True if the sequences come from one beam search.
        deliver: function that gets every event, in the thread of the engines.
        sequences: the running sequences, once the prompt has been read.
        paused: the paused rows of a long job.
        is_over: True if the job was cancelled or has failed.
        is_long: True if the job runs in the budget of long jobs.
    """

    begin: Callable[[], ChunkedPrompt]
    num_sequences: int
    num_rows: int
    num_read: int
    limit: int
    alternatives: int = 0
    is_search: bool = False
    deliver: Callable[[Event], None] = lambda event: None
    sequences: list[Generated] = field(default_factory=list)
    paused: list[Paused] = field(default_factory=list)
    is_over: bool = False
    is_long: bool = False

    @property
    def num_generated(self) -> int:
        """Number of tokens generated in the longest row of the job."""
        return max((len(row.ids) for row in self.sequences if isinstance(row, GeneratedSequence)), default=0)

    @property
    def cost(self) -> int:
        """Number of KV cache tokens that the job needs until it grows again."""
        growth = RESERVED_TOKENS * (self.num_generated // RESERVED_TOKENS + 1)
        return self.num_rows * (self.num_read + (self.limit if self.is_search else min(self.limit, growth)))

    @property
    def needs_growth(self) -> bool:
        """True if the job belongs in the budget of long jobs: a long prompt, or `RESERVED_TOKENS` generated."""
        is_large = self.num_rows * self.num_read > MOST_PROMPT_TOKENS
        return not self.is_search and (is_large or self.num_generated >= RESERVED_TOKENS)

    @classmethod
    def of_request(cls, engine: BatchEngine, request: GenerateRequest, alternatives: int = 0) -> EngineJob:
        """Return the engine's job for a request with one prompt, or with one text to translate.

        Args:
            engine: the engine that runs the job.
            request: the request, with one prompt or one text to translate.
            alternatives: the number of the most probable ids that come with each token.

        Raises:
            InputError: the prompt cannot be read.
        """
        options = request.options
        (limit,) = check_limits(engine.tree, request)
        num_read = sum(len(ids[0]) for ids in (request.prompts, request.sources) if ids is not None)
        if isinstance(options, GenerateOptions):
            most = (MOST_SEARCH_TOKENS if options.is_search else MOST_JOB_TOKENS) // options.num_rows - num_read
            limit = min(limit, max(most, RESERVED_TOKENS))
            request = replace(request, options=replace(options, max_new_tokens=min(options.max_new_tokens, limit)))
        begin = partial(PromptReader, engine.tree, request, engine.prefixes)
        return cls(begin, options.num_sequences, options.num_rows, num_read, limit, alternatives, options.is_search)


@dataclass(eq=False)
class EngineCall:
    """Request to call a function, such as embedding, on a list of inputs; calls with equal keys run together."""

    key: Hashable
    function: Callable[[list[Any]], Sequence[Any]]
    inputs: list[Any]
    result: Future[list[Any]] = field(default_factory=Future)
    results: list[Any] = field(default_factory=list)

    def next_inputs(self, room: int) -> list[Any]:
        """Return the next inputs of the call that fit into `room` characters, but at least one."""
        missing = self.inputs[len(self.results) :]
        sizes = itertools.accumulate(map(_num_characters, missing))
        return missing[: max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= room, sizes)))]

    def finish(self, error: Exception | None = None) -> None:
        """Set the result of the call, unless its client has disconnected."""
        if not self.result.done() and self.result.set_running_or_notify_cancel():
            if error is None:
                self.result.set_result(self.results)
            else:
                self.result.set_exception(to_client_error(error))


class _AllDisconnected(Exception):
    """The clients of all running calls have disconnected."""


@dataclass(frozen=True)
class _DisconnectDisplay(Display):
    """End the computation of calls between two batches when all their clients have disconnected."""

    calls: Sequence[EngineCall]

    def update(self, done: int, total: int, what: Counted) -> None:
        """Check at each count whether any client still waits.

        Raises:
            _AllDisconnected: all clients of the calls have disconnected.
        """
        if all(call.result.cancelled() for call in self.calls):
            raise _AllDisconnected


class EngineThread:
    """Thread in which the engines of this process take turns.

    OpenMP threads belong to the thread that calls them. Two engine threads would have more OpenMP threads than there
    are processors. They would sleep whenever they wait for each other, and steps would take twice as long.
    """

    def __init__(self) -> None:
        self.changed: threading.Condition = threading.Condition()
        self._engines: list[BatchEngine] = []
        self._turning: BatchEngine | None = None
        self._thread: threading.Thread | None = None

    def add(self, engine: BatchEngine) -> None:
        """Add an engine; the first one starts the thread."""
        with self.changed:
            self._engines.append(engine)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
                self._thread.start()

    def remove(self, engine: BatchEngine) -> None:
        """Remove an engine after its turn has ended; the thread ends with the last one."""
        with self.changed:
            if engine in self._engines:
                self._engines.remove(engine)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._turning is not engine)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self._engines or any(engine.is_due for engine in self._engines))
                if not self._engines:
                    self._thread = None
                    return
                due = [engine for engine in self._engines if engine.is_due]
            for engine in due:
                with self.changed:
                    if engine not in self._engines:
                        continue
                    self._turning = engine
                try:
                    engine.turn()
                except Exception as error:  # noqa: BLE001 - a thread that ends would leave all clients waiting
                    engine.fail(error)
                with self.changed:
                    self._turning = None
                    self.changed.notify_all()


_THREAD: Final = EngineThread()


class BatchEngine:
    """The running batch of one model, with its queue of jobs and calls.

    Args:
        tree: the module that runs every request, in evaluation mode.
        shares_prefixes: True if prompts with an equal prefix share its keys and values, if the model allows it.
    """

    def __init__(self, tree: Transformer, *, shares_prefixes: bool = True) -> None:
        self.tree = tree
        self.prefixes: Prefixes | None = None
        if shares_prefixes and can_share(tree):
            self.prefixes = Prefixes(min(MOST_SHARED_BYTES, free_memory() // 8))
        self._gpu_tokens = cache_tokens(tree) // 2 if device_of(tree).type != "cpu" else None  # for each budget
        self._batch = RunningBatch(tree)
        self._changed = _THREAD.changed
        self._waiting: deque[deque[EngineJob]] = deque()  # waiting jobs, one queue per request
        self._calls: deque[EngineCall] = deque()
        self._leaving: list[EngineJob] = []
        self._present: dict[int, EngineJob] = {}  # running jobs by their identity, the oldest first
        self._reading: deque[tuple[EngineJob, ChunkedPrompt]] = deque()
        self._jobs: dict[int, EngineJob] = {}  # jobs by the identity of each of their sequences
        self._is_closing = False
        self.num_tokens: int = 0
        self.num_read: int = 0
        self.num_shared: int = 0
        self.step_seconds: float = 0.0
        self._posted: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}
        _THREAD.add(self)

    @property
    def num_waiting(self) -> int:
        """Number of requests with at least one waiting job, and of waiting calls."""
        return len(self._waiting) + sum(not call.result.cancelled() for call in self._calls)

    @property
    def num_running(self) -> int:
        """Number of sequences being generated, plus the number of prompts being read."""
        return len(self._jobs) + len(self._reading)

    def submit(self, jobs: Sequence[EngineJob]) -> None:
        """Queue the jobs of one request; requests take turns, so that a request with many jobs delays no other.

        Raises:
            Busy: too many requests wait; none of the jobs is queued.
            Closing: the server is shutting down.
        """
        with self._changed:
            self._refuse_more()
            self._waiting += [deque(jobs)] if jobs else []
            self._changed.notify_all()

    def call(self, key: Hashable, function: Callable[[list[Any]], Sequence[Any]], inputs: list[Any]) -> Future[Any]:
        """Return the future results of a function for inputs, which are computed a chunk at a time.

        Args:
            key: the key of the call; calls with equal keys are computed together.
            function: function that returns one result for each of its inputs.
            inputs: the inputs of this call. After the future is cancelled, no further inputs are computed.

        Raises:
            Busy: too many requests wait.
            Closing: the server is shutting down.
        """
        call = EngineCall(key, function, inputs)
        with self._changed:
            self._refuse_more()
            self._calls.append(call)
            self._changed.notify_all()
        return call.result

    def post(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None], event: Any) -> None:
        """Queue an event for delivery at the end of the turn: the loop calls `receive(event)`. Engines' thread only."""
        self._posted.setdefault(loop, []).append((receive, event))

    def leave(self, jobs: Sequence[EngineJob]) -> None:
        """Cancel jobs: waiting jobs at once, running jobs at the next turn."""
        leaving = {id(job) for job in jobs}
        with self._changed:
            waiting = [deque(job for job in request if id(job) not in leaving) for request in self._waiting]
            self._waiting = deque(filter(None, waiting))
            self._leaving += jobs
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the engine's current turn, and stop the engine."""
        with self._changed:
            self._is_closing = True
        _THREAD.remove(self)

    def _refuse_more(self) -> None:
        if self._is_closing:
            raise Closing("the server is shutting down: try again later")
        if self.num_waiting >= MOST_WAITING:
            raise Busy(f"{self.num_waiting} requests are waiting already: try again later")

    # --- in the thread of the engines ---

    @property
    def is_due(self) -> bool:
        """True if the next turn has work to do."""
        return bool(self._waiting or self._calls or self._leaving or self._present)

    def turn(self) -> None:
        """Drop cancelled jobs, admit new ones, read one chunk of a prompt, and run one step of the batch."""
        with self._changed:
            leaving, self._leaving = self._leaving, []
        for job in leaving:
            self._drop(job)
        with self._changed:
            chunk = self._take_chunk()
            starting = self._take_jobs()
        if chunk:
            _answer(chunk)
            with self._changed:
                # Calls that are not done have their next turn after the other calls.
                self._calls += [call for call, _ in chunk if not call.result.done()]
        for job in starting:
            self._run_guarded(job, partial(self._begin, job))
        with torch.inference_mode():
            self._share_growth()
        self._read_piece()
        self._step()
        self._hand_over()

    def fail(self, error: Exception) -> None:
        """Fail all jobs that are being read or generated, after a turn that raised an error."""
        self._reading.clear()
        self._fail_batch(error)
        self._hand_over()

    def _fail_batch(self, error: Exception) -> None:
        reading = {id(job) for job, _ in self._reading}
        failed = [job for job in self._present.values() if id(job) not in reading]
        self._jobs, self._batch = {}, RunningBatch(self.tree)
        for job in failed:
            self._end(job, to_client_error(error))

    def _end(self, job: EngineJob, error: Exception) -> None:
        """Deliver the failure of a job, and remove the job."""
        job.is_over = True
        job.paused.clear()
        self._present.pop(id(job), None)
        job.deliver(error)

    def _hand_over(self) -> None:
        """Wake each event loop once, with all events posted for it."""
        posted, self._posted = self._posted, {}
        for loop, events in posted.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no client waits
                loop.call_soon_threadsafe(_deliver_events, events)

    def _take_chunk(self) -> list[tuple[EngineCall, list[Any]]]:
        """Return the next inputs of the call that waits longest, and of other calls with the same key."""
        self._calls = deque(call for call in self._calls if not call.result.cancelled())
        chunk, room = list[tuple[EngineCall, list[Any]]](), CHUNK_CHARACTERS
        for call in list(self._calls):
            if room > 0 and call.key == self._calls[0].key:
                inputs = call.next_inputs(room)
                room -= sum(map(_num_characters, inputs))
                chunk.append((call, inputs))
        taken = {id(call) for call, _ in chunk}
        self._calls = deque(call for call in self._calls if id(call) not in taken)
        return chunk

    def _take_jobs(self) -> list[EngineJob]:
        """Remove and return the jobs that begin now: one of each request in turn, while the budget has room."""
        taken, skipped, is_full = list[EngineJob](), deque[deque[EngineJob]](), False
        while self._waiting and not is_full:
            request = self._waiting.popleft()
            if self._fits(request[0]):
                taken.append(job := request.popleft())
                job.is_long = job.needs_growth
                self._present[id(job)] = job
                self._waiting += [request] if request else []
            else:
                # A short job that has no room stops the queue, so that no later job overtakes it. A long job does not.
                is_full = not request[0].needs_growth
                skipped.append(request)
        self._waiting.extendleft(reversed(skipped))
        return taken

    def _fits(self, job: EngineJob) -> bool:
        """Return True if the rows and tokens of a waiting job fit into its budget. The first job always fits."""
        others = [other for other in self._present.values() if other.is_long == job.needs_growth]
        rows, tokens = sum(other.num_rows for other in others), sum(other.cost for other in others)
        return not others or self._has_room(rows + job.num_rows, tokens + job.cost)

    def _has_room(self, rows: int, tokens: int) -> bool:
        """Return True if these rows and cached tokens are within one budget of the device."""
        most = (MOST_ROWS, MOST_TOKENS) if self._gpu_tokens is None else (GPU_ROWS, self._gpu_tokens)
        return rows <= most[0] and tokens <= most[1]

    def _share_growth(self) -> None:
        """Run the oldest long jobs that fit into the budget of long jobs, and pause the other long jobs."""
        rows = tokens = 0
        for job in [job for job in self._present.values() if job.needs_growth]:
            is_first = not rows
            rows, tokens = rows + job.num_rows, tokens + job.cost
            if is_first or self._has_room(rows, tokens):
                job.is_long = True
                paused, job.paused = job.paused, []
                self._batch.resume(paused)
            elif not job.paused and job.sequences:
                running = [row for row in job.sequences if id(row) in self._jobs]
                job.paused = [row for row in map(self._batch.pause, running) if row is not None]

    def _begin(self, job: EngineJob) -> None:
        self._reading.append((job, job.begin()))

    def _read_piece(self) -> None:
        """Read one chunk of the prompt that waits longest, together with other prompts that fit into the chunk."""
        some = self._next_readings()
        if not some:
            return
        started = self._read(some)
        if started is None:
            # The next chunk of this prompt comes after the chunks of the other prompts.
            self._reading.rotate(-1)
            return
        self._reading = deque(entry for entry in self._reading if entry not in some)
        of_jobs = iter([sequence for start in started for sequence in start.member.sequences])
        for job, reading in some:
            if job.is_over:  # the job has failed
                continue
            self.num_read += reading.num_tokens - reading.num_shared
            self.num_shared += reading.num_shared
            job.sequences = list(itertools.islice(of_jobs, 1 if job.is_search else job.num_sequences))
            for sequence in job.sequences:
                if isinstance(sequence, GeneratedSequence):
                    sequence.num_alternatives = job.alternatives
                self._jobs[id(sequence)] = job
        if started:
            self._advance(partial(self._batch.join, started))

    def _next_readings(self) -> list[tuple[EngineJob, ChunkedPrompt]]:
        """Return the first prompt, and the later ones that may be read together with it."""
        self._reading = deque(entry for entry in self._reading if not entry[0].is_over)
        some, tokens = list[tuple[EngineJob, ChunkedPrompt]](), 0
        for job, reading in self._reading:
            is_alike = not some or (reading.kind is not None and reading.kind == some[0][1].kind)
            if is_alike and (not some or tokens + reading.num_tokens <= CHUNK_TOKENS):
                some.append((job, reading))
                tokens += reading.num_tokens
        return some

    def _read(self, some: list[tuple[EngineJob, ChunkedPrompt]]) -> list[PrefilledMember] | None:
        """Read several prompts together; if that fails, read each alone, so that only its own job fails."""
        (job, first), others = some[0], [reading for _, reading in some[1:]]
        if not others:
            return cast("list[PrefilledMember] | None", self._run_guarded(job, first.step))
        try:
            with torch.inference_mode():
                return first.step(others)
        except Exception:  # noqa: BLE001 - a prompt that fails alone reports to its own job
            return [start for entry in some for start in self._read([entry]) or ()]

    def _step(self) -> None:
        if self._batch.members:
            self._advance(self._batch.step)

    def _advance(self, move: Callable[[], list[SequenceProgress]]) -> None:
        """Run one operation of the batch; if it fails, all its requests fail, and an empty batch replaces it."""
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

    def _tell(self, progress: list[SequenceProgress]) -> None:
        for update in progress:
            sequence, job = update.sequence, self._jobs.get(id(update.sequence))
            if job is None:
                continue
            if isinstance(sequence, GeneratedSequence):
                if sequence.ids and sequence.failure is None:
                    job.deliver(_step_of(sequence, update.text))
                if update.is_done:
                    job.deliver(sequence.failure or EndEvent(sequence.number, sequence.continuation()))
            elif update.is_done:
                for event in _of_sentence(sequence):
                    job.deliver(event)
            if update.is_done:
                del self._jobs[id(sequence)]
                if not any(id(other) in self._jobs for other in job.sequences):
                    self._present.pop(id(job), None)

    def _drop(self, job: EngineJob) -> None:
        job.is_over = True
        self._present.pop(id(job), None)
        job.paused.clear()
        for sequence in job.sequences:
            if self._jobs.pop(id(sequence), None) is not None:
                with torch.inference_mode():
                    self._batch.drop(sequence)

    def _run_guarded(self, job: EngineJob, function: Callable[[], Any]) -> Any:
        """Return the result of a function; an error ends its job alone, and the result is None."""
        try:
            with torch.inference_mode():
                return function()
        except Exception as error:  # noqa: BLE001 - it is the failure of a request, not of the thread
            self._end(job, to_client_error(error))
            return None


def _deliver_events(events: list[tuple[Callable[[Any], None], Any]]) -> None:
    for receive, event in events:
        receive(event)


def _step_of(row: GeneratedSequence, text: str) -> TokenEvent:
    alternatives = row.alternatives[-1] if row.num_alternatives else ()
    return TokenEvent(row.number, text, row.ids[-1], row.log_probabilities[-1], tuple(alternatives))


def _of_sentence(sentence: Sentence) -> Iterator[Event]:
    try:
        continuations = sentence.best_candidates()
    except RunFailure as error:
        yield error
        return
    for number, continuation in enumerate(continuations):
        yield EndEvent(number, continuation)


def _num_characters(value: Any) -> int:
    """Return the size of an input: characters of a text, items of a tuple, or characters of any other value's `str`."""
    return len(value) if isinstance(value, str | tuple) else len(f"{value}")


def _answer(chunk: list[tuple[EngineCall, list[Any]]]) -> None:
    """Compute the inputs of calls with one key together; if that fails, compute each call alone."""
    calls = [call for call, _ in chunk]
    try:
        with use_display(_DisconnectDisplay(calls)):
            results = list(calls[0].function([value for _, inputs in chunk for value in inputs]))
    except _AllDisconnected:
        return
    except Exception as error:  # noqa: BLE001 - it is the failure of a request, not of the thread
        if len(chunk) > 1:
            for entry in chunk:
                _answer([entry])
        else:
            calls[0].finish(error)
        return
    first = 0
    for call, inputs in chunk:
        call.results += results[first : first + len(inputs)]
        first += len(inputs)
        if len(call.results) == len(call.inputs):
            call.finish()


async def events(
    engine: BatchEngine, jobs: Sequence[EngineJob]
) -> AsyncGenerator[tuple[int, TokenEvent | EndEvent], None]:
    """Yield the events of the jobs of one request, each with the number of its job, until all sequences have ended.

    All jobs end with the first failure, and when the generator is closed.

    Args:
        engine: the engine that runs the jobs.
        jobs: the jobs of one request.

    Raises:
        InputError, RunFailure, Busy, Closing: a job cannot start, or fails.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

    def deliver(number: int, event: Event) -> None:
        engine.post(loop, queue.put_nowait, (number, event))

    for number, job in enumerate(jobs):
        job.deliver = partial(deliver, number)
    engine.submit(jobs)
    missing = sum(job.num_sequences for job in jobs)
    try:
        while missing:
            number, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            missing -= isinstance(event, EndEvent)
            yield number, event
    finally:
        engine.leave(jobs)
