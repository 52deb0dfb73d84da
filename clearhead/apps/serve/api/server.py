"""HTTP server: connections by uvicorn and h11 with limits of number, size and time, and metrics of requests.

The limits hold for connections, request heads, clients that send or read nothing, answers and streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final

import h11
import psutil
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.apps.serve.api.engine import BatchEngine
from clearhead.apps.serve.api.refusals import make_refusal
from clearhead.apps.serve.api.served import Models
from clearhead.apps.serve.gate import Traffic
from clearhead.base.errors import shorten
from clearhead.base.machine import give_memory_back

EVENT_STREAM: Final = "text/event-stream"
SECONDS_TO_ANSWER: Final = 600.0
"""Maximum seconds until an answer begins, and until a stream ends; OpenAI's clients wait as long."""
TICKS_BETWEEN: Final = 100
"""Server ticks, a tenth of a second each, before freed memory is returned to the system."""
SECONDS_TO_FINISH: Final = 60
"""Seconds that running requests have to finish after a signal."""
MOST_HEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of the first line and the headers, if they do not come in one piece."""
SECONDS_TO_ASK: Final = 30.0
"""Maximum seconds from opening a connection to the complete head of its first request."""
SECONDS_TO_READ: Final = 60.0
"""Maximum seconds for which an answer waits for a client that reads nothing."""
SECONDS_TO_HEAR: Final = 2.0
"""Seconds in which a refused connection stays open, so that the client can read the refusal."""


class Protocol(H11Protocol):
    """HTTP connection of one client.

    Attributes:
        idle_since: the time of the opening or of the last answer, in seconds of the event loop's clock.
    """

    idle_since: float = 0.0
    _waits: asyncio.TimerHandle | None = None
    _is_refused = False

    @property
    def is_idle(self) -> bool:
        """True if the connection can be closed without loss: no request is being read or answered."""
        is_used = self.flow.write_paused or self.transport.is_closing()
        return not is_used and (self._is_refused or self.conn.our_state is h11.IDLE)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer that limits the time until the first request."""
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self._wait(SECONDS_TO_ASK, self._never_asked)

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Process data from the client; an HTTP head that arrives in pieces gets no more time than a whole one."""
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if not self.flow.write_paused:
                self._stop_waiting()
        elif self._waits is None and self.timeout_keep_alive_task is None:
            self._wait(SECONDS_TO_ASK, self._never_asked)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer that limits the time of a client that does not read its answer."""
        super().pause_writing()
        self._wait(SECONDS_TO_READ, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client reads again."""
        super().resume_writing()
        if not self._is_refused:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not valid HTTP."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(431, f"the head of a request may have at most {MOST_HEAD_BYTES:,} bytes: send fewer headers")
        else:
            self._refuse(400, f"this is not a request of HTTP/1.1: {error or msg}")

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client that asks for another protocol gets its answer in HTTP/1.1."""

    def _never_asked(self) -> None:
        self._refuse(408, f"no request came within {SECONDS_TO_ASK:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer has begun, so a refusal can no longer be sent.
            self.transport.abort()
            return
        answer = make_refusal(status, message)
        headers = [(name, value) for name, value in answer.raw_headers if name != b"connection"]
        head = h11.Response(
            status_code=status, headers=[*headers, (b"connection", b"close")], reason=http.HTTPStatus(status).phrase
        )
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Do not close with unread bytes: the client would get a broken connection instead of the refusal.
        self.transport.write_eof()
        self._wait(SECONDS_TO_HEAR, self.transport.close)

    def _wait(self, seconds: float, end: Callable[[], None]) -> None:
        self._stop_waiting()
        self._waits = self.loop.call_later(seconds, end)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None


MOST_CONNECTIONS: Final = 960
SPARE_FILES: Final = 32
"""Files that the process may still open when the maximum number of connections is open."""
RETRY_SECONDS: Final = 0.05
IDLE_SECONDS: Final = 1.0
"""Seconds for which an idle connection is never closed."""
_LOGGER: Final = logging.getLogger("clearhead.apps.serve")


async def accept_connections(
    listener: socket.socket, make_protocol: Callable[[], Protocol], connections: Collection[Any]
) -> None:
    """Accept connections until the task is cancelled; at the limit, close an idle connection or wait.

    Args:
        listener: a socket that listens.
        make_protocol: function that makes the protocol of a connection.
        connections: protocols of the open connections, which add and remove themselves.
    """
    listener.setblocking(False)
    loop, most, is_full = asyncio.get_running_loop(), most_connections(), False
    while True:
        try:
            if len(connections) < most:
                connection, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(make_protocol, connection)
                is_full = is_full and len(connections) > most // 2
                continue
        except ConnectionError:  # the client has already left
            continue
        except OSError:  # too many files are open
            pass
        if not is_full:
            # Log one line, until half of the connections have ended.
            message = "%d connections are open: closing idle ones; while all are busy, new ones wait"
            _LOGGER.warning(message, len(connections))
        is_full = True
        now = loop.time()
        idle = [protocol for protocol in connections if protocol.is_idle and now - protocol.idle_since >= IDLE_SECONDS]
        if idle:
            min(idle, key=lambda protocol: protocol.idle_since).transport.abort()
        await asyncio.sleep(0 if idle else RETRY_SECONDS)


def most_connections() -> int:
    """Return the maximum number of open connections; the limit of open files may lower it."""
    with contextlib.suppress(ImportError, AttributeError):  # Windows has no such limit
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            return max(min(MOST_CONNECTIONS, limit - int(psutil.Process().num_fds()) - SPARE_FILES), 1)
    return MOST_CONNECTIONS


class Server(uvicorn.Server):
    """Server that finishes running requests and refuses new ones after a signal; a second signal ends it at once.

    Args:
        app: the application that `make_application` returned.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=SECONDS_TO_FINISH,
                timeout_keep_alive=30,
                http=Protocol,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                ws="none",
                server_header=False,
            )
        )
        self._traffic: Traffic = app.state.traffic
        self._deadline = 0.0
        self._accepting: list[asyncio.Task[None]] = []
        self.received: signal.Signals | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections; uvicorn itself would exceed the limit of open files."""
        await super().startup(sockets=[])
        self._accepting = [
            asyncio.create_task(accept_connections(listener, self._make_protocol, self.server_state.connections))
            for listener in sockets or ()
        ]

    def _make_protocol(self) -> Protocol:
        return Protocol(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end those that are open."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down at SIGINT or SIGTERM; a second signal ends the server at once."""
        self.force_exit: bool = self._traffic.is_closing
        self.received = signal.Signals(sig)
        self._traffic.is_closing = True
        self._deadline = time.monotonic() + SECONDS_TO_FINISH
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end the server: not while requests run, so that new ones are refused with a status."""
        if counter % TICKS_BETWEEN == 0:
            # Large bodies leave free memory that the C library would keep. The call takes one or two milliseconds.
            give_memory_back()
        ends = await super().on_tick(counter)
        waits = self._traffic.num_running > 0 and time.monotonic() < self._deadline and not self.force_exit
        return ends and not waits


def hosts_of(host: str, port: int) -> tuple[str, ...] | None:
    """Return the allowed Host headers of a loopback address; None for an address that other machines may reach.

    Args:
        host: the address that the server listens on.
        port: the port of the server.
    """
    if host not in ("127.0.0.1", "localhost", "::1"):
        return None
    names: Sequence[str] = (host, "127.0.0.1", "localhost", "[::1]")
    return tuple(dict.fromkeys(f"{name}:{port}" for name in names))


def limit_time(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that slow requests and endless streams end with an error."""

    async def answer_in_time(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # it lasts as long as the server
            await app(scope, receive, send)
            return
        limit, is_stream = asyncio.timeout(SECONDS_TO_ANSWER), False

        async def note_start(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(EVENT_STREAM)
                limit.reschedule(limit.when() if is_stream else None)
            await send(message)

        try:
            async with limit:
                await app(scope, receive, note_start)
        except TimeoutError:
            if not limit.expired():
                raise
            missing = f"no {'end of this stream' if is_stream else 'answer'} within {SECONDS_TO_ANSWER:g} seconds"
            answer = make_refusal(503, f"{missing}: ask for less, or try again later")
            if is_stream:
                await send({"type": "http.response.body", "body": b"data: " + bytes(answer.body) + b"\n\n"})
            else:
                await answer(scope, receive, send)

    return answer_in_time


_GAUGES: Final[tuple[tuple[str, str, Callable[[BatchEngine], float]], ...]] = (
    ("clearhead_running", "Sequences being generated.", lambda engine: engine.num_running),
    ("clearhead_waiting", "Waiting requests.", lambda engine: engine.num_waiting),
    ("clearhead_generated_tokens", "Tokens generated since the start.", lambda engine: engine.num_tokens),
    ("clearhead_read_tokens", "Prompt tokens read since the start.", lambda engine: engine.num_read),
    ("clearhead_shared_tokens", "Prompt tokens taken from shared prefixes.", lambda engine: engine.num_shared),
    ("clearhead_step_seconds", "Seconds in steps of the batch.", lambda engine: engine.step_seconds),
)


class ServerMetrics:
    """Prometheus metrics of the server: requests, seconds, and the counts of each engine.

    Args:
        models: the models of the server.
    """

    def __init__(self, models: Models) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "clearhead_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram("clearhead_request_seconds", "Seconds until an answer.", ["path"], registry=registry)
        for name, what, read in _GAUGES:
            gauge = Gauge(name, what, ["model"], registry=registry)
            for served in models:
                gauge.labels(served.name).set_function(partial(read, served.engine))

    def router(self) -> APIRouter:
        """Return the route /metrics."""
        router = APIRouter()

        @router.get("/metrics", response_class=PlainTextResponse)
        async def metrics() -> Response:
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

        return router

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application: count each request, and log its path, status and seconds until the answer.

        Args:
            app: the application that answers the requests.
        """

        async def count_request(scope: Scope, receive: Receive, send: Send) -> None:
            begun = time.perf_counter()

            async def note_start(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._count(scope, message["status"], time.perf_counter() - begun)
                await send(message)

            await app(scope, receive, note_start)

        return count_request

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        # Use the path of the route: a text from a client must not become the name of a metric.
        path = getattr(scope.get("route"), "path", "unknown")
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)
        _LOGGER.info("%s %s %d %.3f s", shorten(scope["method"]), path, status, seconds)
