"""The routes of the attention explorer: its page, the runs that it asks for, and the pieces of their maps."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from clearhead.apps.serve.forced import Forced, forced
from clearhead.apps.serve.long_text import Piece, rows_of_weights, tile
from clearhead.apps.serve.runs import Asked, Runs, Shown, stack_lengths
from clearhead.apps.serve.sweeps import Sweep, sweep
from clearhead.apps.serve.work import Work, Workers
from clearhead.core.attention import Attention
from clearhead.interpret.view.explorer.write import live_html

Number = Annotated[int, Query(ge=0, lt=2**31)]
Sample = Annotated[int, Query(ge=0, le=1)]


def explorer_router(runs: Runs, workers: Workers, first: Asked) -> APIRouter:
    """Return the routes of a page.

    Args:
        runs: of the model that it shows.
        workers: where they are computed.
        first: what the page asks for first.
    """
    router = APIRouter()
    facts = {"first": first.model_dump(mode="json"), **_parts(runs)}

    @router.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(live_html(runs.title, facts))

    @router.post("/read")
    async def read(request: Request, asked: Asked) -> dict[str, Any]:
        def compute(work: Work) -> Shown:
            return runs.shown(asked, work)

        found = await workers.compute(request, compute)
        return {"name": asked.name, "page": found.page, "outputs": found.outputs, "python": found.python}

    @router.get("/blob/{name}/{number}")
    async def blob(request: Request, name: str, number: int) -> PlainTextResponse:
        return PlainTextResponse(await workers.compute(request, lambda work: runs.named(name, work).blob(number)))

    @router.get("/tile/{name}")
    async def piece(request: Request, name: str, place: Annotated[Piece, Query()]) -> Response:
        def compute(work: Work) -> bytes:
            record = runs.named(name, work).runs[place.sample].record(place.stack, place.layer)
            return tile(record, place, work.check)

        return _bytes(await workers.compute(request, compute, is_quick=place.pool <= 4))

    @router.get("/row/{name}")
    async def row(request: Request, name: str, stack: str, sample: Sample, layer: Number, query: Number) -> Response:
        def compute(work: Work) -> bytes:
            return rows_of_weights(runs.named(name, work).runs[sample].record(stack, layer), query)

        return _bytes(await workers.compute(request, compute, is_quick=True))

    @router.post("/force")
    async def force(request: Request, given: Forced) -> dict[str, str]:
        def compute(work: Work) -> str:
            base, _ = runs.base(given.asked, work)
            with work.watching(runs.model), runs.changing(given.asked.edits, stack_lengths(base), work):
                return forced(base, given, work)

        return {"text": await workers.compute(request, compute)}

    @router.post("/sweep")
    async def patches(request: Request, given: Sweep) -> dict[str, Any]:
        return await workers.compute(request, lambda work: sweep(runs, given, work))

    return router


def _bytes(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _parts(runs: Runs) -> dict[str, Any]:
    """Return what a page has to know of the model to name what it changes."""
    module = runs.model.module
    attentions: dict[str, dict[int, str]] = {}
    orders: dict[str, list[int]] = {}
    for name, stack in (("encoder", module.encoder), ("decoder", module.decoder)):
        if stack is not None:
            orders[name] = list(stack.order)
    for path, part in module.named_modules():
        if isinstance(part, Attention):
            name, _, index = path.split(".")[:3]
            depths = [depth for depth, own in enumerate(orders[name]) if own == int(index)]
            attentions.setdefault(f"{name}.{part.spec.source}", {}).update(dict.fromkeys(depths, path))
    kind = {
        "readsTarget": runs.has_two_stacks and runs.predicts_text,
        "writes": runs.predicts_text,
        "predicts": runs.predicts,
    }
    return {"attentions": attentions, "orders": orders, **kind}
