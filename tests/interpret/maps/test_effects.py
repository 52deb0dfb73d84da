"""Effects and patches equal those of whole runs with a head, its weights on a key or its activations replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.hooks import is_seen
from clearhead.core import Sequence, Transformer, build
from clearhead.interpret.maps import effects
from clearhead.interpret.maps.contributions import contributions
from clearhead.interpret.maps.effects import EffectMeter, Patcher, Patches, align_positions
from clearhead.interpret.maps.hook_points import ActivationContext, capture, edit
from clearhead.interpret.maps.outcome import ModelOutcome
from clearhead.interpret.maps.recording import AttentionRecord
from tests.interpret.maps.cases import CASES, SOURCE, Run, make, record, run, texts
from tests.interpret.maps.test_attention_maps import model_of
from tests.interpret.maps.test_attention_maps import tokenizer as made_tokenizer  # noqa: F401
from tests.laws.tiny import difference, hparams, resolve_spec

# Norms and heads of other forms are no matter of effects.
NAMES = [name for name in CASES if "offset" not in name and name not in {"capped outputs", "tagger"}]


def outcome_of(entry: Run) -> ModelOutcome:
    pooled = entry.module.head.is_pooled
    return ModelOutcome(None if pooled else entry.streams.last.ids.shape[1] - 2, "", 2)


def plain(entry: Run, outcome: ModelOutcome) -> float:
    """Return the log-probability of an outcome from a whole run."""
    streams = entry.streams
    with torch.no_grad():
        logits = entry.module(streams.source, streams.target).logits[0]
    row = logits if outcome.position is None else logits[outcome.position]
    return float(row.double().log_softmax(-1)[outcome.id])


@contextmanager
def without_head(entry: AttentionRecord, head: int, run_entry: Run) -> Iterator[None]:
    """Zero what one head gives to the output projection, in the call at its depth."""
    order = getattr(run_entry.module, entry.address.partition(".")[0]).order
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
    whole_run = run(name)
    outcome = outcome_of(whole_run)
    reports: list[tuple[int, int]] = []
    measured = EffectMeter(
        whole_run.streams, outcome, whole_run.records, lambda done, total: reports.append((done, total))
    ).head_effects()
    expected, before = [], plain(whole_run, outcome)
    heads = [(entry, head) for entry in whole_run.records for head in range(entry.num_heads)]
    for entry, head in heads[::5]:
        with without_head(entry, head, whole_run):
            expected.append(plain(whole_run, outcome) - before)
    assert [(effect.stack, effect.layer, effect.head) for effect in measured] == [
        (entry.stack, entry.layer, head) for entry, head in heads
    ]
    assert reports[-1] == (len(heads), len(heads)) and reports == sorted(reports)
    assert difference(torch.tensor([effect.change for effect in measured[::5]]), torch.tensor(expected)) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_effect_of_a_key_is_that_of_a_whole_run_with_zero_weights_on_it(name: str) -> None:
    whole_run = run(name)
    outcome, before = outcome_of(whole_run), plain(whole_run, outcome_of(whole_run))
    for entry in whole_run.records[:: max(1, len(whole_run.records) - 1)]:  # the first and the last
        head = entry.num_heads - 1
        expected = []
        for key in range(entry.key_BKSE.shape[2]):

            def zero(weights: Tensor, at: ActivationContext, key: int = key, entry: AttentionRecord = entry) -> Tensor:
                weights = weights.clone()
                if at.depth == entry.layer:
                    weights[:, entry.num_heads - 1, :, key] = 0
                return weights

            with edit(whole_run.module, {f"{entry.address}.weights": zero}):
                expected.append(plain(whole_run, outcome) - before)
        measured = EffectMeter(whole_run.streams, outcome, whole_run.records).key_effects(entry, head)
        assert (measured - torch.tensor(expected)).abs().max() <= 1e-5 * max(1e-1, *map(abs, expected))
        assert measured.abs().max() > 1e-4


def test_batches_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # In fp64: products of other sizes may add in another order, and effects are differences of far larger numbers.
    module = make("two stacks").double()
    whole_run = record(module, *texts(module))
    outcome, entry = outcome_of(whole_run), whole_run.records[0]

    def measure() -> tuple[Tensor, Tensor]:
        heads = [
            effect.change for effect in EffectMeter(whole_run.streams, outcome, whole_run.records[::4]).head_effects()
        ]
        return torch.tensor(heads), EffectMeter(whole_run.streams, outcome, whole_run.records).key_effects(entry, 1)

    together = measure()
    monkeypatch.setattr(effects, "read_tokens", lambda module: 1)
    for alone, many in zip(measure(), together, strict=True):
        assert difference(alone, many) <= 1e-12


def test_layers_below_the_head_do_not_run_again() -> None:
    whole_run = run("two stacks")
    ran: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda *call, name=f"{stack}.{index}": ran.append(name))
        for stack in ("encoder", "decoder")
        for index, layer in enumerate(getattr(whole_run.streams.module, stack).layers)
    ]
    last = [entry for entry in whole_run.records if entry.stack == "decoder.memory"][-1]
    EffectMeter(whole_run.streams, outcome_of(whole_run), [last]).head_effects()
    for hook in hooks:
        hook.remove()
    assert ran == [f"decoder.{last.layer}"]


def test_an_exception_leaves_the_model_as_it_was() -> None:
    whole_run = run.__wrapped__("decoder, grouped keys")
    whole_run.module.train()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EffectMeter(whole_run.streams, outcome_of(whole_run), whole_run.records, stop).head_effects()
    assert whole_run.module.training
    assert all(not child._forward_hooks and not child._forward_pre_hooks for child in whole_run.module.modules())
    assert not any(map(is_seen, whole_run.streams.module.modules()))


def copying_head() -> Run:
    """Return a decoder whose head 1 of layer 1 attends to token 5, with a constant query, and copies this token."""
    torch.manual_seed(1)
    chosen = replace(hparams("decoder/post/learned"), heads=3, head_size=14, norm_place="pre", tie="none")
    module = build(resolve_spec(chosen)).eval()
    attention = module.decoder.layers[1].steps[0].branches[0].function
    head_slice, ids = slice(14, 28), torch.arange(SOURCE)[None] + 7
    ids[0, 2] = 5
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.3)
        table = module.decoder.embedding.table.weight.normal_()
        module.head.layers[0].weight.copy_(table)
        attention.query.weight[head_slice], attention.query.bias[head_slice] = 0.0, 4.0 * table[5]
        attention.key.weight[head_slice] = attention.value.weight[head_slice] = torch.eye(14)
        attention.out.weight[:, head_slice] = 3.0 * torch.eye(14)
    return record(module, Sequence(ids))


def test_a_head_that_copies_the_answer_has_by_far_the_largest_effect() -> None:
    whole_run = copying_head()
    planted, outcome = ("decoder.self", 1, 1), ModelOutcome(SOURCE - 1, "", 5)
    effects = EffectMeter(whole_run.streams, outcome, whole_run.records).head_effects()
    changes = {(effect.stack, effect.layer, effect.head): effect.change for effect in effects}
    assert min(changes, key=changes.__getitem__) == planted
    assert changes.pop(planted) < 5 * min(changes.values()) < 0
    by_key = EffectMeter(whole_run.streams, outcome, whole_run.records).key_effects(whole_run.records[1], 1)
    assert by_key.argmin() == 2 and by_key[2] < 5 * by_key[by_key != by_key[2]].min()
    terms = {(term.component, term.layer, term.head): term.value for term in contributions(whole_run.streams, outcome)}
    assert max(terms, key=terms.__getitem__) == planted
    assert terms.pop(planted) > 5 * max(terms.values())


Pairs = dict[str, list[tuple[int, int]]]


def both(name: str, shorter: int = 0) -> tuple[Run, Run]:
    """Return the runs of a text and of another text with fewer tokens."""
    module = make(name).double()
    here = record(module, *texts(module))
    source, target = here.streams.source, here.streams.target
    other = [
        None if sequence is None else Sequence((sequence.ids[:, shorter:] + 3) % 7 + 1) for sequence in (source, target)
    ]
    return here, record(module, other[0], other[1])


def patch_by_loops(here: Run, there: Run, outcome: ModelOutcome, pairs: Pairs) -> tuple[dict[str, Tensor], list[float]]:
    """Return the changes of patches, computed with `edit` and one whole run each."""
    module: Transformer = here.module

    def value(run: Run) -> float:
        with torch.no_grad():
            row = module(run.streams.source, run.streams.target).logits[0]
        row = row if outcome.position is None else row[outcome.position]
        return float(row.log_softmax(-1)[outcome.id] - row.log_softmax(-1)[outcome.other_id])

    def measure_change(address: str, depth: int, put: object) -> float:
        def at_depth(tensor: Tensor, at: ActivationContext) -> Tensor:
            return put(tensor.clone()) if at.depth == depth else tensor

        with edit(module, {address: at_depth}):
            return value(here) - before

    before, streams, heads = value(here), {}, []
    with torch.no_grad(), capture(module, ["**.before", "**.after", "**.mixed"]) as seen:
        module(there.streams.source, there.streams.target)
    for name, counterparts in pairs.items():
        order = getattr(module, name).order
        streams[name] = torch.full((len(order) + 1, here.streams.before[name][0].shape[1]), torch.nan)
        for depth in range(len(order) + 1):
            layer, point = (order[depth], "before") if depth < len(order) else (order[-1], "after")
            address, at = f"{name}.layers.{layer}.{point}", min(depth, len(order) - 1)
            (other,) = (seen_record.tensor[0] for seen_record in seen[address] if seen_record.depth == at)
            for position, two in counterparts:

                def put_vector(tensor: Tensor, position: int = position, vector: Tensor = other[two]) -> Tensor:
                    tensor[0, position] = vector
                    return tensor

                streams[name][depth, position] = measure_change(address, at, put_vector)
    for entry in here.records:
        (other,) = (
            seen_record.tensor[0] for seen_record in seen[f"{entry.address}.mixed"] if seen_record.depth == entry.layer
        )
        for head in range(entry.num_heads):

            def put_head(tensor: Tensor, head: int = head, entry=entry, other: Tensor = other) -> Tensor:
                for position, two in pairs[entry.address.partition(".")[0]]:
                    tensor[0, head, position] = other[head, two]
                return tensor

            heads.append(measure_change(f"{entry.address}.mixed", entry.layer, put_head))
    return streams, heads


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("two stacks", {"encoder": [(0, 1), (3, 0), (5, 3)], "decoder": [(2, 1), (3, 0)]}),
        ("decoder, grouped keys", None),
        ("classifier by the mean", None),
        ("shared layers with a memory", {"decoder": [(1, 1), (4, 2)], "encoder": [(6, 4)]}),
    ],
)
def test_a_patch_is_the_change_of_a_whole_run_with_it(name: str, positions: Pairs | None) -> None:
    here, there = both(name, 0 if positions is None else 1)
    position = None if here.module.head.is_pooled else 3
    outcome = ModelOutcome(position, "", 2, other="", other_id=1)
    pairs = align_positions(here.streams, there.streams, positions)
    patcher = Patcher(EffectMeter(here.streams, outcome, here.records), there.streams, pairs)
    measured, heads = patcher.streams(), patcher.heads()
    streams, expected = patch_by_loops(here, there, outcome, pairs)
    assert measured.keys() == streams.keys()
    for stack, changes in streams.items():
        assert torch.equal(measured[stack].isnan(), changes.isnan())
        assert (measured[stack] - changes).nan_to_num().abs().max() <= 2e-6
        assert changes.nan_to_num().abs().max() > 1e-3
    assert [(effect.stack, effect.layer, effect.head) for effect in heads] == [
        (entry.stack, entry.layer, head) for entry in here.records for head in range(entry.num_heads)
    ]
    assert (torch.tensor([effect.change for effect in heads]) - torch.tensor(expected)).abs().max() <= 2e-6
    # The stream after the last layer, where the outcome is predicted, is all that the head reads.
    total = patcher.total()
    if position in dict(pairs.get("decoder", [])):
        assert total == pytest.approx(float(measured["decoder"][-1, position]), abs=2e-6)
    else:
        assert (total is None) == (position is not None)


def test_batches_of_any_size_agree_and_the_same_text_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = both("decoder, norms behind")
    outcome, pairs = ModelOutcome(2, "", 2), align_positions(here.streams, there.streams, None)
    reports: list[tuple[int, int]] = []
    notify = lambda done, total: reports.append((done, total))  # noqa: E731
    whole = Patcher(EffectMeter(here.streams, outcome, here.records, notify), there.streams, pairs)
    streams, heads = whole.streams(), whole.heads()
    assert reports[-1][0] == reports[-1][1] and reports == sorted(reports)
    assert (streams["decoder"][:, 3:] == 0).all(), "a causal model does not see what comes behind the position"
    monkeypatch.setattr(effects, "read_tokens", lambda module: 1)
    alone = Patcher(EffectMeter(here.streams, outcome, here.records), there.streams, pairs)
    assert torch.allclose(alone.streams()["decoder"], streams["decoder"], atol=1e-6)
    assert [effect.change for effect in alone.heads()] == pytest.approx([effect.change for effect in heads], abs=1e-6)
    same = Patcher(EffectMeter(here.streams, outcome, here.records), here.streams, pairs)
    assert same.streams()["decoder"].abs().max() <= 1e-6
    assert max(abs(effect.change) for effect in same.heads()) <= 1e-6


def test_maps_are_patched_refused_and_drawn(made_tokenizer, tmp_path: Path) -> None:  # noqa: F811
    model = model_of(made_tokenizer, "encoder-decoder", "translate")
    here, there = model.attention("abc de", "fa cb"), model.attention("abd de", "fa bb")
    patches = here.patch(there, of=(3, "c", "b"))
    assert isinstance(patches, Patches) and patches.outcome == "'c' rather than 'b'"
    assert {name: tuple(changes.shape) for name, changes in patches.streams.items()} == {
        "encoder": (4, 7),
        "decoder": (4, 6),
    }
    assert np.allclose(patches.streams["decoder"][-1, 2], patches.total, atol=1e-6)
    patches.save_picture(tmp_path / "patch.svg")
    picture = (tmp_path / "patch.svg").read_text("utf-8")
    assert "decoder.memory: heads" in picture and "'c' rather than 'b': effect of the other text" in picture
    with pytest.raises(InputError, match=r"patch.svg exists already"):
        patches.save_picture(tmp_path / "patch.svg")
    longer = model.attention("abd ded", "fa bb")
    refused = {
        r"the encoder reads 7 tokens of this text and 8 of the other one: give "
        r"texts of equal length, or pairs of positions: positions=\{'encoder': \[\(here, there\), ...\]\}": (
            longer,
            None,
        ),
        "positions has the key 'memory'; expected encoder or decoder": (longer, {"memory": []}),
        "positions pairs 7 with 0 in the encoder; expected 0 to 6 in this text and 0 to 7": (
            longer,
            {"encoder": [(7, 0)]},
        ),
        "has a position of the encoder in this text twice": (longer, {"encoder": [(1, 0), (1, 2)]}),
        "the two runs are of different models": (model_of(made_tokenizer, "decoder", "generate").attention("ab"), None),
    }
    for message, (other, positions) in refused.items():
        with pytest.raises(InputError, match=message):
            here.patch(other, positions=positions)
    some = here.patch(longer, of=3, positions={"encoder": [(1, 2)]})
    assert some.streams["encoder"].isnan().sum() == 4 * 6
    assert replace(some, heads=()).heads == ()
