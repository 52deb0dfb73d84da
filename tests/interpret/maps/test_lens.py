"""The logit lens at a depth is the prediction of a model that ends there."""

from __future__ import annotations

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.interpret.maps import lens
from clearhead.interpret.maps.lens import logit_lens
from clearhead.interpret.maps.outcome import OutputNames
from clearhead.interpret.maps.streams import Streams
from tests.interpret.maps.cases import CASES, NONLINEAR, make, texts
from tests.laws.tiny import difference


def names_of(streams: Streams) -> OutputNames:
    count = len(streams.module.head.projection().weight_VD)
    return OutputNames([f"name {index}" for index in range(count)])


@pytest.mark.parametrize("name", [*CASES, *NONLINEAR])
def test_a_depth_is_the_prediction_of_the_model_cut_there(name: str) -> None:
    module = make(name)
    source, target = texts(module)
    streams = Streams.of(module, source, target)
    names = names_of(streams)
    labels = streams.last.ids[0, 1:].tolist() if streams.top == "decoder" else []
    predictions = logit_lens(streams, names, len(names.names), labels)
    stack = getattr(module, streams.top)
    order = stack.order
    assert len(predictions.probabilities) == len(order) + 1
    with torch.no_grad():
        logits = module(source, target).logits
    for depth in range(len(order) + 1):
        stack.order = order[:depth]
        with torch.no_grad():
            expected = module(source, target).logits
        expected = (expected if expected.dim() == 2 else expected[0]).softmax(-1)
        everywhere = torch.zeros_like(expected).scatter(-1, predictions.ids[depth], predictions.probabilities[depth])
        assert difference(everywhere, expected) <= 1e-6
        assert (predictions.probabilities[depth].diff(dim=-1) <= 0).all(), "the most probable first"
        chosen = expected.gather(1, predictions.target_ids[:, None])[:, 0]
        torch.testing.assert_close(predictions.target_probabilities[depth], chosen, atol=1e-6, rtol=1e-5)
    best = (logits if logits.dim() == 2 else logits[0]).argmax(-1)
    assert predictions.target_ids.tolist() == [*labels, *best[len(labels) :].tolist()]
    assert predictions.names[int(predictions.ids[0, 0, 0])] == f"name {int(predictions.ids[0, 0, 0])}"


def test_positions_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("decoder, grouped keys")
    streams = Streams.of(module, *texts(module))
    names = names_of(streams)
    labels = streams.last.ids[0, 1:].tolist()
    whole = logit_lens(streams, names, 3, labels)
    monkeypatch.setattr(lens, "_MOST_LOGITS", 2 * len(names.names))
    parts = logit_lens(streams, names, 3, labels)
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.target_ids, parts.target_ids)
    assert difference(parts.probabilities, whole.probabilities) <= 1e-6
    assert difference(parts.target_probabilities, whole.target_probabilities) <= 1e-6


def test_too_many_candidates_are_refused() -> None:
    module = make("tagger")
    streams = Streams.of(module, *texts(module))
    with pytest.raises(InputError, match="top_k is 6; expected 1 to 5"):
        logit_lens(streams, names_of(streams), 6)
