"""Numbers about two outputs (why A and not B) equal those of the first minus those of the second."""

from __future__ import annotations

import pytest
import torch

from clearhead.interpret.maps.contributions import contributions
from clearhead.interpret.maps.effects import EffectMeter
from clearhead.interpret.maps.lens import logit_lens
from clearhead.interpret.maps.outcome import ModelOutcome, OutputNames, choose_outcome
from tests.interpret.maps.cases import make, record, texts
from tests.laws.tiny import difference


@pytest.mark.parametrize("name", ["two stacks", "encoder", "classifier by the first"])
@pytest.mark.parametrize("independent", [False, True])
def test_two_outputs_are_the_difference_of_one_and_the_other(name: str, independent: bool) -> None:
    module = make(name).double()
    whole_run = record(module, *texts(module))
    position = None if module.head.is_pooled else 2
    first_outcome, second_outcome, both = (
        ModelOutcome(position, "", index, is_independent=independent, other_id=second)
        for index, second in ((2, None), (1, None), (2, 1))
    )
    names = OutputNames([f"name {index}" for index in range(len(module.head.projection().weight_VD))])

    def measure(outcome: ModelOutcome) -> list[torch.Tensor]:
        effects = [row.change for row in EffectMeter(whole_run.streams, outcome, whole_run.records[-1:]).head_effects()]
        terms = [row.value for row in contributions(whole_run.streams, outcome)]
        followed = logit_lens(whole_run.streams, names, 2, (), outcome).followed
        assert followed is not None
        keys = EffectMeter(whole_run.streams, outcome, whole_run.records).key_effects(whole_run.records[0], 1)
        return [torch.tensor(effects), torch.tensor(terms), keys, followed]

    for first, second, pair in zip(*map(measure, (first_outcome, second_outcome, both)), strict=True):
        assert difference(pair, first - second) <= 1e-5
        assert pair.abs().max() > 1e-5
    logits = module(*texts(module)).logits[0].detach()
    row = logits if position is None else logits[position]
    total = sum(term.value for term in contributions(whole_run.streams, both))
    assert total == pytest.approx(float(row[2] - row[1]), rel=1e-6)


def test_two_names_become_two_outputs_at_the_position_of_one() -> None:
    module = make("two stacks")
    whole_run = record(module, *texts(module))
    names = OutputNames([f"name {index}" for index in range(len(module.head.projection().weight_VD))])
    labels = [3, 4, 5, 6]
    for of, position in (((1, "name 3", "name 5"), 1), ((2, "name 5", "name 3"), 2)):
        outcome = choose_outcome(of, whole_run.streams, names, labels)
        assert (outcome.position, outcome.token, outcome.other) == (position, *of[1:])
        logits = torch.randn(2, len(names.names))
        assert torch.allclose(outcome.log_probability(logits), logits[:, outcome.id] - logits[:, outcome.other_id])
        assert names.difference(outcome, " - ") == f"'{of[1]}' - '{of[2]}'"
