"""HTTP routes of Hugging Face's task schema: one path for each model, and one for each pair of model and task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from clearhead.apps.serve.api.bodies import Body, BodyRoute, in_thread
from clearhead.apps.serve.api.engine import EndEvent, EngineJob, events
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.base.errors import InputError
from clearhead.generate.continuation import GenerateRequest
from clearhead.generate.results import Continuation, Hypothesis, continuation_text
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks import written_text
from clearhead.tasks.pipelines import PipelineParameters, texts_of
from clearhead.tasks.written_text import FIELDS

ParametersT = TypeVar("ParametersT", bound=PipelineParameters)
MOST_INPUTS = 2048


class TaskOptions(Body):
    """Options for hosted models; accepted and ignored, since the model is loaded and answers are not cached."""

    wait_for_model: bool = True
    use_cache: bool = True


class TaskRequest(Body):
    """The body of a task request: inputs, parameters and options."""

    inputs: Any
    parameters: dict[str, Any] | None = None
    options: TaskOptions | None = None


def tasks_router(models: Models) -> APIRouter:
    """Return the routes of the tasks; `/` answers for the only model."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/models/{name}/pipeline/{schema}")
    async def run_schema(name: str, schema: str, body: TaskRequest) -> Response:
        return await _answer(models.get(name), body, schema)

    @router.post("/models/{name}")
    async def run_task(name: str, body: TaskRequest) -> Response:
        return await _answer(models.get(name), body, None)

    @router.post("/")
    async def run_only_model(body: TaskRequest) -> Response:
        return await _answer(models.get(None), body, None)

    return router


async def _answer(served: ServedModel, body: TaskRequest, schema: str | None) -> Response:
    is_many = isinstance(body.inputs, list)
    inputs = body.inputs if is_many else [body.inputs]
    if not inputs or len(inputs) > MOST_INPUTS:
        raise InputError(f"inputs has {len(inputs)} texts; expected 1 to {MOST_INPUTS:,}")
    if schema is not None and schema in FIELDS and served.writes and served.model.module.encoder is not None:
        chosen = await in_thread(parameters_of, written_text.Parameters, body.parameters)
        return await in_thread(JSONResponse, await _write_texts(served, inputs, chosen, FIELDS[schema]))
    pipeline = pipeline_of(served)
    if schema is not None and schema != pipeline.NAME:
        raise InputError(f"the model '{served.name}' answers {pipeline.NAME}, not {schema}: change the path")
    parameters = await in_thread(parameters_of, pipeline.Parameters, body.parameters)
    if served.translates:
        return await in_thread(JSONResponse, await _translate(served, inputs, parameters))
    key = (pipeline.NAME, repr(parameters))
    results = await asyncio.wrap_future(
        served.engine.call(key, lambda some: pipeline.run(served.model, some, parameters), inputs)
    )
    is_nested = getattr(pipeline, "IS_NESTED", False)  # the schema puts the answer to one text into a list, too
    return await in_thread(JSONResponse, results if is_many or is_nested else results[0])


def pipeline_of(served: ServedModel) -> Any:
    """Return the pipeline of a model's own task.

    Args:
        served: the model.

    Raises:
        InputError: the task of the model has no pipeline.
    """
    try:
        return find_task(served.model.task.kind).module("pipeline")
    except ModuleNotFoundError:
        raise InputError(
            f"the model '{served.name}' was trained to '{served.model.task.kind}', which has no task schema: send its "
            "text to /v1/completions"
        ) from None


def parameters_of(kind: type[ParametersT], values: dict[str, Any] | None) -> ParametersT:
    """Return the validated parameters of a pipeline; null means that a parameter is absent.

    Args:
        kind: the class of the parameters.
        values: the parameters of the client. None means none.

    Raises:
        InputError: a parameter is unknown or out of range; the message names it.
    """
    try:
        return kind.model_validate({name: value for name, value in (values or {}).items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            raise InputError(f"parameters.{name} is not supported: leave it out") from None
        raise InputError(f"parameters.{name}: {fault['msg'][:1].lower()}{fault['msg'][1:]}") from None


def translation_json(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return a translation as JSON of the task schema, with the word alignment if it has one."""
    aligned = {} if hypothesis.alignment is None else {"alignments": hypothesis.alignment}
    return {"translation_text": hypothesis.text, **aligned}


async def _first_ends(
    served: ServedModel, texts: list[Any], make_request: Callable[[str], GenerateRequest]
) -> dict[int, tuple[GenerateRequest, Continuation]]:
    """Generate for each text in the running batch; return {text number: (request, best sequence)}.

    Args:
        served: the model.
        texts: the inputs of the client; an empty text has no request.
        make_request: function that returns the request for a text.

    Raises:
        InputError: an input is not a text, or its request is refused.
    """
    requests: dict[int, GenerateRequest] = {}
    jobs: list[EngineJob] = []
    for number, text in enumerate(texts_of(texts)):
        if text.strip():
            # Read one text at a time: other requests take turns, and the loop ends when the client disconnects.
            requests[number] = await in_thread(make_request, text)
            jobs.append(await in_thread(EngineJob.of_request, served.engine, requests[number]))
    numbers = [*requests]
    ends: dict[int, tuple[GenerateRequest, Continuation]] = {}
    async with aclosing(events(served.engine, jobs)) as running:
        async for number, event in running:
            if isinstance(event, EndEvent) and event.number == 0:
                ends[numbers[number]] = requests[numbers[number]], event.continuation
    return ends


async def _write_texts(
    served: ServedModel, texts: list[Any], parameters: written_text.Parameters, field: str
) -> list[dict[str, Any]]:
    """Return the generated text for each input of an encoder-decoder."""
    options = parameters.options(has_limit=served.position_limit is not None)
    settled = await in_thread(partial(served.model.generate_options, **options))
    ends = await _first_ends(served, texts, lambda text: served.request(text, settled))
    written = [""] * len(texts)
    for number, (request, end) in ends.items():
        ids = end.ids[:-1] if end.stop_reason == "end" else end.ids
        written[number] = continuation_text(served.tokenizer.decode, ids, request.context(0))
    return [{field: text} for text in written]


async def _translate(served: ServedModel, texts: list[Any], parameters: Any) -> list[dict[str, Any]]:
    """Return the translations of texts, computed in the running batch."""
    options, languages = parameters.generate_parameters.options, (parameters.src_lang, parameters.tgt_lang)
    ends = await _first_ends(served, texts, lambda text: served.translation(text, options, *languages))
    translations: list[Hypothesis] = [Hypothesis("", [], 0.0, 0.0)] * len(texts)
    target = served.tokenizer
    for number, (_, end) in ends.items():
        translations[number] = Hypothesis(
            target.decode(end.ids), target.tokens(end.ids), end.score, end.log_probability, end.ids
        )
    if parameters.alignments:
        # A new aligner for each request: its heads are measured on the texts of this request alone.
        aligner = served.model.word_aligner(True, parameters.src_lang, parameters.tgt_lang)

        def align(some: list[Any]) -> list[Any]:
            return [[best for (best,) in aligner.add_to(texts, [[best] for best in translations])] for _ in some]

        (translations,) = await asyncio.wrap_future(served.engine.call(aligner, align, [None]))
    return [translation_json(best) for best in translations]
