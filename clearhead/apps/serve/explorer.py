"""Live attention explorer: its routes, its web application, and its page in a notebook."""

from __future__ import annotations

import errno
import html
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Annotated, Any, TypeVar

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from clearhead.apps.serve.gate import LOOPBACK, Access, Gate, Traffic
from clearhead.apps.serve.long_text import MapTile, rows_of_weights, tile
from clearhead.apps.serve.page_computations import Computation, PageRequest, Runs
from clearhead.apps.serve.trials import ForcedToken, PatchGridRequest, compute_patch_grid, force_token
from clearhead.apps.serve.work import ClientDisconnected, Workers
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, RunFailure
from clearhead.core.attention import Attention
from clearhead.interpret.maps.attention_maps import NOTEBOOK_HEIGHT
from clearhead.interpret.maps.map_inputs import ReadKwargs
from clearhead.interpret.view.explorer.write import live_html
from clearhead.model.facade import Model

GRACE = 2  # seconds that open requests have to finish after a signal


def make_app(access: Access, workers: Workers, routers: Sequence[APIRouter]) -> FastAPI:
    """Return the web application of the explorer.

    Args:
        access: the allowed hosts and the token of the address.
        workers: the threads in which the routes compute; they stop with the application.
        routers: the routes, below the token in the path.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        workers.join()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for router in routers:
        app.include_router(router, prefix=f"/{access.token}")
    app.add_exception_handler(InputError, _make_handler(400))
    app.add_exception_handler(RunFailure, _make_handler(500))
    app.add_exception_handler(ClientDisconnected, lambda request, error: Response(status_code=499))
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(Gate, access=access, traffic=Traffic(), refuse=_make_refusal)
    return app


def _make_refusal(code: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, code)


def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _make_refusal(error.status_code, error.detail)


def _make_handler(code: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: _make_refusal(code, f"{error}")


def _answer_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    field = ".".join(str(name) for name in fault["loc"] if name not in ("body", "query", "path"))
    sentence = fault["msg"].removeprefix("Value error, ")
    return _make_refusal(422, f"{field or 'the request'}: {sentence[:1].lower()}{sentence[1:]}")


def listen(port: int, host: str = LOOPBACK) -> socket.socket:
    """Return a socket that listens on an address and a port.

    Args:
        port: the port; 0 means any free one.
        host: the address; the default is for this machine only.

    Raises:
        InputError: another program uses the port, the system refuses it, or this machine has no such address.
    """
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        raise InputError(f"'{host}' is not an address of this machine: use {LOOPBACK}, or 0.0.0.0 for all") from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if taken else f"cannot be used ({error.strerror})"
        raise InputError(f"port {port} {reason}: choose another, or 0 for any free port") from None
    return listener


class _Server(uvicorn.Server):
    """Server that cancels running computations at the first signal."""

    def __init__(self, config: uvicorn.Config, workers: Workers) -> None:
        super().__init__(config)
        self._workers = workers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Cancel computations at SIGINT or SIGTERM; uvicorn raises the signal again after shutdown."""
        self._workers.close()
        super().handle_exit(sig, frame)


def run(app: FastAPI, listener: socket.socket, workers: Workers) -> None:
    """Answer requests until a signal ends the program.

    Args:
        app: the application.
        listener: the socket that `listen` returned.
        workers: the threads of the application.
    """
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE, limit_concurrency=256, ws="none"
    )
    _Server(config, workers).run(sockets=[listener])


ResultT = TypeVar("ResultT")
Number = Annotated[int, Query(ge=0, lt=2**31)]
Sample = Annotated[int, Query(ge=0, le=1)]


def explorer_router(runs: Runs, workers: Workers, first: PageRequest) -> APIRouter:
    """Return the routes of the live page.

    Args:
        runs: the model with its recent runs.
        workers: the threads that compute the runs.
        first: the first request of the page.
    """
    router = APIRouter()
    facts = {"first": first.model_dump(mode="json"), **_model_facts(runs)}

    @router.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(live_html(runs.title, facts))

    async def compute(
        request: Request, function: Callable[[Computation], ResultT], *, is_quick: bool = False
    ) -> ResultT:
        return await workers.compute(request, lambda work: function(Computation(runs, work)), is_quick=is_quick)

    @router.post("/read")
    async def read(request: Request, body: PageRequest) -> dict[str, Any]:
        shown = await compute(request, lambda computation: computation.show(body))
        return {"name": body.name, "page": shown.page, "outputs": shown.outputs, "python": shown.python}

    @router.get("/blob/{name}/{number}")
    async def blob(request: Request, name: str, number: int) -> PlainTextResponse:
        text = await compute(request, lambda computation: computation.show_named(name).blob(number))
        return PlainTextResponse(text)

    @router.get("/tile/{name}")
    async def map_tile(request: Request, name: str, tile_request: Annotated[MapTile, Query()]) -> Response:
        def read_tile(computation: Computation) -> bytes:
            record = (
                computation.show_named(name).runs[tile_request.sample].record(tile_request.stack, tile_request.layer)
            )
            return tile(record, tile_request, computation.work.check)

        return _bytes(await compute(request, read_tile, is_quick=tile_request.pool <= 4))

    @router.get("/row/{name}")
    async def row(request: Request, name: str, stack: str, sample: Sample, layer: Number, query: Number) -> Response:
        def read_rows(computation: Computation) -> bytes:
            return rows_of_weights(computation.show_named(name).runs[sample].record(stack, layer), query)

        return _bytes(await compute(request, read_rows, is_quick=True))

    @router.post("/force")
    async def force(request: Request, forced: ForcedToken) -> dict[str, str]:
        return {"text": await compute(request, lambda computation: force_token(computation, forced))}

    @router.post("/sweep")
    async def patches(request: Request, grid: PatchGridRequest) -> dict[str, Any]:
        return await compute(request, lambda computation: compute_patch_grid(computation, grid))

    return router


def _bytes(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _model_facts(runs: Runs) -> dict[str, Any]:
    """Return the addresses of attentions, the order of layers, and the outputs of the model, for edits on a page."""
    module = runs.model.module
    attentions: dict[str, dict[int, str]] = {}
    orders: dict[str, list[int]] = {}
    for name, stack in (("encoder", module.encoder), ("decoder", module.decoder)):
        if stack is not None:
            orders[name] = list(stack.order)
    for path, submodule in module.named_modules():
        if isinstance(submodule, Attention):
            name, _, index = path.split(".")[:3]
            depths = [depth for depth, layer in enumerate(orders[name]) if layer == int(index)]
            attentions.setdefault(f"{name}.{submodule.spec.source}", {}).update(dict.fromkeys(depths, path))
    kind = {
        "readsTarget": runs.has_two_stacks and runs.predicts_text,
        "writes": runs.predicts_text,
        "predicts": runs.predicts,
    }
    return {"attentions": attentions, "orders": orders, **kind}


@check_types
class LivePage:
    """The attention explorer of a model, computed on demand in this process until `close`; a notebook shows it.

    The browser must run on the same machine.

    Args:
        model: the model.
        text, target, generate: the first texts and the number of generated tokens, as in `Model.attention`.
        port: the port on this machine; 0 means any free one.

    Attributes:
        address: the address for a browser.

    Raises:
        InputError: the port is in use.
    """

    def __init__(self, model: Model, text: str, target: str | None = None, *, generate: int = 0, port: int = 0) -> None:
        listener, workers = listen(port), Workers()
        access = Access.of_page(listener.getsockname()[1])
        first = PageRequest(text=text, target=target, generate=generate)
        app = make_app(access, workers, [explorer_router(Runs(model, "live", ReadKwargs()), workers, first)])
        self.address: str = access.address
        self._server = uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning", ws="none"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._workers = workers
        self._thread.start()

    def close(self) -> None:
        """Stop the application and its computations."""
        self._workers.close()
        self._server.should_exit = True
        self._thread.join()

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0"
        return f'<iframe title="attention explorer" style="{style}" src="{html.escape(self.address)}"></iframe>'
