"""Looking inside over HTTP: answers equal those of the library, and no other request sees a change."""

from __future__ import annotations

import concurrent.futures
import gc
import io
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from clearhead.apps.serve.api import inside
from clearhead.apps.serve.api.served import Models
from clearhead.apps.serve.gate import MOST_BYTES

TEXTS = {"lm": "a m u", "mt": "a m u", "mlm": "the cat sat", "labels": "the cat sat", "tags": "the cat sat"}


def ask(address: str, path: str, model: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{address}/{path}", json={"model": model, **body}, timeout=60)


def json_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def arrays(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content), allow_pickle=False)


def first_mixed(models: Models, name: str) -> str:
    stack = "encoder" if models.get(name).model.module.encoder is not None else "decoder"
    return f"{stack}.layers.0.steps.0.branches.0.function.mixed"


@pytest.mark.parametrize("name", TEXTS)
def test_maps_are_those_of_the_library(name: str, address: str, models: Models) -> None:
    maps = models.get(name).model.attention(TEXTS[name])
    answer = json_of(ask(address, "attention", name, text=TEXTS[name], layers=[0], heads=[1]))
    expected = maps.to_json(layers=[0], heads=[1])
    assert {name: answer[name] for name in maps.token_lists()} == maps.token_lists()
    for head_map, other in zip(answer["attention"], expected["attention"], strict=True):
        assert [head_map[key] for key in ("stack", "layer", "head")] == [
            other[key] for key in ("stack", "layer", "head")
        ]
        np.testing.assert_allclose(head_map["weights"], other["weights"], atol=1e-6)
    packed = arrays(ask(address, "attention", name, text=TEXTS[name], format="npz"))
    for stack in maps.stacks:
        np.testing.assert_allclose(packed[stack][0, 0], maps.weights(stack, 0, 0).numpy(), atol=1e-6)


def test_maps_come_as_a_page(address: str) -> None:
    page = ask(address, "attention", "mt", text="a m u", target="a m", format="html")
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in page.text


def test_activations_are_those_of_capture_with_changes_too(address: str, models: Models) -> None:
    model, text = models.get("mt").model, "a m u"
    names = ["encoder.layers.*.after", "decoder.layers.0.steps.1.branches.0.function.scores"]
    mixed = first_mixed(models, "mt")
    request = {"text": text, "target": "a m", "addresses": names}
    plain = json_of(ask(address, "capture", "mt", **request))["activations"]
    edits = [{"address": mixed, "head": 1}]
    changed = arrays(ask(address, "capture", "mt", **request, edits=edits, format="npz"))
    with model.capture(names) as seen:
        model.attention(text, "a m")
    assert [activation["address"] for activation in plain] == list(seen)
    for activation in plain:
        np.testing.assert_allclose(
            np.array(activation["values"], dtype=np.float32),
            seen.tensor(activation["address"]).detach().numpy(),
            atol=1e-6,
        )

    def without(x: Any) -> Any:
        x = x.clone()
        x[:, 1] = 0
        return x

    with model.edit({mixed: without}), model.capture(names) as seen:
        model.attention(text, "a m")
    for activation in plain:
        np.testing.assert_allclose(
            changed[activation["address"]], seen.tensor(activation["address"]).detach().numpy(), atol=1e-6
        )
    last = plain[-2]["address"]
    assert np.abs(changed[last] - np.array(plain[-2]["values"], dtype=np.float32)).max() > 1e-4


def body_of(models: Models, name: str) -> dict[str, Any]:
    tokenizer = models.get(name).model.tokenizer
    inputs: dict[str, Any] = {
        "mlm": f"the {tokenizer.entries()[tokenizer.mask_id or 0]} sat",
        "spans": {"question": "the cat", "context": "the cat sat"},
    }
    return {"inputs": inputs.get(name, TEXTS.get(name)), "parameters": {"max_new_tokens": 6} if name == "lm" else {}}


@pytest.mark.parametrize("name", [*TEXTS, "spans"])
def test_an_edit_is_that_of_the_library(name: str, address: str, models: Models) -> None:
    """The lines of Python in the answer print the same edited answer."""
    stack = "decoder" if name in ("lm", "mt") else "encoder"
    edits = [{"address": f"{stack}.layers.0.steps.*.branches.*", "factor": -3.0}]
    body, model = body_of(models, name), models.get(name).model
    answer = json_of(ask(address, "edit", name, **body, edits=edits))
    assert answer["changed"] != answer["unchanged"]
    printed: list[Any] = []
    exec("\n".join(answer["python"]), {"model": model, "print": printed.append})
    assert first_text(printed[0]) == first_text(answer["changed"])
    exec(answer["python"][-1].strip(), {"model": model, "print": printed.append})
    assert first_text(printed[1]) == first_text(answer["unchanged"]), "nothing stays on the model"


def first_text(answer: Any) -> Any:
    """Return the text or label of a prediction of the library or of the task schema."""
    while isinstance(answer, list) and answer:
        answer = answer[0]
    if isinstance(answer, dict):
        names = ("generated_text", "translation_text", "token_str", "label", "entity_group", "answer")
        return next(answer[name] for name in names if name in answer)
    return getattr(answer, "label", None) or getattr(answer, "text", answer)


def test_nobody_else_sees_an_edit(address: str, models: Models) -> None:
    """Texts generated during edits of other requests equal those generated alone."""
    body = {"model": "lm", "prompt": "a m", "max_tokens": 40, "temperature": 0}
    edits = [{"address": "decoder.layers.0.steps.*.branches.*", "factor": -3.0}]

    def ask_generate(_: int) -> str:
        return str(httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    def ask_edit(_: int) -> str:
        request = {"inputs": "a m", "parameters": {"max_new_tokens": 40}, "edits": edits}
        return str(json_of(ask(address, "edit", "lm", **request))["changed"]["generated_text"])

    alone, changed = ask_generate(0), ask_edit(0)
    assert alone != changed
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts, others = pool.map(ask_generate, range(8)), pool.map(ask_edit, range(4))
        assert set(texts) == {alone} and set(others) == {changed}


LAYER = "decoder.layers.0.after"


@pytest.mark.parametrize(
    ("path", "model", "body", "status", "sentence"),
    [
        ("capture", "lm", {"text": "a", "addresses": ["decoder.layers.0.aftr"]}, 400, f"did you mean '{LAYER}'"),
        ("edit", "lm", {"inputs": "a", "edits": [{"address": "decoder.layers.0.aftr"}]}, 400, f"did you mean '{LAYER}"),
        ("edit", "lm", {"inputs": "a", "edits": [{"address": LAYER, "code": "x"}]}, 400, "code is not supported"),
        ("edit", "lm", {"inputs": "a", "edits": [{"address": LAYER, "positions": [60]}]}, 400, "is not in the decoder"),
        ("edit", "lm", {"inputs": "a", "edits": [], "parameters": {"top_p": 1}}, 400, "top_p is not supported"),
        ("edit", "lm", {"inputs": ["a"], "edits": []}, 400, "must be one text"),
        ("attention", "lm", {"text": "a", "layers": [9]}, 400, "no layer 9"),
        ("attention", "mlm", {"text": "a", "target": "b"}, 400, "leave the target out"),
        ("attention", "lm", {"text": "a", "format": "pickle"}, 400, "format"),
        ("attention", "nobody", {"text": "a"}, 404, "there is no model"),
    ],
)
def test_what_cannot_be_seen_is_said(
    path: str, model: str, body: dict[str, Any], status: int, sentence: str, address: str
) -> None:
    answer = ask(address, path, model, **body)
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["mlm", "labels", "tags", "spans", "sent"])
def test_an_edit_of_any_inputs_has_the_status_of_the_task(name: str, address: str) -> None:
    """Inputs are texts that contain the name of a field, and values that are no text."""
    texts = ["some text", "the context", "a question", "text_pair"]
    values = [5, 1.5, None, True, [], ["a"], {}, {"text": 5}, {"text": "a"}, {"question": "a", "context": "a cat"}]
    for inputs in [*texts, *values]:
        edited = ask(address, "edit", name, inputs=inputs, edits=[])
        # A task reads a list as several inputs, an edit as one.
        plain = httpx.post(f"{address}/models/{name}", json={"inputs": [inputs]}, timeout=60)
        assert edited.status_code == plain.status_code in (200, 400), (inputs, edited.text, plain.text)


@pytest.mark.parametrize("name", [*TEXTS, "spans"])
def test_an_edit_that_makes_numbers_infinite_is_named(name: str, address: str, models: Models) -> None:
    body = body_of(models, name)
    stack = "decoder" if name == "lm" else "encoder"
    attention = f"{stack}.layers.0.steps.0.branches.0.function"
    harmless = {"address": f"{stack}.layers.1.after", "factor": 1.5}
    for edits in (
        [{"address": f"{stack}.layers.1.after", "factor": 1000.0}] * 14,
        [{"address": f"{attention}.queries", "factor": 1000.0}] * 7
        + [{"address": f"{attention}.keys", "factor": 1e3}] * 7,
    ):
        edits = [*edits, harmless] if edits[0] == edits[-1] else [harmless, *edits]
        answers = [ask(address, "edit", name, **body, edits=edits)]
        if name != "spans":
            answers += [
                ask(address, "attention", name, text=TEXTS[name], edits=edits, format=form)
                for form in ("json", "npz", "html")
            ]
            answers.append(ask(address, "capture", name, text=TEXTS[name], edits=edits, addresses=["**.after"]))
        for answer in answers:
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and "makes numbers infinite or NaN at" in message, message
            assert message.startswith("edits[") and f"'{edits[int(message[6:8].rstrip(']'))]['address']}'" in message


def test_an_answer_is_bounded(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.apps.serve.api.inside.MOST_NUMBERS", {"json": 4, "npz": 4})
    request = {"text": "a m u", "addresses": ["decoder.**"]}
    for path, advice in (("attention", "choose layers and heads"), ("capture", "name fewer addresses")):
        answer = ask(address, path, "lm", **(request if path == "capture" else {"text": "a m u"}))
        assert answer.status_code == 400 and advice in answer.json()["error"]["message"]


def test_a_body_of_unknown_length_is_bounded_too(address: str) -> None:
    parts = iter([b"a" * MOST_BYTES, b"a"])
    answer = httpx.post(f"{address}/attention", content=parts, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "error" in answer.json()


def test_a_body_that_is_not_declared_as_json_is_said(address: str) -> None:
    answer = httpx.post(f"{address}/attention", content=b'{"model": "lm", "text": "a"}')
    assert answer.status_code == 400 and "send the header Content-Type" in answer.json()["error"]["message"]


def test_translations_have_their_words_aligned(address: str, models: Models) -> None:
    texts, model = ["a m u", "", "u e"], models.get("mt").model
    body = {"inputs": texts, "parameters": {"alignments": True}}
    answer = json_of(httpx.post(f"{address}/models/mt/pipeline/translation", json=body, timeout=60))
    expected = model.translate_n_best(texts, n=1, alignments=True)
    assert answer == [
        {"translation_text": hypothesis.text, "alignments": hypothesis.alignment} for (hypothesis,) in expected
    ]
    (plain,) = json_of(httpx.post(f"{address}/models/mt", json={"inputs": texts[:1]}, timeout=60))
    assert plain == {"translation_text": expected[0][0].text}


def test_a_client_that_leaves_is_no_failure(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait(inspection: inside.Inspection[inside.AttentionRequest]) -> Any:
        begun.set()
        try:
            while True:
                inspection.work.check()
        finally:
            ended.set()

    monkeypatch.setattr(inside, "_attention", wait)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/attention", json={"model": "lm", "text": "a"}, timeout=httpx.Timeout(60, read=0.5))
    assert begun.is_set() and ended.wait(60)
    assert ask(address, "capture", "lm", text="a", addresses=["*.layers.0.after"]).status_code == 200
    gc.collect()  # asyncio tells of failures that no one has seen when they are collected
    assert "never retrieved" not in caplog.text
