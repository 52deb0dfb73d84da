"""The application of the server: who may ask, how much, and the shape of every refusal."""

from __future__ import annotations

import hmac
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.errors import InputError, RunFailure
from clearhead.serve.api.engine import Busy, Closing
from clearhead.serve.api.generating import generating_router
from clearhead.serve.api.metrics import Metrics
from clearhead.serve.api.reading import reading_router
from clearhead.serve.api.served import Models, UnknownModel
from clearhead.serve.api.tasks import tasks_router

MOST_BYTES: Final = 8 * 2**20
"""Of the body of a request."""
SECONDS_TO_FINISH: Final = 60
"""That running requests have after a signal."""
OPEN_PATHS: Final = ("/health",)
"""For which no key is needed."""


@dataclass(frozen=True)
class Rules:
    """Who may ask.

    Args:
        hosts: names in the Host header; None: any, where the address is not this machine alone.
        keys: of which a request carries one; none: none is needed.
    """

    hosts: tuple[str, ...] | None
    keys: tuple[str, ...] = ()


class Gate:
    """Refuses requests before anything reads them: wrong names, other sites, missing keys, too large bodies."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app: ASGIApp = app
        self.rules: Rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refused(*refusal)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BYTES:
                raise HTTPException(413, f"a request may have {MOST_BYTES:,} bytes")
            return message

        await self.app(scope, counted, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, hosts = headers.get("host", ""), self.rules.hosts
        if hosts is not None and host not in hosts:
            return 400, f"this server is {hosts[0]}, for programs of this machine alone"
        if "origin" in headers and headers["origin"] != f"http://{host}":
            return 403, "pages of other sites may not ask here"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return 413, f"a request may have {MOST_BYTES:,} bytes"
        if self.rules.keys and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            # Each key is compared, so that the time tells nothing.
            if not sum(hmac.compare_digest(given, key.encode()) for key in self.rules.keys):
                return 401, "the request carries no valid key: send the header Authorization: Bearer KEY"
        return None


def make_application(models: Models, rules: Rules) -> FastAPI:
    """Return the application; whoever makes the models ends them.

    Args:
        models: that answer.
        rules: who may ask.
    """

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(models)
    for router in (generating_router(models), reading_router(models), tasks_router(models), metrics.router()):
        app.include_router(router)
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Gate, rules=rules)
    app.middleware("http")(metrics.counted)
    return app


_STATUS: Final[dict[type[Exception], int]] = {
    UnknownModel: 404,
    InputError: 400,
    RunFailure: 500,
    Busy: 429,
    Closing: 503,
}
_KINDS: Final = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit"}


def refused(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Return a refusal in the shape of OpenAI's protocol.

    Args:
        status: of HTTP.
        message: one sentence.
        param: the field that it is about.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    content = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(content, status, headers)


def _answer(status: int) -> Any:
    def handler(_: Request, error: Exception) -> Response:
        message = f"{error}" or "the server ends: try again later"
        return refused(status, message)

    return handler


def _unexpected(_: Request, error: Exception) -> Response:
    return refused(500, f"unexpected failure: {type(error).__name__}")


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path: see /v1/models", 405: "this path takes another method"}
    return refused(error.status_code, known.get(error.status_code, str(error.detail)))


def _misread(_: Request, error: Exception) -> Response:
    """Name the first field that cannot be read; one that is not known is not honoured."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"] if part != "body"]
    # A union tries each of its types; the first part is the field.
    field = place[0] if place else None
    if fault["type"] == "json_invalid":
        return refused(400, "the body is not JSON")
    if fault["type"] == "extra_forbidden":
        name = ".".join(part for part in place if not part.startswith(("list[", "function")))
        return refused(400, f"{name} is not supported: leave it out", name)
    if fault["type"] == "missing":
        return refused(400, f"{'.'.join(place) or 'the body'} is missing", field)
    sentence = fault["msg"][:1].lower() + fault["msg"][1:]
    return refused(400, f"{field or 'the body'}: {sentence}, received {_shown(fault.get('input'))}", field)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Server(uvicorn.Server):
    """Finishes what runs at the first signal, and refuses what comes."""

    def __init__(self, app: FastAPI, models: Models) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=SECONDS_TO_FINISH,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
                limit_concurrency=1024,
                ws="none",
                server_header=False,
            )
        )
        self._models = models
        self.received: signal.Signals | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM."""
        self.received = signal.Signals(sig)
        self._models.close()
        super().handle_exit(sig, frame)


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
