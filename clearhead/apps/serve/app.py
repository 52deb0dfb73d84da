"""The application of a page: how mistakes are answered, and how it runs until a signal ends it."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from clearhead.apps.serve.gate import LOOPBACK, Access, Gate, Traffic
from clearhead.apps.serve.work import Left, Workers
from clearhead.base.errors import InputError, RunFailure

GRACE = 2  # seconds in which open requests may end


def make_app(access: Access, workers: Workers, routers: Sequence[APIRouter]) -> FastAPI:
    """Return the application.

    Args:
        access: who may ask.
        workers: the threads in which the routes compute; they end with the application.
        routers: what is answered, below the token.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        workers.join()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for router in routers:
        app.include_router(router, prefix=f"/{access.token}")
    app.add_exception_handler(InputError, _answered(400))
    app.add_exception_handler(RunFailure, _answered(500))
    app.add_exception_handler(Left, lambda request, error: Response(status_code=499))
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Gate, access=access, traffic=Traffic(), refuse=_refused)
    return app


def _refused(code: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, code)


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refused(error.status_code, error.detail)


def _answered(code: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: _refused(code, f"{error}")


def _misread(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"] if part not in ("body", "query", "path"))
    sentence = fault["msg"].removeprefix("Value error, ")
    return _refused(422, f"{place or 'the request'}: {sentence[:1].lower()}{sentence[1:]}")


def listen(port: int, host: str = LOOPBACK) -> socket.socket:
    """Return a socket that listens.

    Args:
        port: its number; 0: one that is free.
        host: its address; by default that of this machine alone.

    Raises:
        InputError: another program has the port, or this one may not have it; or there is no such address.
    """
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        raise InputError(f"'{host}' is no address of this machine: use {LOOPBACK}, or 0.0.0.0 for all it has") from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if taken else f"cannot be had ({error.strerror})"
        raise InputError(f"port {port} {reason}: choose another, or 0 for one that is free") from None
    return listener


class _Server(uvicorn.Server):
    """Ends what is computed at the first signal, and not after the last answer."""

    def __init__(self, config: uvicorn.Config, workers: Workers) -> None:
        super().__init__(config)
        self._workers = workers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM; both are raised again when everything has ended."""
        self._workers.close()
        super().handle_exit(sig, frame)


def run(app: FastAPI, listener: socket.socket, workers: Workers) -> None:
    """Answer requests until a signal ends the program.

    Args:
        app: the application.
        listener: as `listen` returned it.
        workers: of the application.
    """
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE, limit_concurrency=256, ws="none"
    )
    _Server(config, workers).run(sockets=[listener])
