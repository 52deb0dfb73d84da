"""Request bodies in OpenAI's protocol, parsed in a thread; a disconnected client cancels its request.

A field that has an effect and is not supported is refused by name. The event loop serves all clients, so no work that
grows with the size of a request runs in it.

Source: the OpenAI API reference, completions, chat and embeddings.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, TypeVarTuple

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.requests import ClientDisconnect

from clearhead.apps.serve.work import ClientDisconnected
from clearhead.text.long_texts import LONGEST_PROMPT

Token = Annotated[int, Field(ge=0, lt=2**31)]
# Report only the first wrong item: records of a hundred thousand would take seconds and much memory.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=LONGEST_PROMPT, fail_fast=True)]
MOST_CHOICES, MOST_PROMPTS, MOST_STOPS = 64, 2048, 16
Prompts = Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


Neutral = Mapping[str, tuple[object, ...]]
ANY = object()
"""Marks a field in which every value is neutral."""


class Body(BaseModel):
    """Base of request bodies: null means that a field is absent, and unknown fields are refused."""

    NEUTRAL: ClassVar[Neutral] = {}
    """Unsupported fields that are accepted with these values, which change nothing."""
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Drop fields that have no effect, and all unknown fields but one: many errors would take much memory."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()} | cls.NEUTRAL.keys()
        unknown = itertools.islice((name for name in body if name not in known and body[name] is not None), 1)
        fields = {name: body[name] for name in (*known, *unknown) if name in body}
        return {name: value for name, value in fields.items() if not cls._is_neutral(name, value)}

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        if value is None:
            return name not in cls.model_fields or not cls.model_fields[name].is_required()
        neutral = cls.NEUTRAL.get(name, ())
        # False equals 0 in Python, but not in JSON.
        is_listed = any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)
        return ANY in neutral or is_listed


class _Request(Body):
    model: str | None = None
    user: str | None = None


class StreamOptions(Body):
    """Options of a stream, such as usage in its last event."""

    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (False,)}
    include_usage: bool = False


class GenerationBody(_Request):
    """Fields that completions and chats share."""

    NEUTRAL: ClassVar[Neutral] = {"frequency_penalty": (0,), "logit_bias": ({},), "presence_penalty": (0,)}
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("temperature", "top_p", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        # An integer that no float can hold is outside every range, and pydantic refuses it.
        return float(value) if type(value) is int and abs(value) < 2**53 else value


class CompletionRequest(GenerationBody):
    """The body of /v1/completions."""

    NEUTRAL: ClassVar[Neutral] = {**GenerationBody.NEUTRAL, "best_of": (1,), "suffix": ("",)}
    prompt: str | Tokens | Prompts | None
    max_tokens: Annotated[int, Field(ge=0, lt=2**20)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request, each a text or token ids; a missing prompt means an empty text."""
        if self.prompt is None or isinstance(self.prompt, str):
            return [self.prompt or ""]
        if all(isinstance(token, int) for token in self.prompt):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ChatMessage(Body):
    """One message of a chat, such as an earlier answer that the client sends back."""

    NEUTRAL: ClassVar[Neutral] = {"annotations": ([],), "tool_calls": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, value: Any) -> Any:
        """Join the text parts of a message; a list with any other part stays a list, and is refused."""
        texts = [item.get("text") for item in value if _is_text_part(item)] if isinstance(value, list) else []
        return "".join(texts) if texts and len(texts) == len(value) else value


def _is_text_part(item: Any) -> bool:
    fields = {name for name, value in item.items() if value is not None} if isinstance(item, dict) else set()
    return fields == {"type", "text"} and item["type"] == "text" and isinstance(item["text"], str)


class TextFormat(Body):
    """Format of an answer: any text."""

    type: Literal["text"]

    @property
    def content(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None, since any text is allowed."""
        return None


class ObjectFormat(Body):
    """Format of an answer: any JSON object."""

    type: Literal["json_object"]

    @property
    def content(self) -> dict[str, Any] | None:
        """JSON schema of the answer: any object."""
        return {"type": "object"}


class NamedSchema(Body):
    """JSON schema with a name; answers always follow it, whether `strict` is set or not."""

    name: str
    description: str | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(Body):
    """Format of an answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def content(self) -> dict[str, Any] | None:
        """JSON schema of the answer."""
        return self.json_schema.content


class ChatRequest(GenerationBody):
    """The body of /v1/chat/completions."""

    NEUTRAL: ClassVar[Neutral] = {
        **GenerationBody.NEUTRAL,
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        # Caches and user names change no answer. Neither do parallel calls without tools.
        **dict.fromkeys(
            ("parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "safety_identifier"), (ANY,)
        ),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class EmbeddingRequest(_Request):
    """The body of /v1/embeddings."""

    input: str | Tokens | Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TokenizeRequest(_Request):
    """The body of /tokenize."""

    text: str
    add_special_tokens: bool = True


class DetokenizeRequest(_Request):
    """The body of /detokenize."""

    tokens: Annotated[list[Token], Field(max_length=LONGEST_PROMPT, fail_fast=True)]


Args = TypeVarTuple("Args")
ResultT = TypeVar("ResultT")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
LARGE_BODY: Final = 2**16
"""Bytes from which a request uses the threads for large requests, so that small requests never wait for it."""
_SMALL: Final = ThreadPoolExecutor(4, "requests")
_LARGE: Final = ThreadPoolExecutor(2, "large requests")
_THREADS: Final = contextvars.ContextVar("threads", default=_SMALL)


async def in_thread(function: Callable[[*Args], ResultT], *args: *Args) -> ResultT:
    """Run a function in a thread, and return its result; large and small requests have separate threads."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_THREADS.get(), run, function, *args)


class BodyRoute(APIRoute):
    """Route that parses its body in a thread, and cancels the computation when the client disconnects."""

    def get_route_handler(self) -> Handler:
        """Return the function that parses and answers the requests of the route."""
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        async def handler(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                raise ClientDisconnected from None
            _THREADS.set(_LARGE if len(body) >= LARGE_BODY else _SMALL)
            if body:
                # FastAPI takes this value for the parsed body, and a validated model passes its own validation.
                request._json = await in_thread(_validate, field, body)
            return await _cancel_on_disconnect(request, handle(request))

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


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer to a request, or cancel the work when the client disconnects.

    Raises:
        ClientDisconnected: the client disconnected before the answer was ready.
    """
    task, message = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, message}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for pending in (task, message):
            pending.cancel()
        await asyncio.gather(task, message, return_exceptions=True)
