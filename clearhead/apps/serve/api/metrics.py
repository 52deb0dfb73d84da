"""Numbers of the server for Prometheus, and a log of requests without their texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.apps.serve.api.engine import Engine
from clearhead.apps.serve.api.served import Models, Served
from clearhead.base.errors import shortened

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
                gauge.labels(served.name).set_function(partial(_read, served, read))

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


def _read(served: Served, read: Callable[[Engine], float]) -> float:
    return float(read(served.engine))
