"""The application of the server: who may ask, how much, and what is refused with which status."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.apps.serve.api.accepting import accept_connections
from clearhead.apps.serve.api.bodies import in_thread
from clearhead.apps.serve.api.failures import Busy, Closing
from clearhead.apps.serve.api.generating import EVENT_STREAM, generating_router
from clearhead.apps.serve.api.inside import inside_router
from clearhead.apps.serve.api.metrics import Metrics
from clearhead.apps.serve.api.protocol import MOST_HEAD_BYTES, Protocol
from clearhead.apps.serve.api.reading import reading_router
from clearhead.apps.serve.api.refusals import Refusal, refused
from clearhead.apps.serve.api.served import Models, UnknownModel
from clearhead.apps.serve.api.tasks import tasks_router
from clearhead.apps.serve.gate import Access, Gate, Traffic
from clearhead.apps.serve.work import Left, Workers
from clearhead.base.errors import ContextTooLong, InputError, Reference, RunFailure
from clearhead.base.machine import give_memory_back

SECONDS_TO_ANSWER: Final = 600.0
"""Until an answer begins, and until a stream ends; clients of OpenAI wait as long."""
TICKS_BETWEEN: Final = 100
"""Of the server, a tenth of a second each, before freed memory is given back to the system."""
SECONDS_TO_FINISH: Final = 60
"""That running requests have after a signal."""


_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": Refusal, "description": "A refusal."}}


def make_application(models: Models, access: Access, *, openapi: bool = False) -> FastAPI:
    """Return the application; whoever makes the models ends them.

    Args:
        models: that answer.
        access: who may ask.
        openapi: True if /openapi.json is served although requests need a key. It then needs the key, too.
    """
    workers, metrics = Workers(), Metrics(models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        workers.join()

    path = "/openapi.json" if openapi or not access.keys else None
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=path, responses=_REFUSALS)
    app.title = "clearhead"
    for make in (generating_router, reading_router, tasks_router):
        app.include_router(make(models))
    for served in models:
        for make in (generating_router, reading_router):
            app.include_router(make(Models([served], {})), prefix=f"/models/{served.name}")
    app.include_router(inside_router(models, workers))
    app.include_router(metrics.router())
    app.add_exception_handler(Left, lambda request, error: Response(status_code=499))
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(_in_time)
    app.state.traffic = Traffic()
    app.add_middleware(Gate, access=access, traffic=app.state.traffic, refuse=refused)
    app.add_middleware(metrics.counting)
    if path is not None:
        app.openapi()  # kept: to make it takes longer than a callback of the event loop may
    return app


def _in_time(app: ASGIApp) -> ASGIApp:
    """Return an application that ends requests that are not answered in time, and streams, with an error."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        limit, is_stream = asyncio.timeout(SECONDS_TO_ANSWER), False

        async def begun(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(EVENT_STREAM)
                limit.reschedule(limit.when() if is_stream else None)
            await send(message)

        try:
            async with limit:
                await app(scope, receive, begun)
        except TimeoutError:
            if not limit.expired():
                raise
            missing = f"no {'end of this stream' if is_stream else 'answer'} within {SECONDS_TO_ANSWER:g} seconds"
            answer = refused(503, f"{missing}: ask for less, or try again later")
            if is_stream:
                await send({"type": "http.response.body", "body": b"data: " + bytes(answer.body) + b"\n\n"})
            else:
                await answer(scope, receive, send)

    return bounded


_STATUS: Final[dict[type[Exception], int]] = {
    UnknownModel: 404,
    InputError: 400,
    RunFailure: 500,
    Busy: 429,
    Closing: 503,
}


_CLIENT_NAMES: Final = {"max_new_tokens": "max_tokens", "beyond_positions": "--beyond-positions on the server"}


def _answer(status: int) -> Any:
    def handler(_: Request, error: Exception) -> Response:
        if isinstance(error, InputError):
            error.lines = tuple(line.renamed(_as_client) for line in error.lines)
        code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
        return refused(status, f"{error}", code=code)

    return handler


def _as_client(reference: Reference) -> str | Reference:
    """Return the name of an argument in OpenAI's protocol, or the server option that sets it."""
    return _CLIENT_NAMES.get(reference.name, reference)


def _unexpected(_: Request, error: Exception) -> Response:
    return refused(500, f"unexpected failure: {type(error).__name__}")


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path: see /v1/models", 405: "this path takes another method"}
    return refused(error.status_code, known.get(error.status_code, str(error.detail)))


async def _misread(_: Request, error: Exception) -> Response:
    return await in_thread(_name_fault, error)


def _name_fault(error: Exception) -> Response:
    """Return a refusal that names the first field with a fault."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    path = [str(name) for name in fault["loc"] if name != "body"]
    # A union tries each of its types; the first name is the field.
    field = path[0] if path else None
    if fault["type"] == "json_invalid":
        return refused(400, "the body is not JSON")
    if isinstance(fault.get("input"), bytes):
        return refused(400, "the body is not declared as JSON: send the header Content-Type: application/json")
    if fault["type"] == "extra_forbidden":
        name = ".".join(name for name in path if not name.startswith(("list[", "function-")))
        return refused(400, f"{name} is not supported: leave it out", name)
    if fault["type"] == "missing":
        return refused(400, f"{'.'.join(path) or 'the body'} is missing", field)
    sentence = fault["msg"][:1].lower() + fault["msg"][1:]
    return refused(400, f"{field or 'the body'}: {sentence}, received {_shown(fault.get('input'))}", field)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Server(uvicorn.Server):
    """Finishes what runs at the first signal, and tells who comes then that the server ends; a second one ends it.

    Args:
        app: as `make_application` returned it.
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
        """Handle SIGINT and SIGTERM."""
        self.force_exit: bool = self._traffic.is_closing
        self.received = signal.Signals(sig)
        self._traffic.is_closing = True
        self._deadline = time.monotonic() + SECONDS_TO_FINISH
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: not while requests run, so that others can be refused with a status."""
        if counter % TICKS_BETWEEN == 0:
            # Bodies of megabytes leave holes that would be kept. It takes a millisecond or two.
            give_memory_back()
        ends = await super().on_tick(counter)
        waits = self._traffic.num_running > 0 and time.monotonic() < self._deadline and not self.force_exit
        return ends and not waits


def hosts_of(host: str, port: int) -> tuple[str, ...] | None:
    """Return the names by which programs of this machine reach an address; None: it is open to others.

    Args:
        host: that the server listens on.
        port: its number.
    """
    if host not in ("127.0.0.1", "localhost", "::1"):
        return None
    names: Sequence[str] = (host, "127.0.0.1", "localhost", "[::1]")
    return tuple(dict.fromkeys(f"{name}:{port}" for name in names))
