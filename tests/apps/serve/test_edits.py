"""Edits of a live page over HTTP equal those of `model.edit`, for a tiny model of every architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.interpret.maps.attention_maps import AttentionMaps, attend
from clearhead.model.facade import Model
from tests.apps.serve.cases import Browser, model_of, text_of
from tests.interpret.view.explorer.test_architectures import ARCHITECTURES

OTHER = "the dog ran"


def changes(model: Model) -> list[dict[str, Any]]:
    """Return three edits: a halved head, a layer switched off at two positions, and a patch from another text."""
    stack = "encoder" if model.module.encoder is not None else "decoder"
    last = "encoder" if model.module.decoder is None else "decoder"
    order = getattr(model.module, last).order
    depth = {"depth": len(order) - 1} if len(set(order)) < len(order) else {}
    other = OTHER.replace("dog", "___") if model.task.kind == "fill" else OTHER
    return [
        {"address": f"{stack}.layers.0.steps.0.branches.0.function.mixed", "head": 1, "factor": 0.5},
        {"address": f"{last}.layers.{order[-1]}.steps.*.branches.*", "positions": [0, 2], **depth},
        {"kind": "patch", "address": f"{stack}.layers.0.before", "text": other, "positions": [1]},
    ]


def by_model_edit(model: Model, answer: Any, base: AttentionMaps) -> tuple[AttentionMaps, torch.Tensor]:
    """Run the lines of Python of the page, and return the maps and logits of the run."""
    names: dict[str, Any] = {"model": model, "torch": torch}
    *lines, call = answer["python"]
    assert call.startswith("    ") and lines[-1].startswith("with model.edit")
    reading = base.inputs
    names["run"] = lambda: (
        attend(base.module, base.tokenizers, base.task, reading), base.module(reading.source, reading.target),
    )  # fmt: skip
    exec("\n".join([*lines, "    maps, output = run()"]), names)
    return names["maps"], names["output"]


def exact_weights(browser: Browser, answer: Any, sample: int) -> dict[tuple[str, int, int], np.ndarray]:
    weights = {}
    for stack in answer["page"]["samples"][sample]["attentions"]:
        if stack["measure"] != "attention weight":
            continue
        for layer in stack["layers"]:
            spans = answer["page"]["spans"][layer["spans"]]
            size = sum(last - first + 1 for first, last in zip(spans[::2], spans[1::2], strict=True))
            for head, exact in layer["exact"].items():
                numbers = browser.blob(answer["name"], exact["blob"], "<f4")
                weights[stack["stack"], layer["layer"], int(head)] = numbers[:size]
    return weights


def attended_weights(maps: AttentionMaps, stack: str, layer: int, head: int) -> np.ndarray:
    record = maps.record(stack, layer)
    weights, mask = maps.weights(stack, layer, head), record.mask()
    return (weights if mask is None else weights[mask[0, 0].expand_as(weights)]).flatten().numpy()


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_live_edits_equal_model_edit(name: str) -> None:
    model = model_of(name)
    browser, text = Browser(model), text_of(model)
    target = {} if model.module.encoder is None or model.module.decoder is None else {"target": "a cat"}
    request = {"text": text, **target}
    answer = browser.read(**request, edits=changes(model))
    base = model.attention(text, *target.values())
    maps, output = by_model_edit(model, answer, base)
    shown = exact_weights(browser, answer, 1)
    assert {(stack, layer) for stack, layer, _ in shown} == set(base.records)
    moved = 0.0
    for (stack, layer, head), numbers in shown.items():
        np.testing.assert_allclose(numbers, attended_weights(maps, stack, layer, head), atol=1e-6)
        moved = max(moved, np.abs(numbers - attended_weights(base, stack, layer, head)).max())
    assert moved > 1e-3, "the changes change the weights of later layers"
    check_outputs(answer, output, base)


def check_outputs(answer: Any, output: Any, base: AttentionMaps) -> None:
    """Check that the probabilities of the page, before and after, are those of the logits."""
    rows = answer["outputs"]["rows"]
    assert rows, "every model here gives probabilities"
    unchanged = base.module(base.inputs.source, base.inputs.target).logits
    count = len(base.output_names.names)
    for row in rows:
        position = slice(None) if row["position"] is None else row["position"]
        before, after = (logits[0, position, :count].softmax(-1) for logits in (unchanged, output.logits))
        for _, index, was, now in row["candidates"]:
            assert was == pytest.approx(float(before[index]), abs=1e-6)
            assert now == pytest.approx(float(after[index]), abs=1e-6)
    assert any(abs(was - now) > 1e-4 for row in rows for _, _, was, now in row["candidates"])


def test_two_pages_do_not_see_each_others_changes() -> None:
    browser = Browser(model_of("gpt2"))
    text = text_of(browser.runs.model)
    edits = changes(browser.runs.model)
    before, changed = browser.read(text=text), browser.read(text=text, edits=edits[:1])
    other = browser.read(text=text, edits=edits[1:2])
    assert browser.read(text=text) == before
    assert len({answer["name"] for answer in (before, changed, other)}) == 3
    assert changed["outputs"] != other["outputs"]
    fresh = Browser(browser.runs.model)
    assert fresh.read(text=text, edits=edits[1:2]) == other
