"""Acceptance of connections by the server: at the limit, it closes the connection that is idle longest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection
from typing import Any, Final

import psutil

from clearhead.apps.serve.api.protocol import Protocol

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
        make_protocol: makes the protocol of a connection.
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
            message = "%d connections are open: idle ones are closed, and while all are busy no other is accepted"
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
