"""Every number of an explanation is that of plain arithmetic, and the terms of a score add up to it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core import Transformer
from clearhead.interpret.explain.forward import Forward, sections
from clearhead.interpret.explain.score import NonlinearNorm, Writer, score_terms
from tests.core.extensions.test_parts import module as part_module
from tests.interpret.explain.recomputed import Recomputed
from tests.interpret.maps.cases import CASES, NONLINEAR, make, texts
from tests.laws.hf_parts import HF_PARTS, ROTARY, attending

RARE = [
    "query-key norm per head", "query-key norm over the width", "query-key norm after rotation", "soft cap",
    "soft cap on the memory", "sink on the memory", "clip", "scaled alibi", "own slopes",
    "own buckets", "disentangled", "disentangled, own projections", "disentangled, buckets", "clamped gate", "experts",
    "projection before the norm", "projection after the norm", "fairseq sinusoids",
]  # fmt: skip
ALL = [*CASES, *NONLINEAR, *(name for name in HF_PARTS if name in RARE or "rope" in name or "yarn" in name)]


def model(name: str) -> Transformer:
    """Return a tiny model in float64, so that any difference above rounding is a mistake."""
    if name in CASES or name in NONLINEAR:
        return make(name).double()
    torch.manual_seed(len(name))
    return ch.build(HF_PARTS[name]()).eval().double()


@cache
def forward_of_model(name: str) -> Forward:
    """Return the forward pass of a tiny model, run once."""
    return forward_of(model(name))


def forward_of(module: Transformer) -> Forward:
    source, target = texts(module)
    first = "decoder" if module.encoder is None else "encoder"
    tokens = {first: tuple(map(str, source.ids[0].tolist()))}
    if target is not None:
        tokens["decoder"] = tuple(map(str, target.ids[0].tolist()))
    return Forward.run(module, source, target, tokens)


@pytest.mark.parametrize("name", ALL)
def test_numbers_are_those_of_plain_arithmetic(name: str) -> None:
    forward = forward_of_model(name)
    module = forward.module
    plain = Recomputed(module, {stack: forward.ids(stack).numpy() for stack in forward.tokens})
    for section in sections(forward):
        if section.stack == "decoder" and "encoder" in plain.stream:
            plain.stream.setdefault("memory", plain.stream["encoder"])
        expected = list(plain.section(section))
        assert [value.name for value in section.values] == [value_name for value_name, _ in expected], section.title
        for value, (_, numbers) in zip(section.values, expected, strict=True):
            np.testing.assert_allclose(value.numbers.numpy(), numbers, rtol=2e-5, atol=2e-6, err_msg=value.name)
    output = module(forward.source, forward.target)
    last = section.values[-1].numbers
    assert torch.equal(last, output.logits if last.shape == output.logits.shape else output.logits[0])


@pytest.mark.parametrize("name", ALL)
def test_terms_of_a_score_add_up_to_it(name: str) -> None:
    forward = forward_of_model(name)
    for (attention, depth), record in forward.records.items():
        stack, source = attention.split(".")
        head, query, key = record.num_heads - 1, record.query_BHTE.shape[2] - 1, 1
        terms = score_terms(forward, (stack, source, depth), head, query, key)
        cap = record.attention.spec.soft_cap
        product = terms.score - terms.position_bias
        capped = cap * np.tanh(product / cap) if cap else product
        score = float(forward.at(f"{record.address}.scores", depth)[head, query, key])
        assert capped + terms.position_bias == pytest.approx(score, rel=1e-6, abs=1e-8)
        assert float(terms.terms.sum()) + terms.position_bias == pytest.approx(terms.score, rel=2e-6, abs=1e-7)
        assert sum(value for _, value in terms.by_key()) == pytest.approx(product, rel=2e-6, abs=1e-7)
        assert depth == 0 or len({writer.component for writer in terms.query_writers}) > 1


def test_a_writer_adds_what_is_missing_without_it() -> None:
    """Without a norm in between, a score changes by the term of a writer if this writer is removed."""
    torch.manual_seed(1)
    module = ch.build(attending(ROTARY)).eval().double()
    for layer in module.decoder.layers:
        for step in layer.steps:
            step.branches[0].pre = torch.nn.Identity()
    forward, query, key = forward_of(module), 4, 2
    terms = score_terms(forward, ("decoder", "self", 1), 3, query, key)
    written = dict(terms.by_query())[Writer("feed-forward", "decoder", 0)]
    address = "decoder.layers.0.steps.1.branches.0.function"

    def without(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, query] = 0
        return x

    with torch.no_grad(), ch.edit(module, {address: without}), ch.capture(module, "decoder.layers.1.**.scores") as seen:
        module(forward.source)
    (record,) = next(iter(seen.values()))
    missing = terms.score - float(record.tensor[0, 3, query, key])
    assert written == pytest.approx(missing, rel=1e-8)


def test_what_an_own_norm_hides_is_said() -> None:
    """Terms add up, also next to custom steps and mixers; a norm that may be nonlinear is named."""
    for name, family in (
        ("differential", "decoder"),
        ("recurrent", "encoder-decoder"),
        ("recomputed", "encoder-decoder"),
    ):
        forward = forward_of(part_module(name, family).double())
        for (attention, depth), _ in forward.records.items():
            stack, source = attention.split(".")
            terms = score_terms(forward, (stack, source, depth), 0, 2, 1)
            assert float(terms.terms.sum()) + terms.position_bias == pytest.approx(terms.score, abs=1e-9)
    forward = forward_of(part_module("everywhere", "decoder").double())
    formulas = {value.name: value.formula for section in sections(forward) for value in section.values}
    assert formulas["weights"] == "w = OffbeatWeights(s)" and ", then Tilt" in formulas["scores"]
    assert formulas["norm before the branches" if "norm before the branches" in formulas else "norm"].startswith(
        "n = Gain"
    )
    with pytest.raises(NonlinearNorm, match="Gain"):
        score_terms(forward, ("decoder", "self", 1), 0, 2, 1)
