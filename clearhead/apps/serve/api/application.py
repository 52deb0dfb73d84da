"""Application of the server: its routes, the status of each refusal, time limits, metrics and a log of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.apps.serve.api.bodies import in_thread
from clearhead.apps.serve.api.engine import Engine
from clearhead.apps.serve.api.generating import EVENT_STREAM, generating_router
from clearhead.apps.serve.api.inside import inside_router
from clearhead.apps.serve.api.reading import reading_router
from clearhead.apps.serve.api.refusals import Busy, Closing, Refusal, refused
from clearhead.apps.serve.api.served import Models, UnknownModel
from clearhead.apps.serve.api.tasks import tasks_router
from clearhead.apps.serve.gate import Access, Gate, Traffic
from clearhead.apps.serve.work import Left, Workers
from clearhead.base.errors import ContextTooLong, InputError, Reference, RunFailure, shortened

SECONDS_TO_ANSWER: Final = 600.0
"""Until an answer begins, and until a stream ends; clients of OpenAI wait as long."""
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


_GAUGES: Final[tuple[tuple[str, str, Callable[[Engine], float]], ...]] = (
    ("clearhead_running", "Sequences that are generated.", lambda engine: engine.num_running),
    ("clearhead_waiting", "Requests that wait.", lambda engine: engine.num_waiting),
    ("clearhead_generated_tokens", "Tokens generated since the start.", lambda engine: engine.num_tokens),
    ("clearhead_read_tokens", "Tokens of prompts read since the start.", lambda engine: engine.num_read),
    ("clearhead_shared_tokens", "Tokens of prompts taken from equal beginnings.", lambda engine: engine.num_shared),
    ("clearhead_step_seconds", "Seconds in steps of the batch.", lambda engine: engine.step_seconds),
)
LOGGER: Final = logging.getLogger("clearhead.apps.serve")


class Metrics:
    """The metrics of one application.

    Args:
        models: that it serves.
    """

    def __init__(self, models: Models) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter("clearhead_requests", "Requests by path and status.", ["path", "status"], registry=own)
        self._seconds = Histogram("clearhead_request_seconds", "Seconds until an answer.", ["path"], registry=own)
        for name, what, read in _GAUGES:
            gauge = Gauge(name, what, ["model"], registry=own)
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
        """Return an application that counts each request, and logs its path, status and seconds until the answer.

        Args:
            app: that answers them.
        """

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            begun = time.perf_counter()

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._count(scope, message["status"], time.perf_counter() - begun)
                await send(message)

            await app(scope, receive, noted)

        return counted

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        # The path of a route, so that no text of a client becomes the name of a series.
        path = getattr(scope.get("route"), "path", "unknown")
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)
        LOGGER.info("%s %s %d %.3f s", shortened(scope["method"]), path, status, seconds)
