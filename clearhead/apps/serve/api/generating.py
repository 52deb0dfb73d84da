"""Answers of completions and chats in OpenAI's protocol: whole, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Event
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from clearhead.apps.serve.api.bodies import BodyRoute, ChatRequest, CompletionRequest, GenerationBody, in_thread
from clearhead.apps.serve.api.engine import EngineJob, TokenEvent, events
from clearhead.apps.serve.api.refusals import Closing
from clearhead.apps.serve.api.served import Models, Prompt, ScoredText, ServedModel, drop_none
from clearhead.apps.serve.api.server import EVENT_STREAM
from clearhead.apps.serve.gate import Traffic
from clearhead.apps.serve.work import POLLED, ignore_failure
from clearhead.base.errors import InputError
from clearhead.generate.continuation import GenerateRequest, check_limits
from clearhead.generate.json_schema import MOST_AT_ONCE, with_schema
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import Continuation
from clearhead.interpret.maps.token_texts import TokenWriter, WrittenToken
from clearhead.text.long_texts import refuse_enormous

DEFAULT_TOKENS = 16
"""Tokens of a completion without max_tokens. The checkpoint's settings limit a chat."""
BodyT = TypeVar("BodyT", bound=GenerationBody)


def generating_router(models: Models) -> APIRouter:
    """Return the routes of completions and chats."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        answer = CompletionAnswer(models.get(body.model), body)
        # Read one prompt at a time: other requests take turns, and the loop ends when the client disconnects.
        for content in body.prompts:
            await in_thread(answer.read, content)
        return await answer.respond()

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        answer = ChatAnswer(models.get(body.model), body)
        await answer.read(request.app.state.traffic)
        return await answer.respond()

    return router


@dataclass(eq=False)
class AnsweredPrompt:
    """One prompt of a request, with the choices that continue it.

    Args:
        content: the prompt as the client sent it: a text or token ids.
        request: the prompt in token ids, with the options of generation.
        num_tokens: the number of tokens that the model reads.
        choices: the sequences that continue the prompt.
        echo: the text of the prompt if the answer repeats it; otherwise an empty text.
        scores: log-probabilities of the echoed tokens, if the client requests them.
        tokens: the echoed tokens, if the client requests log-probabilities.
    """

    content: Prompt
    request: GenerateRequest
    num_tokens: int
    choices: list[AnswerChoice] = field(default_factory=list)
    echo: str = ""
    scores: ScoredText | None = None
    tokens: Sequence[WrittenToken] = ()


@dataclass(eq=False)
class AnswerChoice:
    """One sequence of an answer.

    Args:
        index: the number of the choice in the answer.
        prompt: the prompt that the choice continues.
        steps: the tokens generated so far.
        continuation: the complete sequence. None means that it is still generated.
        writer: the converter of generated tokens to their texts and offsets; None before the first token.
    """

    index: int
    prompt: AnsweredPrompt
    steps: list[TokenEvent] = field(default_factory=list)
    continuation: Continuation | None = None
    writer: TokenWriter | None = None

    def write(self, served: ServedModel, step: TokenEvent) -> WrittenToken:
        """Return the token of the next step with its text and offset; an end token has an empty text."""
        if self.writer is None:
            request = self.prompt.request
            self.writer = TokenWriter(served.tokenizer, request.context(0), request.end_ids)
        token = self.writer.add(step.token)
        return replace(token, offset=len(self.prompt.echo) + token.offset)

    def offsets(self, tokens: Sequence[WrittenToken]) -> list[int]:
        """Return the character offset of each token; tokens of a stop text, which is cut off, begin at the end."""
        most = sys.maxsize if self.continuation is None else len(self.text)
        return [min(token.offset, most) for token in tokens]

    @property
    def text(self) -> str:
        """The text so far, after the echoed prompt."""
        return self.prompt.echo + "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str | None:
        """Reason of the end: "stop" for a stop text or an end token, "length" for the limit; None before the end."""
        if self.continuation is None:
            return None
        return "length" if self.continuation.stop_reason == "length" else "stop"


class GeneratedAnswer(ABC, Generic[BodyT]):
    """Record of one request for generated text: its model, body, options, prompts and choices, and its answer.

    Args:
        served: the model.
        body: the body of the request.
        limit: the maximum number of new tokens; None means the limit of the checkpoint's settings.
        alternatives: the number of the most probable ids that come with each token.

    Raises:
        InputError: two fields contradict each other, or the model does not support a field.
    """

    KIND: ClassVar[str]
    """The object of a whole answer."""
    EVENT_KIND: ClassVar[str]
    """The object of an event of a stream."""
    ID_PREFIX: ClassVar[str]

    def __init__(self, served: ServedModel, body: BodyT, limit: int | None, alternatives: int) -> None:
        if body.stream_options is not None and not body.stream:
            raise InputError("stream_options needs stream: set stream to true, or leave stream_options out")
        self.served: ServedModel = served
        self.body: BodyT = body
        self.alternatives: int = alternatives
        self.options: GenerateOptions = served.model.generate_options(**self._options(limit))
        self.prompts: list[AnsweredPrompt] = []
        self.head: dict[str, Any] = {
            "id": f"{self.ID_PREFIX}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }

    def _options(self, limit: int | None) -> dict[str, Any]:
        """Return the options of generation that the client sent."""
        body = self.body
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        return drop_none(
            max_new_tokens=limit,
            temperature=body.temperature,
            top_p=None if body.temperature == 0 else body.top_p,
            num_return_sequences=body.n if body.n > 1 and body.temperature != 0 else None,
            stop=stops or None,
            seed=None if body.temperature == 0 else body.seed,
            beyond_positions=self.served.beyond_positions or None,
        )

    @property
    def choices(self) -> list[AnswerChoice]:
        """The choices of all prompts."""
        return [choice for prompt in self.prompts for choice in prompt.choices]

    @property
    def generates(self) -> bool:
        """False if the answer only repeats its prompts."""
        return True

    @abstractmethod
    def whole(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return a choice in JSON."""

    @abstractmethod
    def piece(self, choice: AnswerChoice, step: TokenEvent | None, *, is_first: bool) -> dict[str, Any]:
        """Return the JSON of a stream event: one token of a choice or its end.

        Args:
            choice: the choice.
            step: the token; None at the end of the choice.
            is_first: True for the first event of the choice.
        """

    async def respond(self) -> Response:
        """Return the answer for all prompts: whole, or as a stream."""
        await self._echo()
        running = self._run()
        if self.body.stream:
            # Wait for the first event before the status is sent, so that a refusal has its own status.
            stream = self._stream(await anext(running, None), running)
            return StreamingResponse(stream, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})
        if self.generates:
            async for _ in running:
                pass
        return await in_thread(self._whole)

    def _add(self, content: Prompt, request: GenerateRequest) -> None:
        """Add a prompt with its choices."""
        prompt = AnsweredPrompt(content, request, len(self.served.prompt_ids(request)))
        first = self.body.n * len(self.prompts)
        prompt.choices += [AnswerChoice(first + number, prompt) for number in range(self.body.n)]
        self.prompts.append(prompt)

    async def _echo(self) -> None:
        """Put the prompts in front of the generated texts, if the client requests the echo."""

    def _whole(self) -> Response:
        choices = [self.whole(choice) for choice in self.choices]
        return JSONResponse({**self.head, "object": self.KIND, "choices": choices, **self._usage()})

    async def _run(self) -> AsyncGenerator[tuple[AnswerChoice, TokenEvent | None], None]:
        """Yield each step of the choices, and None at the end of each; all end with the first failure."""
        if not self.generates:
            for choice in self.choices:
                yield choice, None
            return
        async with aclosing(events(self.served.engine, await in_thread(self._jobs))) as running:
            async for number, event in running:
                prompt = self.prompts[number]
                # Greedy search gives one text for all choices.
                is_greedy = prompt.request.options.num_sequences < len(prompt.choices)
                for choice in prompt.choices if is_greedy else prompt.choices[event.number : event.number + 1]:
                    if isinstance(event, TokenEvent):
                        choice.steps.append(event)
                        yield choice, event
                    else:
                        choice.continuation = event.continuation
                        yield choice, None

    def _jobs(self) -> list[EngineJob]:
        engine = self.served.engine
        return [EngineJob.of_request(engine, prompt.request, self.alternatives) for prompt in self.prompts]

    async def _stream(
        self,
        first: tuple[AnswerChoice, TokenEvent | None] | None,
        running: AsyncIterator[tuple[AnswerChoice, TokenEvent | None]],
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        options = self.body.stream_options
        has_usage = options is not None and options.include_usage
        head = {**self.head, "object": self.EVENT_KIND, **({"usage": None} if has_usage else {})}
        begun: set[int] = set()
        try:
            current = first
            while current is not None:
                choice, step = current
                is_first = choice.index not in begun
                begun.add(choice.index)
                write = partial(self._write_piece, head, choice, step, is_first=is_first)
                # The first event may hold a whole prompt.
                is_large = is_first and (choice.prompt.echo or choice.prompt.scores)
                yield await in_thread(write) if is_large else write()
                current = await anext(running, None)
        except Exception as error:  # noqa: BLE001 - the status is sent already, so that the error is an event
            yield _event({"error": {"message": f"{error}", "type": "server_error", "param": None, "code": None}})
            return
        if has_usage:
            yield _event({**head, "choices": [], **self._usage()})
        yield "data: [DONE]\n\n"

    def _write_piece(
        self, head: dict[str, Any], choice: AnswerChoice, step: TokenEvent | None, *, is_first: bool
    ) -> str:
        return _event({**head, "choices": [self.piece(choice, step, is_first=is_first)]})

    def _usage(self) -> dict[str, Any]:
        read = sum(prompt.num_tokens for prompt in self.prompts)
        written = sum(len(choice.steps) for choice in self.choices)
        return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}


class CompletionAnswer(GeneratedAnswer[CompletionRequest]):
    """Record of a request for completions, and its answer.

    Args:
        served: the model.
        body: the body of the request.

    Raises:
        InputError: max_tokens is 0 without echo.
    """

    KIND: ClassVar[str] = "text_completion"
    EVENT_KIND: ClassVar[str] = "text_completion"
    ID_PREFIX: ClassVar[str] = "cmpl"

    def __init__(self, served: ServedModel, body: CompletionRequest) -> None:
        self.limit: int = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if self.limit == 0 and not body.echo:
            raise InputError("max_tokens must be at least 1 without echo, got 0: raise it, or set echo to true")
        super().__init__(served, body, max(self.limit, 1), body.logprobs or 0)
        # Without max_tokens an answer ends at the last position.
        self.options: GenerateOptions = replace(self.options, must_fit=body.max_tokens is not None and self.generates)

    @property
    def generates(self) -> bool:
        """False if max_tokens is 0."""
        return self.limit > 0

    def read(self, content: Prompt) -> None:
        """Read one prompt, and check its length before the next prompt is tokenized."""
        request = self.served.request(content, self.options)
        if self.generates:
            check_limits(self.served.engine.tree, request)
        self._add(content, request)

    def whole(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return a choice in JSON."""
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice, choice.steps, choice.prompt.scores),
            "finish_reason": choice.finish_reason or "length",
        }

    def piece(self, choice: AnswerChoice, step: TokenEvent | None, *, is_first: bool) -> dict[str, Any]:
        """Return the JSON of a stream event: one token of a choice or its end; the first event repeats the prompt."""
        steps = [] if step is None else [step]
        scores = choice.prompt.scores if is_first else None
        return {
            "index": choice.index,
            "text": (choice.prompt.echo if is_first else "") + "".join(token_event.text for token_event in steps),
            "logprobs": self._logprobs(choice, steps, scores),
            "finish_reason": None if steps else choice.finish_reason or "length",
        }

    async def _echo(self) -> None:
        """Put the prompts and their log-probabilities in front of the generated texts, if the client sets `echo`."""
        if not self.body.echo:
            return
        served, k, scores = self.served, self.alternatives, list[ScoredText | None]([None] * len(self.prompts))
        has_scores = self.body.logprobs is not None
        if has_scores:
            ids = [tuple(prompt.request.prompts[0]) for prompt in self.prompts]
            future = served.engine.call(("score", k), lambda some: served.score(some, k), ids)
            scores = await asyncio.wrap_future(future)
        decode = served.model.tokenizers.source.decode
        for prompt, prompt_scores in zip(self.prompts, scores, strict=True):
            content, read = prompt.content, served.prompt_ids(prompt.request)
            prompt.echo = content if isinstance(content, str) else await in_thread(decode, read)
            prompt.scores = prompt_scores
            if has_scores:
                prompt.tokens = await in_thread(served.prompt_tokens, content, read)

    def _logprobs(
        self, choice: AnswerChoice, steps: Sequence[TokenEvent], scores: ScoredText | None
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        tokens = [choice.write(self.served, step) for step in steps]
        values: list[float | None] = [step.log_probability for step in steps]
        alternatives: list[Sequence[tuple[int, float]] | None] = [step.alternatives for step in steps]
        if scores is not None:
            tokens = [*choice.prompt.tokens, *tokens]
            values = [*scores.log_probabilities, *values]
            alternatives = [*scores.alternatives, *alternatives]
        top, texts = [self._alternatives_json(some) for some in alternatives], [token.text for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": choice.offsets(tokens)}

    def _alternatives_json(self, alternatives: Sequence[tuple[int, float]] | None) -> dict[str, float] | None:
        if alternatives is None:
            return None
        return {token.text: value for token, value in self.served.alternative_tokens(alternatives)}


class ChatAnswer(GeneratedAnswer[ChatRequest]):
    """Record of a request for the next message of a chat, and its answer.

    Args:
        served: the model.
        body: the body of the request.

    Raises:
        InputError: top_logprobs is set without logprobs.
    """

    KIND: ClassVar[str] = "chat.completion"
    EVENT_KIND: ClassVar[str] = "chat.completion.chunk"
    ID_PREFIX: ClassVar[str] = "chatcmpl"

    def __init__(self, served: ServedModel, body: ChatRequest) -> None:
        if body.top_logprobs and not body.logprobs:
            raise InputError("top_logprobs needs logprobs: set logprobs to true, or leave top_logprobs out")
        super().__init__(served, body, body.max_completion_tokens or body.max_tokens, body.top_logprobs or 0)

    async def read(self, traffic: Traffic) -> None:
        """Format and tokenize the messages, and compile the JSON schema of the answer if there is one.

        Args:
            traffic: the open requests of the server; tells when the server is shutting down.

        Raises:
            InputError: the model has no chat template, or the schema is refused or exceeds its bounds.
            Closing: the server is shutting down.
        """
        # A template may run for seconds; other requests continue meanwhile.
        text = await asyncio.to_thread(self._text)
        request = await in_thread(partial(self.served.request, text, self.options, is_chat=True))
        schema = None if self.body.response_format is None else self.body.response_format.content
        if schema is not None:
            request = await self._follow_schema(request, schema, traffic)
        self._add(text, request)

    def _text(self) -> str:
        """Return the chat as one text, formatted by the template of the checkpoint."""
        checkpoint = self.served.model.hf_checkpoint
        template = None if checkpoint is None else checkpoint.tokenizers.chat
        if template is None:
            raise InputError(f"the model '{self.served.name}' has no chat template: send its text to /v1/completions")
        messages: list[dict[str, str]] = []
        for number, message in enumerate(self.body.messages, start=1):
            if message.content is None:
                raise InputError(f"message {number} has no content: give it a text")
            name = {} if message.name is None else {"name": message.name}
            messages.append({"role": message.role, "content": message.content, **name})
        refuse_enormous(["".join(message["content"] for message in messages)], self.served.position_limit, "chat")
        return template.render(messages)

    async def _follow_schema(
        self, request: GenerateRequest, schema: Mapping[str, Any], traffic: Traffic
    ) -> GenerateRequest:
        """Return a request for text that follows a schema; the compilation ends when the client disconnects."""
        abandoned, outputs = Event(), self.served.model.module.spec.num_outputs
        future = asyncio.get_running_loop().run_in_executor(
            _schema_threads(), with_schema, request, schema, self.served.tokenizer, outputs, abandoned
        )
        try:
            while not (await asyncio.wait([future], timeout=POLLED))[0]:
                if traffic.is_closing:
                    raise Closing("the server is shutting down: try again later")
            return future.result()
        finally:
            abandoned.set()
            ignore_failure(future)

    def whole(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return a choice in JSON."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice, choice.steps),
            "finish_reason": choice.finish_reason,
        }

    def piece(self, choice: AnswerChoice, step: TokenEvent | None, *, is_first: bool) -> dict[str, Any]:
        """Return the JSON of a stream event: one token of a choice or its end; the first event names the role."""
        text = "" if step is None else step.text
        delta = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(choice, [] if step is None else [step]),
            "finish_reason": choice.finish_reason if step is None else None,
        }

    def _logprobs(self, choice: AnswerChoice, steps: Sequence[TokenEvent]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = []
        for step in steps:
            top = [_token_json(*known) for known in self.served.alternative_tokens(step.alternatives)]
            token = _token_json(choice.write(self.served, step), step.log_probability)
            content.append({**token, "top_logprobs": top})
        return {"content": content, "refusal": None}


@cache
def _schema_threads() -> ThreadPoolExecutor:
    """Return the threads that compile schemas for all models; slow schemas must not delay chat templates."""
    return ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="schemas")


def _token_json(token: WrittenToken, log_probability: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": log_probability, "bytes": list(token.content)}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
