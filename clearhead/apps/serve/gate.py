"""Gate in front of an application: refuses requests by host, origin, token, key, size and time."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = "127.0.0.1"
MOST_BYTES: Final = 8 * 2**20
"""Maximum bytes of the body of a request."""
SECONDS_TO_SEND: Final = 60
"""Maximum seconds until the whole body of a request has arrived."""
OPEN_PATHS: Final = ("/health",)
"""Paths that need no key."""
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A notebook on this machine may show a page in a frame.
    "Content-Security-Policy": "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* vscode-webview:",
}
Refuse = Callable[[int, str], Response]
"""Function that makes the answer of a refusal from its status and its message."""


@dataclass(frozen=True)
class Access:
    """Conditions that a request must meet: an allowed host, the token in the path, and a key.

    Args:
        hosts: the allowed Host headers; users see the first one. None means any host.
        token: the beginning of the path of every request; empty means no token.
        keys: the keys, one of which a request must carry; empty means that no key is needed.
    """

    hosts: tuple[str, ...] | None
    token: str = ""
    keys: tuple[str, ...] = ()

    @classmethod
    def of_page(cls, port: int) -> Access:
        """Return the access to a page on this machine, with a new random token.

        Args:
            port: the port of the application.
        """
        return cls((f"{LOOPBACK}:{port}", f"localhost:{port}"), secrets.token_urlsafe(24))

    @property
    def address(self) -> str:
        """The address of the page for a browser on this machine."""
        assert self.hosts is not None
        return f"http://{self.hosts[0]}/{self.token}/"


@dataclass
class Traffic:
    """Counts of the requests that the gate has accepted.

    Args:
        num_running: the number of requests that are not answered yet.
        is_closing: True if new requests are refused because the server is shutting down.
    """

    num_running: int = 0
    is_closing: bool = False


class Gate:
    """Middleware that refuses foreign requests, missing tokens or keys, large bodies, and requests during shutdown.

    A page of another site can make a browser send requests to this machine. They have another Origin, or another Host
    if the site points its own name here; and they do not know the token.

    Args:
        app: the application that answers accepted requests.
        access: the conditions for requests.
        traffic: the state of the requests.
        refuse: function that makes the answer of a refusal.
    """

    def __init__(self, app: ASGIApp, access: Access, traffic: Traffic, refuse: Refuse) -> None:
        self.app: ASGIApp = app
        self.access: Access = access
        self._traffic, self._refuse = traffic, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(*refusal)(scope, receive, send)
            return
        received, is_whole = 0, False
        end = asyncio.get_running_loop().time() + SECONDS_TO_SEND

        async def receive_limited() -> Message:
            nonlocal received, is_whole
            try:
                # After the body, the next message says that the client has disconnected.
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {SECONDS_TO_SEND} seconds") from None
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > MOST_BYTES:
                raise HTTPException(413, f"a request may have at most {MOST_BYTES:,} bytes: send less")
            return message

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        self._traffic.num_running += 1
        try:
            await self.app(scope, receive_limited, send_safely)
        finally:
            self._traffic.num_running -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the message of a refusal; None if the request may pass."""
        if scope["type"] != "http":
            return 400, "expected a request over HTTP"
        if self._traffic.is_closing:
            return 503, "the server is shutting down: try again later"
        if not scope["path"].startswith("/"):
            return 400, "the target of a request must be a path, such as /health"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return (
            self._refuse_foreign(headers)
            or self._refuse_without_secret(scope["path"], headers)
            or _refuse_too_large(headers)
        )

    def _refuse_foreign(self, headers: dict[str, str]) -> tuple[int, str] | None:
        host, hosts = headers.get("host", ""), self.access.hosts
        if hosts is not None and host not in hosts:
            return 400, f"this server answers only programs on this machine, at {hosts[0]}"
        origins = [f"http://{name}" for name in hosts or (host,)]
        if headers.get("origin", origins[0]) not in origins:
            return 403, "pages of other sites may not send requests to this server"
        return None

    def _refuse_without_secret(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        token, keys = self.access.token, self.access.keys
        if token and not _is_one_of(path.split("/")[1], (token,)):
            return 403, "the address lacks its token: open the whole address that the program printed"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_known = scheme.lower() == "bearer" and _is_one_of(key.strip(), keys)
        if keys and path not in OPEN_PATHS and not is_known:
            return 401, "the request has no valid key: send the header Authorization: Bearer KEY"
        return None


def _is_one_of(text: str, secrets_: tuple[str, ...]) -> bool:
    """Return whether a text is one of the secrets, in a time that reveals nothing about them."""
    return sum(hmac.compare_digest(text.encode(), secret.encode()) for secret in secrets_) > 0


def _refuse_too_large(headers: dict[str, str]) -> tuple[int, str] | None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        return 413, f"a request may have at most {MOST_BYTES:,} bytes: send less"
    return None
