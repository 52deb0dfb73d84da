"""HTTP connections by uvicorn and h11, with bounds on request heads and on clients that send or read nothing."""

from __future__ import annotations

import asyncio
import http
import sys
from collections.abc import Callable
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.apps.serve.api.refusals import refused

MOST_HEAD_BYTES: Final = 64 * 1024
"""Of the first line and the headers, where they do not come at once."""
SECONDS_TO_ASK: Final = 30.0
"""That a connection may be open before the head of its first request is there."""
SECONDS_TO_READ: Final = 60.0
"""In which a client takes the next 48 kB of an answer that waits for it."""
SECONDS_TO_HEAR: Final = 2.0
"""In which what a client still sends is read and dropped, so that it hears why it was refused."""


class Protocol(H11Protocol):
    """HTTP connection of one client.

    Attributes:
        idle_since: when the connection was opened or its last answer ended, in seconds of the event loop's clock.
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
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self._wait(SECONDS_TO_ASK, self._never_asked)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Read what came; a head that comes in parts has no more time than another one."""
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if not self.flow.write_paused:
                self._stop_waiting()
        elif self._waits is None and self.timeout_keep_alive_task is None:
            self._wait(SECONDS_TO_ASK, self._never_asked)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self._wait(SECONDS_TO_READ, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with one that does."""
        super().resume_writing()
        if not self._is_refused:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(431, f"the head of a request may have {MOST_HEAD_BYTES:,} bytes")
        else:
            self._refuse(400, f"this is not a request of HTTP/1.1: {error or msg}")

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a client that asks for another protocol gets an answer in this one."""

    def _never_asked(self) -> None:
        self._refuse(408, f"no request came within {SECONDS_TO_ASK:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer has begun, so that no other one can be given.
            self.transport.abort()
            return
        answer = refused(status, message)
        headers = [(name, value) for name, value in answer.raw_headers if name != b"connection"]
        head = h11.Response(
            status_code=status, headers=[*headers, (b"connection", b"close")], reason=http.HTTPStatus(status).phrase
        )
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Where it is closed with bytes unread, the system tells the client of a broken connection instead.
        self.transport.write_eof()
        self._wait(SECONDS_TO_HEAR, self.transport.close)

    def _wait(self, seconds: float, end: Callable[[], None]) -> None:
        self._stop_waiting()
        self._waits = self.loop.call_later(seconds, end)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
