"""Patch grids and forced decoding over HTTP equal `AttentionRun.patch` and a loop of plain runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead.core import Sequence
from tests.apps.serve.cases import Browser, model_of, text_of

FIRST, SECOND = "the cat", "the dog ran"


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_a_sweep_is_that_of_patch(name: str) -> None:
    model = model_of(name)
    target = {} if name == "gpt2" else {"target": "a cat"}
    browser = Browser(model)
    answer = browser.post("sweep", request={"text": FIRST, **target}, text=SECOND, **target).json()
    here, there = (model.attention(text, *target.values()) for text in (FIRST, SECOND))
    lengths = {stack.partition(".")[0]: len(here.query_tokens(stack)) for stack in here.stacks}
    expected = here.patch(there, positions={stack: [(at, at) for at in range(size)] for stack, size in lengths.items()})
    assert set(answer["streams"]) == set(lengths)
    for stack, rows in answer["streams"].items():
        shown = np.array([[np.nan if value is None else value for value in row] for row in rows])
        np.testing.assert_allclose(shown, expected.streams[stack].numpy(), atol=1e-6)
    assert [row[3] for row in answer["heads"]] == pytest.approx([head.change for head in expected.heads], abs=1e-6)
    assert max(abs(row[3]) for row in answer["heads"]) > 1e-3


def test_a_sweep_follows_the_output_that_the_page_names() -> None:
    model = model_of("gpt2")
    answer = Browser(model).post("sweep", request={"text": FIRST}, text=SECOND, position=2, index=9).json()
    expected = model.attention(FIRST).outcome((3, model.tokenizer.entries()[9]))
    assert expected.token in answer["outcome"] and expected.position == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_forced_tokens_are_followed_by_the_most_probable_ones(name: str) -> None:
    """Each token after the forced one is the most probable one in a run over all tokens before it."""
    model, browser = model_of(name), Browser(model_of(name))
    target = {} if name == "gpt2" else {"target": "a cat"}
    maps = model.attention(FIRST, *target.values())
    read = maps.inputs.target or maps.inputs.source
    forced = model.tokenizer.encode("q")[0]
    answer = browser.post("force", request={"text": FIRST, **target}, position=2, index=forced)
    text = answer.json()["text"]
    ids = [*read.ids[0, :3].tolist(), forced]
    text_before = model.tokenizer.decode(ids)
    assert text.startswith(text_before) and len(text) > len(text_before)
    for _ in range(4):
        sequence = Sequence(torch.tensor([ids]))
        inputs = (sequence, None) if name == "gpt2" else (maps.inputs.source, sequence)
        logits = model.module(*inputs).logits[0, -1]
        logits[[index for index in range(len(logits)) if not model.tokenizer.decode([index])]] = -torch.inf
        ids.append(int(logits.argmax()))
        assert text.startswith(model.tokenizer.decode(ids).rstrip())


def test_what_cannot_be_forced_is_said() -> None:
    request = {"request": {"text": "the ___ sat"}, "position": 0, "index": 1}
    assert "this one does not" in Browser(model_of("bert")).post("force", **request).json()["error"]
    far = {"request": {"text": FIRST}, "position": 90, "index": 1}
    assert "there is no token 1 after position 90" in Browser(model_of("gpt2")).post("force", **far).json()["error"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "marian", "bert"])
def test_two_outputs_are_compared_everywhere(name: str) -> None:
    """Effects, lens, patch grid and outputs compare `of=(A, B)`, also while a layer is switched off."""
    model, browser = model_of(name), Browser(model_of(name))
    text = text_of(model)
    target = {"target": "a cat"} if name == "marian" else {}
    maps, position = model.attention(text, *target.values()), {"gpt2": 3, "marian": 2}.get(name)
    request = {"text": text, **target, "of": ["q", "z"], "position": position}
    of = ("q", "z") if position is None else (position + 1, "q", "z")
    edits = [{"address": "*.layers.1.steps.*.branches.*"}]
    answer = browser.read(**request, edits=edits)
    sample = answer["page"]["samples"][0]
    shown = {
        (stack["stack"], layer["layer"], head): value
        for stack in sample["attentions"]
        if stack["measure"] == "attention weight"
        for layer in stack["layers"]
        for head, value in zip(layer["heads"], layer["values"]["effect"], strict=True)
    }
    expected = {(effect.stack, effect.layer, effect.head): effect.change for effect in maps.effects(of)}
    assert shown == pytest.approx(expected, abs=1e-5) and max(map(abs, expected.values())) > 1e-3
    followed = browser.blob(answer["name"], sample["lens"]["followed"], "<f4")
    np.testing.assert_allclose(followed, maps.lens(of=of).followed.flatten().numpy(), atol=1e-5)
    outcome, values = maps.outcome(of), answer["outputs"]["difference"]["values"]
    logits = maps.module(maps.inputs.source, maps.inputs.target).logits[0, outcome.logits_position]
    assert values[0] == pytest.approx(float(outcome.log_probability(logits)), abs=1e-4)
    assert abs(values[1] - values[0]) > 1e-4
    second = SECOND if name != "bert" else SECOND.replace("dog", "___")
    swept = browser.post("sweep", request=request, text=second, **target).json()
    assert swept["outcome"] == answer["outputs"]["difference"]["name"] == "'q' rather than 'z'"


def test_a_comparison_that_cannot_be_made_is_said() -> None:
    browser = Browser(model_of("gpt2"))
    for of, expected in ((["q", "q"], "with itself"), (["q", "dog"], "must be one token"), (["q"], "of")):
        answer = browser.post("read", text=FIRST, of=of)
        assert answer.status_code in (400, 422) and expected in answer.json()["error"]
