"""The application: who may ask, how mistakes are answered, and how it runs until a signal ends it."""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.errors import InputError, RunFailure
from clearhead.serve.work import Left, Workers

LOOPBACK = "127.0.0.1"
MOST_BYTES = 8 * 2**20  # of what a request sends
GRACE = 2  # seconds in which open requests may end
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A notebook of this machine may show the page.
    "Content-Security-Policy": "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* vscode-webview:",
}


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Args:
        port: that the application listens on.
        token: what the path of every request begins with; drawn anew for each application.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names by which browsers of this machine reach the application."""
        return f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{self.hosts[0]}/{self.token}/"


class Guard:
    """Refuses requests from elsewhere, before anything reads them.

    A page of another site can let a browser send requests to this machine: they have another Origin, or, where it
    points a name of its own here, another Host; and they do not know the token.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app: ASGIApp = app
        self.access: Access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await JSONResponse({"error": refusal[1]}, refusal[0])(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.lower().encode(), v.encode()) for k, v in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the code and the sentence of a refusal; None: the request may pass."""
        if scope["type"] != "http":
            return 400, "only HTTP is answered here"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host") not in self.access.hosts:
            return 400, f"this address is {self.access.hosts[0]}, for programs of this machine alone"
        if headers.get("origin", f"http://{headers['host']}") not in [f"http://{host}" for host in self.access.hosts]:
            return 403, "pages of other sites may not ask here"
        given = scope["path"].split("/")[1]
        if not hmac.compare_digest(given.encode(), self.access.token.encode()):
            return 403, "the address lacks its token: open the whole address that the program wrote"
        length = headers.get("content-length", "" if "transfer-encoding" in headers else "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return 413, f"a request may send {MOST_BYTES:,} bytes, with their number given"
        return None


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
    app.add_middleware(Guard, access=access)
    return app


def _answered(code: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: JSONResponse({"error": f"{error}"}, code)


def _misread(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"] if part not in ("body", "query", "path"))
    sentence = fault["msg"].removeprefix("Value error, ")
    return JSONResponse({"error": f"{place or 'the request'}: {sentence[:1].lower()}{sentence[1:]}"}, 422)


def listen(port: int, host: str = LOOPBACK) -> socket.socket:
    """Return a socket that listens.

    Args:
        port: its number; 0: one that is free.
        host: its address; by default that of this machine alone.

    Raises:
        InputError: another program has the port, or this one may not have it.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if taken else f"cannot be had ({error.strerror})"
        raise InputError(f"port {port} {reason}: choose another, or leave it out for one that is free") from None
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
