"""Web application of `clearhead serve`: its routes, and the HTTP status of each error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from clearhead.apps.serve.api.bodies import in_thread
from clearhead.apps.serve.api.generating import generating_router
from clearhead.apps.serve.api.inside import inside_router
from clearhead.apps.serve.api.reading import reading_router
from clearhead.apps.serve.api.refusals import Busy, Closing, Refusal, make_refusal
from clearhead.apps.serve.api.served import Models, UnknownModel
from clearhead.apps.serve.api.server import ServerMetrics, limit_time
from clearhead.apps.serve.api.tasks import tasks_router
from clearhead.apps.serve.gate import Access, Gate, Traffic
from clearhead.apps.serve.work import ClientDisconnected, Workers
from clearhead.base.errors import ContextTooLong, InputError, MessageReference, RunFailure

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": Refusal, "description": "A refusal."}}


def make_application(models: Models, access: Access, *, openapi: bool = False) -> FastAPI:
    """Return the application of the server; the caller stops the models afterwards.

    Args:
        models: the models of the server.
        access: the allowed hosts and keys.
        openapi: True if /openapi.json is served even if requests need a key; requests for it then need a key, too.
    """
    workers, metrics = Workers(), ServerMetrics(models)

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
    app.add_exception_handler(ClientDisconnected, lambda request, error: Response(status_code=499))
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_exception_handler(RequestValidationError, _answer_invalid_body)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(limit_time)
    app.state.traffic = Traffic()
    app.add_middleware(Gate, access=access, traffic=app.state.traffic, refuse=make_refusal)
    app.add_middleware(metrics.counting)
    if path is not None:
        app.openapi()  # cached now: making it would block the event loop for too long
    return app


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
            error.lines = tuple(line.rename_references(_as_client) for line in error.lines)
        code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
        return make_refusal(status, f"{error}", code=code)

    return handler


def _as_client(reference: MessageReference) -> str | MessageReference:
    """Return the name of an argument in OpenAI's protocol, or the server option that sets it."""
    return _CLIENT_NAMES.get(reference.name, reference)


def _answer_unexpected(_: Request, error: Exception) -> Response:
    return make_refusal(500, f"unexpected failure: {type(error).__name__}")


def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "this path does not exist: see /v1/models", 405: "this path needs another method, such as POST"}
    return make_refusal(error.status_code, known.get(error.status_code, str(error.detail)))


async def _answer_invalid_body(_: Request, error: Exception) -> Response:
    return await in_thread(_name_fault, error)


def _name_fault(error: Exception) -> Response:
    """Return the refusal of an invalid body; the message names the first invalid field."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    path = [str(name) for name in fault["loc"] if name != "body"]
    # A union tries each of its types; the first name is the field.
    field = path[0] if path else None
    if fault["type"] == "json_invalid":
        return make_refusal(400, "the body is not JSON")
    if isinstance(fault.get("input"), bytes):
        return make_refusal(400, "the body must be declared as JSON: send the header Content-Type: application/json")
    if fault["type"] == "extra_forbidden":
        name = ".".join(name for name in path if not name.startswith(("list[", "function-")))
        return make_refusal(400, f"{name} is not supported: leave it out", name)
    if fault["type"] == "missing":
        return make_refusal(400, f"{'.'.join(path) or 'the body'} is missing", field)
    sentence = fault["msg"][:1].lower() + fault["msg"][1:]
    return make_refusal(400, f"{field or 'the body'}: {sentence}, got {_show_value(fault.get('input'))}", field)


def _show_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
