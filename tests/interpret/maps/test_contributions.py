"""A contribution equals the change of the logit if this term is left out and everything else is held fixed."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.core.attention import Attention
from clearhead.core.head import Linear
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.interpret.maps.contributions import contributions
from clearhead.interpret.maps.hook_points import capture
from clearhead.interpret.maps.outcome import ModelOutcome
from clearhead.interpret.maps.streams import Streams
from tests.interpret.maps.cases import CASES, NONLINEAR, make, run, texts
from tests.laws.tiny import difference


def outcome_of(streams: Streams) -> ModelOutcome:
    pooled = streams.module.head.is_pooled
    return ModelOutcome(None if pooled else streams.last.ids.shape[1] - 2, "", 2)


@torch.no_grad()
def outputs(module: Transformer) -> Tensor:
    """Return the outputs of the last linear layer of the head: the logits before a soft cap."""
    number = max(number for number, layer in enumerate(module.head.layers) if isinstance(layer, Linear))
    with capture(module, f"head.layers.{number}") as seen:
        module(*texts(module))
    return seen.tensor(f"head.layers.{number}")[0]


class Held:
    """Model whose branches repeat their outputs of the first run, and whose norms keep their statistics.

    Only the path from the residual stream to the logit is computed; `logit` multiplies terms of the stream.
    """

    def __init__(self, module: Transformer, outcome: ModelOutcome) -> None:
        self.module, self.outcome, self.texts = module, outcome, texts(module)
        self.seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.top = module.decoder or module.encoder
        steps = [step for layer in self.top.layers for step in layer.steps]
        self.functions = {branch.function for step in steps for branch in step.branches}
        modules = {*self.top.modules(), *module.head.modules()}
        self.norms = {child for child in modules if isinstance(child, LayerNorm | RMSNorm)}
        self.norms -= {child for function in self.functions for child in function.modules()}
        outs = [function.out for function in self.functions if isinstance(function, Attention)]
        with ExitStack() as hooks:
            for child in (*self.functions, *self.norms, *outs):
                hooks.callback(child.register_forward_hook(self._note).remove)
            self._logit()

    def _note(self, child: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen[child].append((inputs[0], output))

    def _logit(self) -> float:
        row = outputs(self.module)
        return float((row if self.outcome.position is None else row[self.outcome.position])[self.outcome.id])

    def logit(self, factors: dict[tuple[str, int | None, int | None], float]) -> float:
        """Return the logit if some terms of the stream are multiplied by factors."""
        calls: dict[nn.Module, int] = defaultdict(int)
        depth = -1

        def count(layer: nn.Module, *call: object) -> None:
            nonlocal depth
            depth += 1

        def give(function: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            index, calls[function] = calls[function], calls[function] + 1
            _, output = self.seen[function][index]
            if not isinstance(function, Attention):
                return output * factors.get(("feed-forward", depth, None), 1.0)
            stack = "decoder" if self.module.decoder else "encoder"
            mixed, _ = self.seen[function.out][index]
            size = function.spec.head_size
            for head in range(function.spec.num_heads):
                factor = factors.get((f"{stack}.{function.spec.source}", depth, head), 1.0)
                head_slice = slice(head * size, (head + 1) * size)
                output = output + (factor - 1.0) * mixed[..., head_slice] @ function.out.weight[:, head_slice].T
            return output

        def affine(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            index, calls[norm] = calls[norm], calls[norm] + 1
            old, new = self.seen[norm][index][0], inputs[0]
            if isinstance(norm, LayerNorm):
                new = (new - new.mean(-1, keepdim=True)) / (old.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
            else:
                new = new / (old.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
            new = new * (norm.weight + 1 if norm.has_unit_offset else norm.weight)
            return new if getattr(norm, "bias", None) is None else new + norm.bias

        with ExitStack() as hooks:
            embedding = self.top.embedding
            scale = factors.get(("embedding", None, None), 1.0)
            hooks.callback(embedding.register_forward_hook(lambda module, inputs, output: output * scale).remove)
            for layer in self.top.layers:
                hooks.callback(layer.register_forward_pre_hook(count).remove)
            for function in self.functions:
                hooks.callback(function.register_forward_hook(give).remove)
            for norm in self.norms:
                hooks.callback(norm.register_forward_hook(affine).remove)
            return self._logit()


@pytest.mark.parametrize("name", [*CASES, *NONLINEAR])
def test_a_term_is_the_change_of_the_logit_with_it(name: str) -> None:
    module = make(name).double()
    streams = Streams.of(module, *texts(module))
    outcome = outcome_of(streams)
    terms = contributions(streams, outcome)
    values = {(term.component, term.layer, term.head): term.value for term in terms if term.component != "bias"}
    assert len(values) == sum(term.component != "bias" for term in terms)
    held, places = Held(module, outcome), list(values)[:: 1 if len(values) < 20 else 3]
    step, tolerance = (1.0, 1e-9) if name in CASES else (1e-6, 1e-5)  # a straight path, or one with a tangent
    whole = held.logit({})
    expected = torch.tensor([(held.logit({term_key: 1 + step}) - whole) / step for term_key in places])
    assert difference(torch.tensor([values[term_key] for term_key in places]), expected) <= tolerance
    if name in CASES:  # what is left without any term is bias
        left = held.logit(dict.fromkeys(values, 0.0))
        assert sum(term.value for term in terms if term.component == "bias") == pytest.approx(left, rel=1e-9)


@pytest.mark.parametrize("name", [*CASES, *NONLINEAR])
def test_the_terms_sum_to_the_logit(name: str) -> None:
    module = make(name)
    streams = Streams.of(module, *texts(module))
    outcome, logits = outcome_of(streams), outputs(module)
    logit = float((logits if outcome.position is None else logits[outcome.position])[outcome.id])
    total = sum(term.value for term in contributions(streams, outcome))
    assert total == pytest.approx(logit, abs=1e-5 * float(logits.abs().max()))


def test_every_part_of_the_last_stack_has_its_terms_in_order() -> None:
    entry = run("two stacks")
    terms = contributions(entry.streams, outcome_of(entry.streams))
    places = [(term.component, term.layer, term.head) for term in terms]
    expected: list[tuple[str, int | None, int | None]] = [("embedding", None, None)]
    for layer in range(2):
        expected += [(stack, layer, head) for stack in ("decoder.self", "decoder.memory") for head in range(6)]
        expected += [("feed-forward", layer, None), ("bias", layer, None)]
    assert places == [*expected, ("bias", None, None)]
