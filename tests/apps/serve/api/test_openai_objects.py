"""Request objects of OpenAI's package, and the offsets and bytes of tokens in answers."""

from __future__ import annotations

import itertools
import json
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params

import clearhead as ch
from clearhead.apps.serve.api.bodies import Body, ChatMessage, ChatRequest, CompletionRequest, EmbeddingRequest
from clearhead.apps.serve.api.bodies import StreamOptions as OurStreamOptions
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.token_bytes import token_bytes
from clearhead.text.tokenizer_training import train_tokenizer
from tests.apps.serve.api.conftest import running
from tests.hf_models import language_model, rotary_model
from tests.tasks.fine_tuning import encoder

LIMIT = 61


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("openai")

    def load(path: Path) -> ch.Model:
        return ch.load(path, precision="fp32")

    grade = encoder(folder / "grade", "BertForSequenceClassification", num_labels=1)
    config = json.loads((grade / "config.json").read_text())
    (grade / "config.json").write_text(json.dumps({**config, "id2label": {"0": "quality"}, "label2id": {"quality": 0}}))
    rotary = rotary_model(folder / "rotary", rows=7)
    words = train_tokenizer("word", ["wa wb wc"], vocab_size=7)
    torch.manual_seed(5)
    stack = Hyperparameters(family="decoder", layers=1, width=14, heads=2, head_size=8, positions="rotary")
    module = ch.build(build_spec(stack, source_vocab=7, target_vocab=7)).eval()
    trained = ch.Model(module, TokenizerPair(words, words, True), TaskRecord(kind="generate"))
    calls = [
        ServedModel("words", trained),
        ServedModel("lm", load(language_model(folder / "lm"))),
        ServedModel("rotary", load(rotary)),
        ServedModel("beyond", load(rotary), beyond_positions=True),
        ServedModel("grade", load(grade)),
    ]
    return Models(calls, {})


@pytest.fixture(scope="module")
def address(models: Models) -> Iterator[str]:
    yield from running(models, ())


@pytest.fixture(scope="module")
def api(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


# --- request objects --------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "a"}]
NEUTRAL: dict[str, list[Any]] = {
    "best_of": [1],
    "frequency_penalty": [0, 0.0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "include_obfuscation": [False],
    "logit_bias": [{}],
    "metadata": [{}],
    "modalities": [["text"]],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0],
    "prompt_cache_breakpoint": [],
    "prompt_cache_key": ["a"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "prompt_cache_retention": ["in_memory"],
    "reasoning_effort": ["none"],
    "safety_identifier": ["a"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_calls": [[]],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "verbosity": ["medium"],
}
"""Values that change no answer."""
EFFECT: dict[str, Any] = {
    "best_of": 2,
    "frequency_penalty": 0.5,
    "include_obfuscation": True,
    "logit_bias": {"5": 3},
    "modalities": ["text", "audio"],
    "presence_penalty": -1,
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "service_tier": "flex",
    "store": True,
    "suffix": "b",
    "tool_choice": "required",
    "verbosity": "low",
}
"""Values with an effect; of other fields an object that is not empty."""
ALWAYS_NEUTRAL = {"parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "safety_identifier"}
OBJECTS: list[tuple[Any, type[Body], dict[str, Any]]] = [
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest, {"prompt": "a"}),
    (chat_create_params.CompletionCreateParamsBase, ChatRequest, {"messages": MESSAGES}),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest, {"input": "a"}),
    (ChatCompletionUserMessageParam, ChatMessage, MESSAGES[0]),
    (ChatCompletionAssistantMessageParam, ChatMessage, {"role": "assistant", "content": "a"}),
    (ChatCompletionStreamOptionsParam, OurStreamOptions, {}),
]
FIELDS = [
    pytest.param(name, ours, base, id=f"{ours.__name__}.{name}")
    for theirs, ours, base in OBJECTS
    for name in typing.get_type_hints(theirs)
]


@pytest.mark.parametrize(("name", "ours", "base"), FIELDS)
def test_every_field_of_openai_is_honoured_or_neutral_or_refused(name: str, ours: type[Body], base: Any) -> None:
    """Null means absent, and neutral values change nothing; the refusal names any other unsupported field."""
    absent = ours.model_validate(base)
    if name not in base:
        assert ours.model_validate({**base, name: None}) == absent
    if name in ours.model_fields:
        return
    for value in [] if (ours, name) == (ChatMessage, "function_call") else NEUTRAL.get(name, []):
        assert ours.model_validate({**base, name: value}) == absent
    if name not in ALWAYS_NEUTRAL:
        with pytest.raises(ValueError, match="extra_forbidden") as caught:
            ours.model_validate({**base, name: EFFECT.get(name, {"type": "any"})})
        assert caught.value.errors()[0]["loc"] == (name,)


@pytest.mark.parametrize("name", [name for name in typing.get_type_hints(chat_create_params.CompletionCreateParamsBase)
                                  if name not in {*ChatRequest.model_fields, *ALWAYS_NEUTRAL}])  # fmt: skip
def test_an_unsupported_field_is_named(name: str, address: str) -> None:
    body = {"model": "lm", "messages": MESSAGES, name: EFFECT.get(name, {"type": "any"})}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (
        400,
        name,
        f"{name} is not supported: leave it out",
    )


def test_answers_can_be_given_back(api: openai.OpenAI) -> None:
    """A message object, its dump, and its parts give the same answer in a conversation."""
    ask = {"model": "lm", "max_tokens": 3, "temperature": 0}
    message = api.chat.completions.create(messages=MESSAGES, **ask).choices[0].message
    parts = [{"type": "text", "text": message.content, "prompt_cache_breakpoint": None}]
    assert parts[0].keys() == typing.get_type_hints(ChatCompletionContentPartTextParam).keys()
    plain = {"role": "assistant", "content": message.content}
    dumped = {**message.model_dump(), "refusal": None, "annotations": [], "tool_calls": None}
    followed = [
        api.chat.completions.create(messages=[*MESSAGES, value, *MESSAGES], **ask).choices[0].message.content
        for value in (plain, message, message.model_dump(), dumped, {"role": "assistant", "content": parts})
    ]
    assert len(set(followed)) == 1
    with pytest.raises(openai.BadRequestError, match=r"messages\.1\.tool_calls is not supported"):
        api.chat.completions.create(messages=[*MESSAGES, {**plain, "tool_calls": [{"id": "a"}]}], **ask)


# --- tokens in answers ------------------------------------------------------------------------------------------------


def chunks(api: openai.OpenAI, **body: Any) -> list[Any]:
    return list(api.completions.create(**body, stream=True))


@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_of_tokens_are_those_of_the_text(seed: int, api: openai.OpenAI, models: Models) -> None:
    """Byte-level tokens are parts of characters; their bytes are those of their entries, also in a stream."""
    tokenizer, real = models.get("lm").tokenizer, token_bytes(models.get("lm").tokenizer)
    known = {}
    for index, entry in enumerate(tokenizer.entries()):
        text = tokenizer.decode([index, index])
        known[entry if "\ufffd" in text else text[: len(text) // 2]] = real[index]
    body = {"model": "lm", "messages": MESSAGES, "max_tokens": 40, "temperature": 1.5, "seed": seed}
    body |= {"logprobs": True, "top_logprobs": 3}
    whole = api.chat.completions.create(**body).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode("utf-8", "replace") == whole.message.content
    for token in content:
        for alternative in token.top_logprobs:
            assert bytes(alternative.bytes) == known[alternative.token]
    streamed = [chunk.choices[0] for chunk in api.chat.completions.create(**body, stream=True)]
    assert [token for chunk in streamed if chunk.logprobs for token in chunk.logprobs.content] == content
    assert [chunk.finish_reason for chunk in streamed] == [None] * (len(streamed) - 1) + [whole.finish_reason]


def test_a_byte_is_itself(models: Models) -> None:
    served = models.get("lm")
    index = served.tokenizer.entries().index("Ü")  # how byte-level vocabularies print 0xDC
    ((token, _),) = served.alternative_tokens([(index, -1.0)])
    assert list(token.content) == [220]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_fit_the_text(echo: bool, seed: int, api: openai.OpenAI, models: Models) -> None:
    """Each text token is at its offset, also in a stream."""
    tokenizer = models.get("lm").tokenizer
    parts = {entry for index, entry in enumerate(tokenizer.entries()) if "\ufffd" in tokenizer.decode([index])}
    body = {"model": "lm", "prompt": "a ü  m", "max_tokens": 30, "temperature": 1.5, "seed": seed, "logprobs": 1}
    whole = api.completions.create(**body, echo=echo).choices[0]
    offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, offset, after in zip(tokens, offsets, [*offsets[1:], len(whole.text)], strict=True):
        if after > offset and token not in parts and "\ufffd" not in whole.text[offset:after]:
            # The last part of a character shows all that it completes.
            assert whole.text[offset:after] == token or whole.text[:after].endswith(token)
    streamed = [chunk.choices[0] for chunk in chunks(api, **body, echo=echo)]
    assert "".join(chunk.text for chunk in streamed) == whole.text
    for name in ("text_offset", "tokens"):
        pieces = [getattr(chunk.logprobs, name) for chunk in streamed]
        assert list(itertools.chain(*pieces)) == getattr(whole.logprobs, name)


def test_tokens_of_a_stop_text_have_their_offsets_at_its_end(api: openai.OpenAI) -> None:
    body = {"model": "lm", "prompt": "a", "max_tokens": 20, "temperature": 0}
    text = api.completions.create(**body).choices[0].text
    stopped = api.completions.create(**body, stop=text[4:6], logprobs=0).choices[0]
    assert stopped.text == text[: text.find(text[4:6])] and stopped.finish_reason == "stop"
    assert max(stopped.logprobs.text_offset) <= len(stopped.text)


def test_rows_beyond_the_tokenizer_are_no_alternatives(api: openai.OpenAI, models: Models) -> None:
    """A padded embedding has outputs without entries, which are often among the best here, since they are untrained."""
    served = models.get("rotary")
    count, outputs = served.tokenizer.vocab_size, served.model.spec.num_outputs
    assert outputs == count + 7
    body = {"model": "rotary", "prompt": "a m", "max_tokens": 0, "echo": True, "logprobs": 20}
    (choice,) = api.completions.create(**body).choices
    with torch.no_grad():
        best = served.model.module(torch.tensor([served.tokenizer.encode("a m")])).logits[0, -2].topk(20).indices
    left = [index for index in best.tolist() if index < count]
    assert len(choice.logprobs.top_logprobs[-1]) == len(left)
    assert api.completions.create(**{**body, "max_tokens": 9, "seed": 1}).choices[0].logprobs.tokens


def test_an_echo_is_streamed_as_the_prompt_was_sent(api: openai.OpenAI, models: Models) -> None:
    body = {"model": "lm", "prompt": ["a  ü\n", "m"], "max_tokens": 0, "echo": True, "logprobs": 0}
    whole = api.completions.create(**body)
    assert [choice.text for choice in whole.choices] == body["prompt"]
    events = [chunk.choices[0] for chunk in chunks(api, **body)]
    assert [(choice.text, choice.finish_reason) for choice in events] == [(text, "length") for text in body["prompt"]]
    assert [choice.logprobs for choice in events] == [choice.logprobs for choice in whole.choices]
    # The entries of an id that no text has are not written.
    ids = models.get("lm").tokenizer.encode("a m")
    assert api.completions.create(**{**body, "prompt": [0, *ids]}).choices[0].text == "a m"


def test_unknown_words_are_echoed_as_they_were_sent(api: openai.OpenAI) -> None:
    body = {"model": "words", "prompt": "wa zzz wb", "echo": True, "logprobs": 1, "temperature": 0}
    for options in ({"max_tokens": 0}, {"max_tokens": 3}):
        whole = api.completions.create(**body, **options).choices[0]
        streamed = [chunk.choices[0] for chunk in chunks(api, **body, **options)]
        assert whole.text.startswith("wa zzz wb") and "".join(chunk.text for chunk in streamed) == whole.text
        # The start token comes before the text.
        assert whole.logprobs.text_offset[:4] == [0, 0, 2, 6]
        assert list(itertools.chain(*[chunk.logprobs.text_offset for chunk in streamed])) == whole.logprobs.text_offset
        for token, offset in list(zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True))[4:]:
            assert token == "</s>" or whole.text[offset:].startswith(token)


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm", "rotary"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_is_too_long_is_refused_as_by_openai(name: str, stream: bool, address: str) -> None:
    def ask(path: str = "completions", **body: Any) -> tuple[int, dict[str, Any]]:
        answer = httpx.post(f"{address}/v1/{path}", json={"model": name, "stream": stream, **body}, timeout=60)
        return answer.status_code, {} if answer.status_code == 200 else answer.json()["error"]

    prompt = [5] * 41
    for body, numbers in (
        ({"prompt": [5] * 5000}, ("5000", "61")),
        ({"prompt": prompt, "max_tokens": 100_000}, ("41", "100000", "100041", "61", "max_tokens")),
        ({"prompt": prompt, "max_tokens": LIMIT - 41 + 1}, ("41", "21", "62", "61")),
        ({"prompt": "a m u e " * 9000}, ("72,000", "61")),
    ):
        status, error = ask(**body)
        assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
        assert all(number in error["message"] for number in numbers), error["message"]
    assert ask(prompt=prompt, max_tokens=LIMIT - 41)[0] == 200
    assert ask(prompt=[5] * 55)[0] == 200, "the default ends at the limit"
    if name == "lm":
        status, error = ask("chat/completions", messages=MESSAGES, max_completion_tokens=100_000)
        assert (status, error["code"]) == (400, "context_length_exceeded")


def test_an_answer_without_max_tokens_ends_at_the_limit(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="rotary", prompt=[5] * 55, temperature=0)
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == LIMIT


def test_a_server_beyond_positions_reads_and_scores_longer_texts(api: openai.OpenAI, models: Models) -> None:
    body = {"prompt": [5] * 70, "temperature": 0, "max_tokens": 4}
    assert api.completions.create(model="beyond", **body).usage.total_tokens <= 74
    scored = api.completions.create(model="beyond", prompt=[5] * 70, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert len(scored.logprobs.tokens) == 70 and all(map(math.isfinite, scored.logprobs.token_logprobs[1:]))
    with pytest.raises(openai.BadRequestError, match="a prompt has 70 tokens, but the model has 61 positions"):
        api.completions.create(model="rotary", prompt=[5] * 70, max_tokens=0, echo=True, logprobs=0)


def test_the_label_of_one_output_is_its_name(address: str, models: Models) -> None:
    answer = httpx.post(f"{address}/models/grade", json={"inputs": "the cat sat"}, timeout=60).json()
    value = models.get("grade").model.classify("the cat sat").value
    assert answer == [[{"label": "quality", "score": pytest.approx(value, abs=1e-5)}]]
