"""Hugging Face's task schema: one path for each model, and for each model and task."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, ValidationError

from clearhead.errors import InputError
from clearhead.serve.api.engine import Ended, Job, events
from clearhead.serve.api.served import Models, Served
from clearhead.tasks.registry import find

MOST_INPUTS = 2048


class TaskRequest(BaseModel):
    """The body of a request for a task."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    inputs: Any
    parameters: dict[str, Any] | None = None
    options: dict[str, Any] | None = None


def tasks_router(models: Models) -> APIRouter:
    """Return the routes of tasks: for one model `/` as well."""
    router = APIRouter()

    @router.post("/models/{name}/pipeline/{schema}")
    async def named(name: str, schema: str, asked: TaskRequest) -> Any:
        return await _answered(models.named(name), asked, schema)

    @router.post("/models/{name}")
    async def own(name: str, asked: TaskRequest) -> Any:
        return await _answered(models.named(name), asked, None)

    @router.post("/")
    async def only(asked: TaskRequest) -> Any:
        return await _answered(models.named(None), asked, None)

    return router


async def _answered(served: Served, asked: TaskRequest, schema: str | None) -> Any:
    pipeline = _pipeline(served)
    if schema is not None and schema != pipeline.NAME:
        raise InputError(f"the model '{served.name}' answers {pipeline.NAME}, not {schema}")
    # What a client leaves out it may send as null.
    given = {name: value for name, value in (asked.parameters or {}).items() if value is not None}
    try:
        parameters = pipeline.Parameters.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            raise InputError(f"parameters.{name} is not supported: leave it out") from None
        raise InputError(f"parameters.{name}: {fault['msg'][:1].lower()}{fault['msg'][1:]}") from None
    is_many = isinstance(asked.inputs, list)
    inputs = asked.inputs if is_many else [asked.inputs]
    if not inputs or len(inputs) > MOST_INPUTS:
        raise InputError(f"inputs has {len(inputs)} texts; expected 1 to {MOST_INPUTS:,}")
    if served.translates:
        return await asyncio.gather(*[_translated(served, text, parameters) for text in inputs])
    key = (pipeline.NAME, parameters.model_dump_json())
    found = await asyncio.wrap_future(
        served.engine.call(key, lambda some: pipeline.run(served.model, some, parameters), inputs)
    )
    is_nested = getattr(pipeline, "IS_NESTED", False)  # the schema has a list around the answer to one text, too
    return found if is_many or is_nested else found[0]


def _pipeline(served: Served) -> Any:
    try:
        return find(served.model.task.kind).part("pipeline")
    except ModuleNotFoundError:
        raise InputError(
            f"the model '{served.name}' was trained to '{served.model.task.kind}', which has no task schema: send its "
            "text to /v1/completions"
        ) from None


async def _translated(served: Served, text: Any, parameters: Any) -> dict[str, Any]:
    """Return the translation of a text, which is searched for in the running batch."""
    if not isinstance(text, str):
        raise InputError(f"inputs must be a text or a list of texts, not {type(text).__name__}")
    if not text.strip():
        return {"translation_text": ""}
    options = parameters.generate_parameters.options
    reading, search = served.translation(text, options, parameters.src_lang, parameters.tgt_lang)
    translated = ""
    async for event in events(served.engine, lambda deliver: Job.of_translation(reading, search, deliver)):
        if isinstance(event, Ended) and event.number == 0:
            translated = served.tokenizer.decode(event.continuation.ids)
    return {"translation_text": translated}
