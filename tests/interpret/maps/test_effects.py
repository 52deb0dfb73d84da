"""Effects equal those of whole runs in which the head, or its weights on a key, are zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clearhead.base.hooks import is_seen
from clearhead.core import Sequence, build
from clearhead.interpret.maps import effects
from clearhead.interpret.maps.contributions import contributions
from clearhead.interpret.maps.effects import head_effects, key_effects
from clearhead.interpret.maps.hook_points import Place, edit
from clearhead.interpret.maps.outcome import Outcome
from clearhead.interpret.maps.recording import AttentionRecord
from tests.interpret.maps.cases import CASES, SOURCE, Run, make, record, run, texts
from tests.laws.tiny import difference, hparams, resolved

# Norms and heads of other forms are no matter of effects.
NAMES = [name for name in CASES if "offset" not in name and name not in {"capped outputs", "tagger"}]


def outcome_of(found: Run) -> Outcome:
    pooled = found.module.head.is_pooled
    return Outcome(None if pooled else found.streams.last.ids.shape[1] - 2, "", 2)


def plain(found: Run, outcome: Outcome) -> float:
    """The log-probability of an outcome by a whole run."""
    streams = found.streams
    with torch.no_grad():
        logits = found.module(streams.source, streams.target).logits[0]
    row = logits if outcome.position is None else logits[outcome.position]
    return float(row.double().log_softmax(-1)[outcome.id])


@contextmanager
def without_head(entry: AttentionRecord, head: int, found: Run) -> Iterator[None]:
    """Zero what one head gives to the output projection, in the call at its depth."""
    order = getattr(found.module, entry.address.partition(".")[0]).order
    wanted, calls = order[: entry.layer].count(order[entry.layer]), []
    size = entry.attention.spec.head_size

    def zero(_module: object, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        calls.append(None)
        if len(calls) - 1 != wanted:
            return None
        mixed = inputs[0].clone()
        mixed[..., head * size : (head + 1) * size] = 0
        return (mixed,)

    hook = entry.attention.out.register_forward_pre_hook(zero)
    yield
    hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_the_effect_of_a_head_is_that_of_a_whole_run_without_it(name: str) -> None:
    found = run(name)
    outcome = outcome_of(found)
    told: list[tuple[int, int]] = []
    measured = head_effects(found.streams, found.records, outcome, lambda done, total: told.append((done, total)))
    expected, before = [], plain(found, outcome)
    heads = [(entry, head) for entry in found.records for head in range(entry.num_heads)]
    for entry, head in heads[::5]:
        with without_head(entry, head, found):
            expected.append(plain(found, outcome) - before)
    assert [(effect.stack, effect.layer, effect.head) for effect in measured] == [
        (entry.stack, entry.layer, head) for entry, head in heads
    ]
    assert told[-1] == (len(heads), len(heads)) and told == sorted(told)
    assert difference(torch.tensor([effect.change for effect in measured[::5]]), torch.tensor(expected)) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_effect_of_a_key_is_that_of_a_whole_run_with_zero_weights_on_it(name: str) -> None:
    found = run(name)
    outcome, before = outcome_of(found), plain(found, outcome_of(found))
    for entry in found.records[:: max(1, len(found.records) - 1)]:  # the first and the last
        head = entry.num_heads - 1
        expected = []
        for key in range(entry.key_BKSE.shape[2]):

            def zero(weights: Tensor, at: Place, key: int = key, entry: AttentionRecord = entry) -> Tensor:
                weights = weights.clone()
                if at.depth == entry.layer:
                    weights[:, entry.num_heads - 1, :, key] = 0
                return weights

            with edit(found.module, {f"{entry.address}.weights": zero}):
                expected.append(plain(found, outcome) - before)
        measured = key_effects(found.streams, entry, head, outcome)
        assert (measured - torch.tensor(expected)).abs().max() <= 1e-5 * max(1e-1, *map(abs, expected))
        assert measured.abs().max() > 1e-4


def test_batches_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # In fp64: products of other sizes may add in another order, and effects are differences of far larger numbers.
    module = make("two stacks").double()
    found = record(module, *texts(module))
    outcome, entry = outcome_of(found), found.records[0]

    def measure() -> tuple[Tensor, Tensor]:
        heads = [effect.change for effect in head_effects(found.streams, found.records[::4], outcome)]
        return torch.tensor(heads), key_effects(found.streams, entry, 1, outcome)

    together = measure()
    monkeypatch.setattr(effects, "read_tokens", lambda module: 1)
    for one, many in zip(measure(), together, strict=True):
        assert difference(one, many) <= 1e-12


def test_layers_below_the_head_do_not_run_again() -> None:
    found = run("two stacks")
    ran: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda *call, name=f"{stack}.{index}": ran.append(name))
        for stack in ("encoder", "decoder")
        for index, layer in enumerate(getattr(found.streams.module, stack).layers)
    ]
    last = [entry for entry in found.records if entry.stack == "decoder.memory"][-1]
    head_effects(found.streams, [last], outcome_of(found))
    for hook in hooks:
        hook.remove()
    assert ran == [f"decoder.{last.layer}"]


def test_an_exception_leaves_the_model_as_it_was() -> None:
    found = run.__wrapped__("decoder, grouped keys")
    found.module.train()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        head_effects(found.streams, found.records, outcome_of(found), stop)
    assert found.module.training
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in found.module.modules())
    assert not any(map(is_seen, found.streams.module.modules()))


def copying_head() -> Run:
    """A decoder in which head 1 of layer 1 attends to token 5, by a constant query, and writes that token down."""
    torch.manual_seed(1)
    chosen = replace(hparams("decoder/post/learned"), heads=3, head_size=14, norm_place="pre", tie="none")
    module = build(resolved(chosen)).eval()
    attention = module.decoder.layers[1].steps[0].branches[0].function
    own, ids = slice(14, 28), torch.arange(SOURCE)[None] + 7
    ids[0, 2] = 5
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.3)
        table = module.decoder.embedding.table.weight.normal_()
        module.head.layers[0].weight.copy_(table)
        attention.query.weight[own], attention.query.bias[own] = 0.0, 4.0 * table[5]
        attention.key.weight[own] = attention.value.weight[own] = torch.eye(14)
        attention.out.weight[:, own] = 3.0 * torch.eye(14)
    return record(module, Sequence(ids))


def test_a_head_that_copies_the_answer_has_by_far_the_largest_effect() -> None:
    found = copying_head()
    planted, outcome = ("decoder.self", 1, 1), Outcome(SOURCE - 1, "", 5)
    effects = head_effects(found.streams, found.records, outcome)
    changes = {(effect.stack, effect.layer, effect.head): effect.change for effect in effects}
    assert min(changes, key=changes.__getitem__) == planted
    assert changes.pop(planted) < 5 * min(changes.values()) < 0
    by_key = key_effects(found.streams, found.records[1], 1, outcome)
    assert by_key.argmin() == 2 and by_key[2] < 5 * by_key[by_key != by_key[2]].min()
    terms = {(term.part, term.layer, term.head): term.value for term in contributions(found.streams, outcome)}
    assert max(terms, key=terms.__getitem__) == planted
    assert terms.pop(planted) > 5 * max(terms.values())
