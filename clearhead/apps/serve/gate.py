"""The gate of an application: who may ask, how much, and until when, before anything reads a request."""

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
"""Of the body of a request."""
SECONDS_TO_SEND: Final = 60
"""That a request has to arrive whole."""
OPEN_PATHS: Final = ("/health",)
"""For which no key is needed."""
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A notebook of this machine may show a page.
    "Content-Security-Policy": "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* vscode-webview:",
}
Refuse = Callable[[int, str], Response]
"""Makes the answer of a refusal from its status and its sentence."""


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Args:
        hosts: names in the Host header, the first of which is written to users; None: any, where the address is not
            this machine alone.
        token: what the path of every request begins with; empty: nothing.
        keys: of which a request carries one; none: none is needed.
    """

    hosts: tuple[str, ...] | None
    token: str = ""
    keys: tuple[str, ...] = ()

    @classmethod
    def of_page(cls, port: int) -> Access:
        """Return the access to a page of this machine, with a token that is drawn anew.

        Args:
            port: that the application listens on.
        """
        return cls((f"{LOOPBACK}:{port}", f"localhost:{port}"), secrets.token_urlsafe(24))

    @property
    def address(self) -> str:
        """What a browser of this machine opens."""
        assert self.hosts is not None
        return f"http://{self.hosts[0]}/{self.token}/"


@dataclass
class Traffic:
    """The requests that have passed the gate.

    Args:
        num_running: how many are not answered yet.
        is_closing: whether those that come are refused.
    """

    num_running: int = 0
    is_closing: bool = False


class Gate:
    """Refuses requests from elsewhere, without a token or key, with too large a body, or when the application ends.

    A page of another site can let a browser send requests to this machine: they have another Origin, or, where it
    points a name of its own here, another Host; and they do not know the token.

    Args:
        app: what answers the others.
        access: who may ask.
        traffic: of the application.
        refuse: makes the answer of a refusal.
    """

    def __init__(self, app: ASGIApp, access: Access, traffic: Traffic, refuse: Refuse) -> None:
        self.app: ASGIApp = app
        self.access: Access = access
        self._traffic, self._refuse = traffic, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
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
                # After the body, the next message is that the client has left.
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {SECONDS_TO_SEND} seconds") from None
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > MOST_BYTES:
                raise HTTPException(413, f"a request may have {MOST_BYTES:,} bytes")
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
        """Return the status and the sentence of a refusal; None: the request may pass."""
        if scope["type"] != "http":
            return 400, "only HTTP is answered here"
        if self._traffic.is_closing:
            return 503, "the server ends: try again later"
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
            return 400, f"this address is {hosts[0]}, for programs of this machine alone"
        origins = [f"http://{name}" for name in hosts or (host,)]
        if headers.get("origin", origins[0]) not in origins:
            return 403, "pages of other sites may not ask here"
        return None

    def _refuse_without_secret(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        token, keys = self.access.token, self.access.keys
        if token and not _is_one_of(path.split("/")[1], (token,)):
            return 403, "the address lacks its token: open the whole address that the program wrote"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_known = scheme.lower() == "bearer" and _is_one_of(key.strip(), keys)
        if keys and path not in OPEN_PATHS and not is_known:
            return 401, "the request carries no valid key: send the header Authorization: Bearer KEY"
        return None


def _is_one_of(text: str, secrets_: tuple[str, ...]) -> bool:
    """Compare a text with every secret, so that the time tells nothing."""
    return sum(hmac.compare_digest(text.encode(), secret.encode()) for secret in secrets_) > 0


def _refuse_too_large(headers: dict[str, str]) -> tuple[int, str] | None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        return 413, f"a request may have {MOST_BYTES:,} bytes"
    return None
