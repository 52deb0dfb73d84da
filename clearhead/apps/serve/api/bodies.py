"""Requests with a body: parsed in a thread, and cancelled when their client disconnects.

The event loop serves all clients. So no work that grows with the size of a request runs in it.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, TypeVarTuple

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from clearhead.apps.serve.work import Left

Args = TypeVarTuple("Args")
ResultT = TypeVar("ResultT")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
LARGE_BODY: Final = 2**16
"""Bytes from which a request uses the threads for large requests, so that small requests never wait for it."""
_SMALL: Final = ThreadPoolExecutor(4, "requests")
_LARGE: Final = ThreadPoolExecutor(2, "large requests")
_THREADS: Final = contextvars.ContextVar("threads", default=_SMALL)


async def in_thread(function: Callable[[*Args], ResultT], *args: *Args) -> ResultT:
    """Return the result of a function that runs in a thread for requests of the current size."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_THREADS.get(), run, function, *args)


class BodyRoute(APIRoute):
    """Route that reads its body in a thread, and ends its endpoint when the client disconnects."""

    def get_route_handler(self) -> Handler:
        """Return the handler of the route's requests."""
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        async def handler(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                raise Left from None
            _THREADS.set(_LARGE if len(body) >= LARGE_BODY else _SMALL)
            if body:
                # FastAPI takes this value for the parsed body, and a validated model passes its own validation.
                request._json = await in_thread(_validate, field, body)
            return await _unless_left(request, handle(request))

        return handler


def _validate(field: Any, body: bytes) -> Any:
    """Parse and validate a body, and return it as the type of its field.

    Raises:
        RequestValidationError: the body is not JSON, or not of this type.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestValidationError([{"type": "json_invalid", "loc": ("body",), "msg": "not JSON"}]) from None
    model, errors = field.validate(value, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors)
    return model


async def _unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer to a request, or cancel the work when the client disconnects.

    Raises:
        Left: the client disconnected before the answer was ready.
    """
    task, message = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, message}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Left
        return task.result()
    finally:
        for pending in (task, message):
            pending.cancel()
        await asyncio.gather(task, message, return_exceptions=True)
