"""HTTP routes that look inside a model: attention maps, activations, and the answer of an edited model.

All requests run in float32, in a thread besides the running batch. Edits hold for their request only: none stays on
the model, and no other request sees them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import Field
from torch import Tensor

from clearhead.apps.serve.api.bodies import BodyRoute
from clearhead.apps.serve.api.refusals import Busy, to_client_error
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.apps.serve.api.tasks import parameters_of, pipeline_of, translation_json
from clearhead.apps.serve.interventions import Data, Edits
from clearhead.apps.serve.page_computations import Computation, InputText, stack_lengths
from clearhead.apps.serve.work import ClientDisconnected, Work, Workers
from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps, arrays_of
from clearhead.interpret.maps.hook_points import ActivationContext, Captured, Record, edit, matching_addresses
from clearhead.interpret.maps.page import SampleOptions, explorer_page
from clearhead.interpret.view.explorer.write import page_html
from clearhead.model.facade import Model
from clearhead.tasks.pipelines import PipelineParameters

MOST_NUMBERS: Final = {"json": 2**20, "npz": 2**24}
"""Maximum number of numbers in one answer, by format."""
MOST_INSPECTIONS: Final = 16
"""Maximum number of requests that wait for the thread; one more is refused."""
Number = Annotated[int, Field(ge=0, lt=2**31)]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, max_length=4096)]
Address = Annotated[str, Field(min_length=1, max_length=300)]


class InspectionRequest(Data):
    """Body of a request that runs the model on a text.

    Args:
        model: the name of the model; None means the only one.
        text: one text, or a pair of texts if the model reads pairs.
        target, generate: the target text and the number of generated tokens, as in `Model.attention`.
        edits: the edits of the model while it runs.
    """

    model: str | None = None
    text: InputText | tuple[InputText, InputText]
    target: InputText | None = None
    generate: Annotated[int, Field(ge=0, le=1024)] = 0
    edits: Edits = ()


class AttentionRequest(InspectionRequest):
    """The body of /attention: the text, the layers and heads to return, and the format."""

    layers: Numbers | None = None
    heads: Numbers | None = None
    format: Literal["json", "npz", "html"] = "json"


class CaptureRequest(InspectionRequest):
    """The body of /capture: the text, addresses of activations or patterns of addresses, and the format."""

    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=256)]
    format: Literal["json", "npz"] = "json"


class EditRequest(Data):
    """The body of /edit: inputs and parameters of the model's own task, and the edits."""

    model: str | None = None
    inputs: Any
    parameters: dict[str, Any] | None = None
    edits: Edits


RequestT = TypeVar("RequestT", bound=InspectionRequest | EditRequest)
InspectionRequestT = TypeVar("InspectionRequestT", bound=InspectionRequest)


class GenerationParameters(PipelineParameters):
    """Parameters of /edit for a decoder, which continues texts."""

    max_new_tokens: int = Field(default=16, ge=1, le=1024)
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Model.generate`."""
        drawn = {"temperature": self.temperature, "seed": self.seed} if self.temperature else {"temperature": 0}
        return {"max_new_tokens": self.max_new_tokens, **drawn}


def inside_router(models: Models, workers: Workers) -> APIRouter:
    """Return the routes of attention maps, activations and edits.

    Args:
        models: the models of the server.
        workers: the threads that compute the answers.
    """
    router = APIRouter(route_class=BodyRoute)

    async def compute(request: Request, body: RequestT, answer: Callable[[Inspection[RequestT]], Response]) -> Response:
        served = models.get(body.model)
        if workers.num_running >= MOST_INSPECTIONS:
            raise Busy(f"{workers.num_running} requests to look inside are waiting already: try again later")
        return await workers.compute(request, lambda work: _answer(answer, Inspection(served, body, work)))

    @router.post("/attention")
    async def attention(request: Request, body: AttentionRequest) -> Response:
        return await compute(request, body, _attention)

    @router.post("/capture")
    async def activations(request: Request, body: CaptureRequest) -> Response:
        return await compute(request, body, _capture)

    @router.post("/edit")
    async def compare_edits(request: Request, body: EditRequest) -> Response:
        return await compute(request, body, _edit)

    return router


@dataclass(frozen=True)
class Inspection(Generic[RequestT]):
    """State of one request to look inside a model.

    Args:
        served: the model.
        body: the body of the request.
        work: the computation; it is cancelled when the client has disconnected.
    """

    served: ServedModel
    body: RequestT
    work: Work

    @cached_property
    def computation(self) -> Computation:
        """Forward passes of the model for this request; cancelled when the client disconnects."""
        return Computation(self.served.runs, self.work)

    @property
    def model(self) -> Model:
        """The model in float32."""
        return self.served.runs.model

    def changing(self, lengths: Mapping[str, int]) -> AbstractContextManager[object]:
        """Return a context manager in which the model runs with the edits of the request."""
        return self.computation.changing(self.body.edits, lengths)


def _answer(answer: Callable[[Inspection[RequestT]], Response], inspection: Inspection[RequestT]) -> Response:
    """Return the answer to a request; any failure is the failure of this request alone."""
    try:
        with torch.no_grad():
            return answer(inspection)
    except ClientDisconnected:
        raise
    except Exception as error:  # noqa: BLE001 - it is the failure of a request, not of the thread
        raise to_client_error(error) from None


def _maps(inspection: Inspection[InspectionRequestT]) -> AttentionMaps:
    """Return the attention maps of the unchanged model for the text of the request."""
    body = inspection.body
    with inspection.computation.watching():
        return inspection.model.attention(body.text, body.target, body.generate, precision="auto")


def _attend_with_edits(
    inspection: Inspection[InspectionRequestT],
    maps: AttentionMaps,
    inner: Sequence[AbstractContextManager[object]] = (),
) -> AttentionMaps:
    """Run the model again on the same tokens with the edits of a request, and return the attention maps.

    Args:
        inspection: the request.
        maps: the unchanged run.
        inner: context managers that are entered after the edits, and see the edited activations.
    """
    with ExitStack() as blocks:
        blocks.enter_context(inspection.computation.watching())
        blocks.enter_context(inspection.changing(stack_lengths(maps)))
        for block in inner:
            blocks.enter_context(block)
        return maps.with_module(maps.module)


def _attention(inspection: Inspection[AttentionRequest]) -> Response:
    body, name, maps = inspection.body, inspection.served.name, _maps(inspection)
    if body.edits:
        maps = _attend_with_edits(inspection, maps)
    if body.format == "html":
        with inspection.computation.watching():
            options = SampleOptions(body.layers, body.heads)
            return HTMLResponse(page_html(explorer_page(name, [("", maps)], options)))
    chosen = maps.choose(body.layers, body.heads)
    count = sum(len(heads) * record.query_BHTE.shape[2] * record.key_BKSE.shape[2] for record, heads in chosen)
    _check_size(count, body.format, "choose layers and heads, send a shorter text")
    if body.format == "json":
        return JSONResponse({"model": name, **maps.to_json(layers=body.layers, heads=body.heads)})
    return _npz(arrays_of(maps, body.layers, body.heads), "attention")


def _capture(inspection: Inspection[CaptureRequest]) -> Response:
    body, module = inspection.body, inspection.model.module
    addresses = matching_addresses(module, body.addresses)
    maps = _maps(inspection)
    count = 0

    seen = Captured()

    def keep(x: Tensor, at: ActivationContext) -> Tensor:
        nonlocal count
        count += x.numel()
        # Check before storing, so that an answer that is too large never takes memory.
        _check_size(count, body.format, "name fewer addresses, send a shorter text")
        seen.setdefault(at.address, []).append(Record(x, at.depth, at.step))
        return x

    _attend_with_edits(inspection, maps, [edit(module, dict.fromkeys(addresses, keep))])
    if body.format == "npz":
        return _npz(_arrays(seen), "activations")
    activations = [
        {"address": address, "depth": record.depth, "values": _values(record.tensor)}
        for address, records in seen.items()
        for record in records
    ]
    return JSONResponse({"model": inspection.served.name, **maps.token_lists(), "activations": activations})


def _arrays(seen: Captured) -> dict[str, Any]:
    """Return activations by address; if an address has several depths, "@DEPTH" is added to each name."""
    return {
        address if len(records) == 1 else f"{address}@{record.depth}": record.tensor.float().cpu().numpy()
        for address, records in seen.items()
        for record in records
    }


def _values(tensor: Tensor) -> Any:
    """Return numbers as nested lists; None replaces infinity and NaN, such as a masked score."""
    numbers: Any = tensor.float().cpu().numpy()
    missing = ~np.isfinite(numbers)
    if missing.any():
        numbers = numbers.astype(object)
        numbers[missing] = None
    return numbers.tolist()


def _edit(inspection: Inspection[EditRequest]) -> Response:
    answer, call = _answering(inspection)
    lengths: dict[str, int] = {}

    def note_length(x: Tensor, at: ActivationContext) -> Tensor:
        if at.positions is not None:
            name = at.address.partition(".")[0]
            lengths[name] = max(lengths.get(name, 0), int(at.positions.max()) + 1)
        return x

    with inspection.computation.watching():
        with edit(inspection.model.module, {"*.layers.0.before": note_length}):
            unchanged = answer()
        with inspection.changing(lengths):
            changed = answer()
    python = inspection.served.runs.python(inspection.body.edits, call)
    name = inspection.served.name
    return JSONResponse({"model": name, "unchanged": unchanged, "changed": changed, "python": python})


def _answering(inspection: Inspection[EditRequest]) -> tuple[Callable[[], Any], str]:
    """Return a function that runs the model's own task on a request, and the line of Python that does the same."""
    served, model, body = inspection.served, inspection.model, inspection.body
    inputs = body.inputs
    if not served.writes:
        pipeline = pipeline_of(served)
        parameters = parameters_of(pipeline.Parameters, body.parameters)
        shown = inputs
        if isinstance(inputs, dict):
            # A pair has names in the schema, and an order in Python.
            pair = [inputs[name] for name in ("question", "context", "text", "text_pair") if name in inputs]
            shown = [tuple(pair)]
        return lambda: pipeline.run(model, [inputs], parameters)[0], f"print(model.predict({shown!r}))"
    if not isinstance(inputs, str):
        raise InputError(f"inputs must be one text, got {type(inputs).__name__}")
    if not served.translates:
        options = parameters_of(GenerationParameters, body.parameters).options
        arguments = "".join(f", {name}={value!r}" for name, value in options.items())
        return partial(_generate, model, inputs, options), f"print(model.generate({inputs!r}{arguments}))"
    return _translating(model, inputs, parameters_of(pipeline_of(served).Parameters, body.parameters))


def _generate(model: Model, text: str, options: dict[str, Any]) -> dict[str, Any]:
    (continuation,) = model.generate(text, **options)
    return {"generated_text": continuation.text}


def _translating(model: Model, text: str, parameters: Any) -> tuple[Callable[[], Any], str]:
    languages = {"from_language": parameters.src_lang, "to_language": parameters.tgt_lang}
    options = {**parameters.generate_parameters.options, **languages}
    options = {name: value for name, value in options.items() if value is not None}
    if parameters.alignments:
        options["alignments"] = True
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())

    def translate() -> dict[str, Any]:
        (best,) = model.translate_n_best(text, n=1, **options)
        return translation_json(best)

    return translate, f"print(model.translate_n_best({text!r}, n=1{arguments}))"


def _check_size(count: int, form: str, advice: str) -> None:
    most = MOST_NUMBERS[form]
    if count > most:
        other = "" if form == "npz" else ", or ask for the format npz"
        raise InputError(f"one answer in {form} may have {most:,} numbers, got more: {advice}{other}")


def _npz(arrays: dict[str, Any], name: str) -> Response:
    content = io.BytesIO()
    np.savez(content, **arrays)
    headers = {"Content-Disposition": f'attachment; filename="{name}.npz"'}
    return Response(content.getvalue(), media_type="application/octet-stream", headers=headers)
