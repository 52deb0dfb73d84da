"""Text that is generated, in the shapes of OpenAI's protocol: whole, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from clearhead.apps.serve.api.bodies import BodyRoute, in_thread
from clearhead.apps.serve.api.engine import Job, Step, events
from clearhead.apps.serve.api.openai_types import ChatRequest, CompletionRequest, _Generating
from clearhead.apps.serve.api.schemas import request_under_schema
from clearhead.apps.serve.api.served import Models, Scored, Served, given
from clearhead.base.errors import InputError
from clearhead.generate.continuation import GenerateRequest, checked_limits
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import Continuation
from clearhead.interpret.maps.token_texts import TokenWriter, WrittenToken
from clearhead.text.long_texts import refuse_enormous

EVENT_STREAM = "text/event-stream"
DEFAULT_TOKENS = 16
"""Of a completion; a chat has as many as its model's own settings say."""


@dataclass
class Choice:
    """One sequence of an answer.

    Args:
        index: among all choices.
        request: what it continues.
        steps: its tokens so far.
        scored: the prompt, where it is echoed with log-probabilities.
        prefix: the text of the prompt, where it is echoed.
        written_prompt: the tokens of the prompt, where it is echoed with log-probabilities.
        writer: the writer of the generated tokens; None before the first token.
    """

    index: int
    request: GenerateRequest | None
    prompt_tokens: int
    steps: list[Step] = field(default_factory=list)
    continuation: Continuation | None = None
    scored: Scored | None = None
    prefix: str = ""
    written_prompt: Sequence[WrittenToken] = ()
    writer: TokenWriter | None = None

    def write(self, served: Served, step: Step) -> WrittenToken:
        """Return the token of the next step with its text and offset; an end token has an empty text."""
        assert self.request is not None
        if self.writer is None:
            self.writer = TokenWriter(served.tokenizer, self.request.context(0), self.request.end_ids)
        token = self.writer.add(step.token)
        return replace(token, offset=len(self.prefix) + token.offset)

    def offsets(self, tokens: Sequence[WrittenToken]) -> list[int]:
        """Return the character offset of each token; tokens of a stop text, which is cut off, begin at the end."""
        most = sys.maxsize if self.continuation is None else len(self.text)
        return [min(token.offset, most) for token in tokens]

    @property
    def text(self) -> str:
        """The text so far."""
        return self.prefix + "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: a stop text or an end token, or the limit."""
        if self.continuation is None:
            return None
        return "length" if self.continuation.stop_reason == "length" else "stop"


def generating_router(models: Models) -> APIRouter:
    """Return the routes of completions and chats."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest) -> Response:
        served = models.named(asked.model)
        limit = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
        if limit == 0 and not asked.echo:
            raise InputError("max_tokens is 0, so that nothing is generated: raise it, or ask for the prompt with echo")
        options = _options(served, asked, max(limit, 1))
        # Without max_tokens an answer ends at the last position.
        options = replace(options, must_fit=asked.max_tokens is not None and limit > 0)
        shape = _Completion(served, asked, limit)
        # Read one prompt at a time: other requests take turns, and the loop ends when the client disconnects.
        read = partial(_request, served) if limit else served.request
        requests = [await in_thread(read, prompt, options) for prompt in asked.prompts]
        return await _answered(served, asked, shape, requests)

    @router.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        served = models.named(asked.model)
        options = _options(served, asked, asked.max_completion_tokens or asked.max_tokens)
        shape = _Chat(served, asked)
        # A template runs for up to some seconds, in which other requests go on.
        text = await asyncio.to_thread(_chat_text, served, asked)
        generate_request = await in_thread(partial(served.request, text, options, is_chat=True))
        schema = None if asked.response_format is None else asked.response_format.content
        if schema is not None:
            traffic = request.app.state.traffic
            generate_request = await request_under_schema(traffic, served, generate_request, schema)
        return await _answered(served, asked, shape, [generate_request])

    return router


def _request(served: Served, prompt: str | list[int], options: GenerateOptions) -> GenerateRequest:
    """Return the request of one prompt, and check its length before the next prompt is tokenized."""
    request = served.request(prompt, options)
    checked_limits(served.engine.tree, request)
    return request


def _options(served: Served, asked: _Generating, limit: int | None) -> GenerateOptions:
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    return served.model.generate_options(
        **given(
            max_new_tokens=limit,
            temperature=asked.temperature,
            top_p=None if asked.temperature == 0 else asked.top_p,
            num_return_sequences=asked.n if asked.n > 1 and asked.temperature != 0 else None,
            stop=stops or None,
            seed=None if asked.temperature == 0 else asked.seed,
            beyond_positions=served.beyond_positions or None,
        )
    )


def _chat_text(served: Served, asked: ChatRequest) -> str:
    checkpoint = served.model.hf_checkpoint
    template = None if checkpoint is None else checkpoint.tokenizers.chat
    if template is None:
        raise InputError(f"the model '{served.name}' has no chat template: send its text to /v1/completions")
    messages: list[dict[str, str]] = []
    for number, message in enumerate(asked.messages, start=1):
        if message.content is None:
            raise InputError(f"message {number} has no content")
        name = {} if message.name is None else {"name": message.name}
        messages.append({"role": message.role, "content": message.content, **name})
    refuse_enormous(["".join(message["content"] for message in messages)], served.position_limit, "chat")
    return template.render(messages)


class _Completion:
    """The shape of a completion."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, served: Served, asked: CompletionRequest, limit: int) -> None:
        self.served, self.asked, self.limit = served, asked, limit
        self.alternatives = asked.logprobs or 0
        self.echoes, self.generates = asked.echo, limit > 0

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, choice.steps, choice.scored),
            "finish_reason": choice.finish_reason or "length",
        }

    def piece(self, choice: Choice, steps: Sequence[Step], text: str, *, is_first: bool) -> dict[str, Any]:
        scored = choice.scored if is_first else None
        return {
            "index": choice.index,
            "text": (choice.prefix if is_first else "") + text,
            "logprobs": self._logprobs(choice, steps, scored),
            "finish_reason": None if steps else choice.finish_reason or "length",
        }

    def _logprobs(self, choice: Choice, steps: Sequence[Step], scored: Scored | None) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        tokens = [choice.write(self.served, step) for step in steps]
        values: list[float | None] = [step.log_probability for step in steps]
        alternatives: list[Sequence[tuple[int, float]] | None] = [step.alternatives for step in steps]
        if scored is not None:
            tokens = [*choice.written_prompt, *tokens]
            values = [*scored.log_probabilities, *values]
            alternatives = [*scored.alternatives, *alternatives]
        top, texts = [self._named(some) for some in alternatives], [token.text for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": choice.offsets(tokens)}

    def _named(self, alternatives: Sequence[tuple[int, float]] | None) -> dict[str, float] | None:
        if alternatives is None:
            return None
        return {token.text: value for token, value in self.served.known_tokens(alternatives)}


class _Chat:
    """The shape of a chat."""

    kind, prefix = "chat.completion", "chatcmpl"
    echoes, generates = False, True

    def __init__(self, served: Served, asked: ChatRequest) -> None:
        if asked.top_logprobs and not asked.logprobs:
            raise InputError("top_logprobs needs logprobs: true")
        self.served, self.asked = served, asked
        self.alternatives = asked.top_logprobs or 0

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice, choice.steps),
            "finish_reason": choice.finish_reason,
        }

    def piece(self, choice: Choice, steps: Sequence[Step], text: str, *, is_first: bool) -> dict[str, Any]:
        delta = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(choice, steps),
            "finish_reason": None if steps else choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, steps: Sequence[Step]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = []
        for step in steps:
            top = [_named(*known) for known in self.served.known_tokens(step.alternatives)]
            token = _named(choice.write(self.served, step), step.log_probability)
            content.append({**token, "top_logprobs": top})
        return {"content": content, "refusal": None}


def _named(token: WrittenToken, log_probability: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": log_probability, "bytes": list(token.content)}


async def _answered(
    served: Served, asked: _Generating, shape: _Completion | _Chat, requests: list[GenerateRequest]
) -> Response:
    """Return the answer for all requests: whole, or as a stream."""
    if asked.stream_options is not None and not asked.stream:
        raise InputError("stream_options needs stream: true")
    choices, jobs = await in_thread(_choices_of, served, requests, asked.n)
    if shape.echoes:
        await _echo(served, asked, shape, jobs)
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": served.name,
    }
    if not shape.generates and not asked.stream:
        return await in_thread(_whole, head, shape, choices)
    running = _generated(served, jobs, shape.alternatives) if shape.generates else _echoed(choices)
    if not asked.stream:
        async for _ in running:
            pass
        return await in_thread(_whole, head, shape, choices)
    # The first event comes before the status is sent, so that a refusal has a status of its own.
    first_event = await anext(running, None)
    stream = _sent(head, shape, choices, asked, first_event, running)
    return StreamingResponse(stream, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})


def _choices_of(
    served: Served, requests: list[GenerateRequest], count: int
) -> tuple[list[Choice], list[tuple[GenerateRequest, list[Choice]]]]:
    """Return all choices, and each request with its choices."""
    choices: list[Choice] = []
    jobs: list[tuple[GenerateRequest, list[Choice]]] = []
    for request in requests:
        prompt_tokens, first = len(served.prompt_ids(request)), len(choices)
        choices += [Choice(first + number, request, prompt_tokens) for number in range(count)]
        jobs.append((request, choices[first:]))
    return choices, jobs


def _whole(head: dict[str, Any], shape: _Completion | _Chat, choices: list[Choice]) -> JSONResponse:
    found = [shape.whole(choice) for choice in choices]
    return JSONResponse({**head, "object": shape.kind, "choices": found, **_usage(choices)})


async def _echo(
    served: Served, asked: _Generating, shape: _Completion | _Chat, jobs: list[tuple[GenerateRequest, list[Choice]]]
) -> None:
    """Put the prompts in front of the choices, with their log-probabilities where these are asked for."""
    is_scored = isinstance(asked, CompletionRequest) and asked.logprobs is not None
    scored: list[Scored | None] = [None] * len(jobs)
    if is_scored:
        ids = [tuple(made.prompts[0]) for made, _ in jobs]
        k = shape.alternatives
        scored = await asyncio.wrap_future(served.engine.call(("score", k), lambda some: served.score(some, k), ids))
    assert isinstance(asked, CompletionRequest)
    for (request, choices), prompt_scores, prompt in zip(jobs, scored, asked.prompts, strict=True):
        read = served.prompt_ids(request)
        text = prompt if isinstance(prompt, str) else await in_thread(served.model.tokenizers.source.decode, read)
        written = await in_thread(served.written_prompt, prompt, read) if is_scored else ()
        for choice in choices:
            choice.prefix, choice.scored, choice.written_prompt = text, prompt_scores, written


async def _echoed(choices: list[Choice]) -> AsyncIterator[tuple[Choice, Step | None]]:
    """Yield each choice of an answer that is the prompt alone."""
    for choice in choices:
        yield choice, None


async def _generated(
    served: Served, jobs: list[tuple[GenerateRequest, list[Choice]]], alternatives: int
) -> AsyncIterator[tuple[Choice, Step | None]]:
    """Yield each step of the choices, and None at the end of each; all end with the first failure."""
    engine = served.engine
    queued = await in_thread(lambda: [Job.of_request(engine, request, alternatives) for request, _ in jobs])
    async with aclosing(events(engine, queued)) as running:
        async for number, event in running:
            request, choices = jobs[number]
            # Greedy search gives one text, however many are asked for.
            is_greedy = request.options.num_sequences < len(choices)
            for choice in choices if is_greedy else choices[event.number : event.number + 1]:
                if isinstance(event, Step):
                    choice.steps.append(event)
                    yield choice, event
                else:
                    choice.continuation = event.continuation
                    yield choice, None


async def _sent(
    head: dict[str, Any],
    shape: _Completion | _Chat,
    choices: list[Choice],
    asked: _Generating,
    first: tuple[Choice, Step | None] | None,
    running: AsyncIterator[tuple[Choice, Step | None]],
) -> AsyncIterator[str]:
    """Yield the events of a stream."""
    kind = "text_completion" if isinstance(shape, _Completion) else "chat.completion.chunk"
    has_usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = {**head, "object": kind, **({"usage": None} if has_usage else {})}
    begun: set[int] = set()
    try:
        one = first
        while one is not None:
            choice, step = one
            steps, text = ([step], step.text) if step is not None else ([], "")
            is_first = choice.index not in begun
            begun.add(choice.index)
            piece = partial(shape.piece, choice, steps, text, is_first=is_first)
            # The first event may hold a whole prompt.
            yield await in_thread(_event_of, head, piece) if is_first and shape.echoes else _event_of(head, piece)
            one = await anext(running, None)
    except Exception as error:  # noqa: BLE001 - the status is sent already, so that the error is an event
        yield _event({"error": {"message": f"{error}", "type": "server_error", "param": None, "code": None}})
        return
    if has_usage:
        yield _event({**head, "choices": [], **_usage(choices)})
    yield "data: [DONE]\n\n"


def _event_of(head: dict[str, Any], piece: Callable[[], dict[str, Any]]) -> str:
    return _event({**head, "choices": [piece()]})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _usage(choices: list[Choice]) -> dict[str, Any]:
    prompts = {id(choice.request): choice.prompt_tokens for choice in choices}
    read, written = sum(prompts.values()), sum(len(choice.steps) for choice in choices)
    return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}
