"""The server with OpenAI's client, Hugging Face's client, and invalid requests."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import threading

import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
import torch
from huggingface_hub import InferenceClient
from pydantic import ValidationError

from clearhead.apps.cli.main import main
from clearhead.apps.serve import gate
from clearhead.apps.serve.api import server
from clearhead.apps.serve.api.bodies import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest
from clearhead.apps.serve.api.reading import _encode_vector
from clearhead.apps.serve.api.served import Models
from clearhead.generate.running import RunningBatch


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_text_is_that_of_the_library(address: str, models: Models) -> None:
    model = models.get("lm").model
    answer = client(address).completions.create(model="lm", prompt="a m", max_tokens=9, temperature=0, logprobs=2)
    (expected,) = model.generate("a m", max_new_tokens=9, temperature=0)
    assert answer.choices[0].text == expected.text
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(expected.tokens) == answer.usage.completion_tokens
    assert all(len(top) <= 2 for top in logprobs.top_logprobs)
    assert sum(logprobs.token_logprobs) / len(logprobs.tokens) == pytest.approx(expected.score, abs=1e-4)


def test_streams_seeds_and_choices(address: str, models: Models) -> None:
    api = client(address)
    options = {"model": "lm", "prompt": "a m", "max_tokens": 7, "seed": 5, "temperature": 1.1}
    whole = api.completions.create(**options, n=2)
    again = api.completions.create(**options, n=2)
    assert [choice.text for choice in whole.choices] == [choice.text for choice in again.choices]
    assert len({choice.index for choice in whole.choices}) == 2
    events = list(api.completions.create(**options, n=2, stream=True, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event.choices[0].index] += event.choices[0].text
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_chat_is_formatted_by_its_template(address: str, models: Models) -> None:
    served = models.get("lm")
    messages = [{"role": "user", "content": "a m"}, {"role": "assistant", "content": "u"}]
    api = client(address)
    answer = api.chat.completions.create(model="lm", messages=messages, max_tokens=5, temperature=0, logprobs=True)
    text = served.model.hf_checkpoint.tokenizers.chat.render(messages)
    ids = served.tokenizer.encode_with_special(text)
    plain = api.completions.create(model="lm", prompt=ids, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.usage.prompt_tokens == len(ids) and len(answer.choices[0].logprobs.content) == 5


def test_echo_scores_a_given_text(address: str, models: Models) -> None:
    served = models.get("lm")
    ids = served.tokenizer.encode("a m u e")
    answer = client(address).completions.create(model="lm", prompt=[ids, ids[:3]], max_tokens=0, echo=True, logprobs=1)
    for choice, prompt_ids in zip(answer.choices, (ids, ids[:3]), strict=True):
        with torch.no_grad():
            expected = served.model.module(torch.tensor([prompt_ids])).logits[0].log_softmax(-1)
        values = [None, *(float(expected[position, index]) for position, index in enumerate(prompt_ids[1:]))]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-4)


def test_requests_that_share_a_batch_have_their_own_results(address: str) -> None:
    api = client(address)

    def ask(number: int) -> str:
        request = {"model": "lm", "prompt": "a m u"[: 1 + number % 5], "max_tokens": 5 + number, "temperature": 0}
        return api.completions.create(**request).choices[0].text

    alone = [ask(number) for number in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_tasks_have_the_schema_of_hugging_face(address: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run without a hub; this client only speaks to the server of this machine.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def at(name: str) -> InferenceClient:
        return InferenceClient(model=f"{address}/models/{name}")

    text = "the cat sat"
    blank = f"the {models.get('mlm').model.tokenizer.entries()[models.get('mlm').model.tokenizer.mask_id]} sat"
    filled = at("mlm").fill_mask(blank, top_k=3)
    (expected,) = models.get("mlm").model.fill(blank, top_k=3)
    assert [candidate.token_str for candidate in filled] == [filled_blank.text for filled_blank in expected]
    labels = at("labels").text_classification(text)
    assert labels[0].label == models.get("labels").model.classify(text).label
    assert [entity.word for entity in at("tags").token_classification(text)] == [
        label.text for label in models.get("tags").model.tag(text)
    ]
    answer = at("spans").question_answering("the cat", text)
    assert answer.answer == models.get("spans").model.answer("the cat", text, align_to_words=True)[0].text
    translated = at("mt").translation("a m u")
    model = models.get("mt").model
    assert translated.translation_text == model.translate("a m u")
    options = {"num_beams": 2, "max_new_tokens": 7, "no_repeat_ngram_size": 2}
    (expected,) = model.generate("a m u", beam_size=2, max_new_tokens=7, no_repeat_ngram_size=2)
    summarizer = InferenceClient(model=f"{address}/models/mt/pipeline/summarization")
    assert summarizer.summarization("a m u", generate_parameters=options).summary_text == expected.text != ""


@pytest.mark.filterwarnings("ignore::clearhead.base.errors.LongTexts")
def test_text_from_text_is_that_of_generate(address: str, models: Models) -> None:
    """One request has several texts, one of them empty and one longer than the model can read."""
    path = f"{address}/models/mt/pipeline/text2text-generation"
    texts = ["a m u", "", "the cat sat", "a m u " * 60]
    parameters = {"generate_parameters": {"max_new_tokens": 9, "temperature": 0.0}}
    body = {"inputs": texts, "parameters": parameters}
    answers = [item["generated_text"] for item in httpx.post(path, json=body, timeout=60).json()]
    model = models.get("mt").model
    expected = model.generate(texts, max_new_tokens=9, temperature=0, truncate=True)
    assert answers == [
        "" if not text else continuation.text for text, (continuation,) in zip(texts, expected, strict=True)
    ]
    parameters["truncation"] = "do_not_truncate"
    refused = httpx.post(path, json=body, timeout=60)
    assert refused.status_code == 400 and "positions" in refused.json()["error"]["message"]
    parameters["generate_parameters"]["num_return_sequences"] = 2
    message = httpx.post(path, json=body, timeout=60).json()["error"]["message"]
    assert "parameters.generate_parameters.num_return_sequences is not supported" in message


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/v1/completions", "no json", 400, "the body is not JSON"),
        ("/v1/completions", {"prompt": "a", "model": "nobody"}, 404, "there is no model 'nobody'"),
        ("/v1/completions", {"prompt": "a", "model": "broken"}, 404, "could not be loaded: its folder is empty"),
        ("/v1/completions", {"prompt": "a"}, 404, "set model to a name from /v1/models"),
        ("/v1/completions", {"model": "lm", "prompt": "a", "best_of": 2}, 400, "best_of is not supported"),
        ("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", {"model": "lm", "prompt": "a " * 90}, 400, "positions"),
        ("/v1/completions", {"model": "mlm", "prompt": "a"}, 400, "generates no text"),
        ("/v1/chat/completions", {"model": "mt", "messages": [{"role": "user", "content": "a"}]}, 400, "template"),
        ("/v1/chat/completions", {"model": "lm", "messages": [{"role": "king", "content": "a"}]}, 400, "messages"),
        ("/v1/embeddings", {"model": "lm", "input": "a"}, 400, "gives no vectors"),
        ("/models/mlm", {"inputs": "a", "options": {"use_gpu": True}}, 400, "options.use_gpu is not supported"),
        ("/models/mlm", {"inputs": "no blank"}, 400, "blank"),
        ("/models/mlm", {"inputs": "a", "parameters": {"targets": ["a"]}}, 400, "parameters.targets is not supported"),
        ("/models/lm", {"inputs": "a"}, 400, "which has no task schema"),
        ("/models/mlm/pipeline/translation", {"inputs": "a"}, 400, "answers fill-mask, not translation"),
        ("/models/mlm/pipeline/summarization", {"inputs": "a"}, 400, "answers fill-mask, not summarization"),
        ("/models/mt/pipeline/summarization", {"inputs": 3}, 400, "inputs must be a text"),
        ("/nowhere", {}, 404, "this path does not exist"),
        ("/v1/completions", {"model": "lm", "prompt": "a", "mo" * 5000: 1}, 400, "momo..."),
        ("/v1/completions", '{"model": "lm", "prompt": "a", "seed": "\\ud800"}', 400, "seed: "),
        ("/v1/completions", '{"model": "\\ud800", "prompt": "a"}', 404, "there is no model"),
        ("/v1/completions", {"model": "lm", "prompt": [[512]], "echo": True, "logprobs": 1}, 400, "no token 512"),
        ("/v1/completions", {"model": "mt", "prompt": [512]}, 400, "there is no token 512"),
        ("/v1/embeddings", {"model": "sent", "input": [[5, 512]]}, 400, "there is no token 512"),
        (
            "/v1/completions",
            {"model": "lm", "prompt": "a", "temperature": 10**400},
            400,
            "temperature: input should be",
        ),
        ("/v1/completions", {"model": "lm", "prompt": "a", "top_p": -(10**400)}, 400, "top_p: input should be"),
    ],
)
def test_a_wrong_request_has_a_status_and_a_sentence(
    path: str, body: object, status: int, sentence: str, address: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(f"{address}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == status, answer.text
    assert len(answer.text) < 3000 and sentence in answer.json()["error"]["message"] and "Traceback" not in answer.text


def test_a_parameter_that_is_half_a_character_is_no_failure(address: str) -> None:
    body = {"inputs": "the cat", "parameters": {"ignore_labels": ["\ud800"]}}
    answer = httpx.post(
        f"{address}/models/tags", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200 and answer.json()


def test_roles_out_of_order_are_refused_by_the_template(
    address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = models.get("lm").model.hf_checkpoint.tokenizers.chat
    asks = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    raising = "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    template = "{% for message in messages %}" + asks + raising + "{{ message['content'] }}{% endfor %}"
    monkeypatch.setitem(chat.templates, "default", template)
    api, right = client(address), [{"role": "user", "content": "a"}]
    assert api.chat.completions.create(model="lm", messages=right, max_tokens=2).choices
    for wrong in ([*right, *right], [{"role": "assistant", "content": "a"}, *right]):
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            api.chat.completions.create(model="lm", messages=wrong, max_tokens=2)


def test_strangers_are_refused(locked: str, address: str) -> None:
    body = {"model": "lm", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{locked}/v1/completions", json=body).status_code == 401
    wrong = {"authorization": "Bearer third-key"}
    assert httpx.post(f"{locked}/v1/completions", json=body, headers=wrong).status_code == 401
    right = {"authorization": "Bearer second-key"}
    assert httpx.post(f"{locked}/v1/completions", json=body, headers=right, timeout=60).status_code == 200
    for scheme, status in (
        ("bearer", 200),
        ("BEARER", 200),
        ("Bearer ", 200),
        ("Basic", 401),
        ("", 401),
        ("Bear", 401),
    ):
        headers = {"authorization": f"{scheme} second-key".removeprefix(" ")}
        assert httpx.get(f"{locked}/v1/models", headers=headers).status_code == status, headers
    assert httpx.get(f"{locked}/health").status_code == 200
    assert httpx.get(f"{address}/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert httpx.get(f"{address}/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx.post(f"{address}/v1/completions", content=b"x" * (9 * 2**20)).status_code == 413


def test_a_client_that_leaves_takes_its_request_along(address: str, models: Models) -> None:
    engine = models.get("lm").engine
    body = {"model": "lm", "prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True, "n": 1}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    for _ in range(200):
        if engine.num_running == 0:
            break
        httpx.get(f"{address}/health")
    assert engine.num_running == 0 and engine.num_waiting == 0


def test_vectors_are_those_of_the_library(address: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, model, api = ["the cat sat", "on mat"], models.get("sent").model, client(address)
    expected = model.embed(texts)
    for encoding in (openai.omit, "float"):  # its client asks for base64 by itself
        embeddings = api.embeddings.create(model="sent", input=texts, encoding_format=encoding)
        assert np.array_equal(np.array([item.embedding for item in embeddings.data], dtype=np.float32), expected)
    assert embeddings.usage.prompt_tokens == sum(len(model.tokenizer.encode(text)) + 2 for text in texts)
    (short,) = api.embeddings.create(model="sent", input=texts[0], dimensions=5).data
    np.testing.assert_allclose(short.embedding, expected[0, :5] / np.linalg.norm(expected[0, :5]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match=r"text 2 has more than the .* tokens that the model reads"):
        api.embeddings.create(model="sent", input=["a", "cat " * 9999])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    again = InferenceClient(model=f"{address}/models/sent").feature_extraction(texts[0])
    assert np.array_equal(np.asarray(again, dtype=np.float32).reshape(-1), expected[0])


def test_of_many_wrong_items_one_is_told() -> None:
    """Records of all wrong items would take hundreds of megabytes for one body."""
    for kind, body in (
        (CompletionRequest, {"prompt": [{}] * 9000}),
        (EmbeddingRequest, {"input": [[{}] * 9000]}),
        (DetokenizeRequest, {"tokens": ["a"] * 9000}),
        (ChatRequest, {"messages": [{}] * 9000}),
        (ChatRequest, {"messages": [{"role": "user", **{f"field{n}": 1 for n in range(9000)}}]}),
        (DetokenizeRequest, {"tokens": [], **{f"field{n}": 1 for n in range(9000)}}),
    ):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() < 9


def test_vectors_in_both_encodings() -> None:
    vector = np.array([0.5, -1.25, 3.0], dtype=np.float32)
    assert np.array_equal(np.frombuffer(base64.b64decode(_encode_vector(vector, "base64")), dtype="<f4"), vector)
    assert _encode_vector(vector, "float") == [0.5, -1.25, 3.0]


def test_the_path_of_a_model_has_the_protocol_of_openai_too(
    address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    messages = [{"role": "user", "content": "a m"}]
    expected = client(address).chat.completions.create(model="lm", messages=messages, max_tokens=5, temperature=0)
    text = expected.choices[0].message.content
    # The client uses one name for every model of an address.
    chat = InferenceClient(model=f"{address}/models/lm").chat_completion(messages, max_tokens=5, temperature=0)
    assert chat.choices[0].message.content == text
    model_client = openai.OpenAI(base_url=f"{address}/models/lm/v1", api_key="none", max_retries=0)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " m"}]}]
    completion = model_client.chat.completions.create(model="lm", messages=parts, max_tokens=5, temperature=0)
    assert completion.choices[0].message.content == text and completion.model == "lm"
    with pytest.raises(openai.NotFoundError, match="there is no model 'mt'"):
        model_client.chat.completions.create(model="mt", messages=parts, max_tokens=5)
    assert [model.id for model in model_client.models.list().data] == ["lm"]
    with pytest.raises(openai.BadRequestError, match="valid string"):
        model_client.chat.completions.create(
            model="lm", messages=[{"role": "user", "content": [{"type": "image_url"}]}]
        )


def test_what_is_not_answered_in_time_is_given_up(
    address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, body = models.get("lm").engine, {"model": "lm", "prompt": "a", "max_tokens": 50}
    with monkeypatch.context() as patch:
        patch.setattr(server, "SECONDS_TO_ANSWER", 0.0)
        late = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert late.status_code == 503 and late.headers["retry-after"] == "1"
    assert "no answer within 0 seconds" in late.json()["error"]["message"]
    # A call that was given up while it waited is not computed, and the thread goes on.
    going, computed = threading.Event(), list[int]()
    first = engine.call("wait", lambda some: [going.wait(20)], [0])
    assert engine.call("given up", lambda some: computed.append(1) or some, [0]).cancel()
    going.set()
    assert engine.call("next", lambda some: some, [7]).result(20) == [7] and first.result() == [True] and not computed


def test_a_port_in_use_is_one_sentence(capfd: pytest.CaptureFixture[str], address: str) -> None:
    port = address.rpartition(":")[2]
    assert main(["serve", "nowhere", "--port", port]) == 2
    assert f"port {port} is in use by another program" in capfd.readouterr().err
    assert main(["serve", "nowhere", "--port", "0", "--host", "300.1.1.1", "--api-key-file", __file__]) == 2
    assert "'300.1.1.1' is not an address of this machine" in capfd.readouterr().err


def test_a_batch_that_fails_does_not_end_the_server(
    address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, body = client(address), {"model": "lm", "prompt": "a", "max_tokens": 3, "temperature": 0}

    def failing(self: RunningBatch, started: object) -> None:
        raise AssertionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "join", failing)
        with pytest.raises(openai.InternalServerError):
            api.completions.create(**body, timeout=30)
    assert api.completions.create(**body).choices[0].text
    assert models.get("lm").engine.num_running == 0


def test_a_chat_follows_a_json_schema(address: str) -> None:
    schema = {"enum": ["a", 1]}
    request = {"model": "lm", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0}
    formats = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    choice = client(address).chat.completions.create(**request, response_format=formats).choices[0]
    assert choice.finish_reason == "stop" and json.loads(choice.message.content) in schema["enum"]
    formats["json_schema"]["schema"] = {"not": {}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        client(address).chat.completions.create(**request, response_format=formats)


def test_a_body_that_never_ends_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SECONDS_TO_SEND", 0.2)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30) as client:
        host = address.removeprefix("http://").encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: 50\r\n\r\n{" % host)
        assert b"408" in client.recv(2**16).split(b"\r\n")[0]


def test_a_server_that_loads_ends_at_once_when_it_is_interrupted() -> None:
    loads = "from clearhead.apps.cli.serve import _run_in_thread; import time"
    waits = "_run_in_thread(lambda: (print('loading', flush=True), time.sleep(60)))"
    with subprocess.Popen(
        [sys.executable, "-c", f"{loads}; {waits}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as response:
        assert response.stdout is not None and response.stdout.readline() == b"loading\n"
        response.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in response.communicate(timeout=20)[1]
