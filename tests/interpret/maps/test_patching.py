"""Patches equal a loop of whole runs, each with one activation of the other text in place of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.core import Sequence, Transformer
from clearhead.interpret.maps import effects
from clearhead.interpret.maps.hook_points import Place, capture, edit
from clearhead.interpret.maps.outcome import Outcome
from clearhead.interpret.maps.patching import Patcher, Patches, aligned_positions
from tests.interpret.maps.cases import Run, make, record, texts
from tests.interpret.maps.test_attention_maps import model_of
from tests.interpret.maps.test_attention_maps import tokenizer as made_tokenizer  # noqa: F401

Pairs = dict[str, list[tuple[int, int]]]


def both(name: str, shorter: int = 0) -> tuple[Run, Run]:
    """The run of one text and that of another, of fewer tokens."""
    module = make(name).double()
    here = record(module, *texts(module))
    source, target = here.streams.source, here.streams.target
    other = [None if one is None else Sequence((one.ids[:, shorter:] + 3) % 7 + 1) for one in (source, target)]
    return here, record(module, other[0], other[1])


def looped(here: Run, there: Run, outcome: Outcome, pairs: Pairs) -> tuple[dict[str, Tensor], list[float]]:
    """The same changes by `edit`, one whole run for each."""
    module: Transformer = here.module

    def value(run: Run) -> float:
        with torch.no_grad():
            row = module(run.streams.source, run.streams.target).logits[0]
        row = row if outcome.position is None else row[outcome.position]
        return float(row.log_softmax(-1)[outcome.id] - row.log_softmax(-1)[outcome.other_id])

    def changed(address: str, depth: int, put: object) -> float:
        def at_depth(tensor: Tensor, at: Place) -> Tensor:
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
            (other,) = (one.tensor[0] for one in seen[address] if one.depth == at)
            for one, two in counterparts:

                def put_vector(tensor: Tensor, one: int = one, vector: Tensor = other[two]) -> Tensor:
                    tensor[0, one] = vector
                    return tensor

                streams[name][depth, one] = changed(address, at, put_vector)
    for entry in here.records:
        (other,) = (one.tensor[0] for one in seen[f"{entry.address}.mixed"] if one.depth == entry.layer)
        for head in range(entry.num_heads):

            def put_head(tensor: Tensor, head: int = head, entry=entry, other: Tensor = other) -> Tensor:
                for one, two in pairs[entry.address.partition(".")[0]]:
                    tensor[0, head, one] = other[head, two]
                return tensor

            heads.append(changed(f"{entry.address}.mixed", entry.layer, put_head))
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
    place = None if here.module.head.is_pooled else 3
    outcome = Outcome(place, "", 2, other="", other_id=1)
    pairs = aligned_positions(here.streams, there.streams, positions)
    patcher = Patcher(here.streams, there.streams, outcome, pairs, here.records)
    found, heads = patcher.streams(), patcher.heads()
    streams, expected = looped(here, there, outcome, pairs)
    assert found.keys() == streams.keys()
    for stack, changes in streams.items():
        assert torch.equal(found[stack].isnan(), changes.isnan())
        assert (found[stack] - changes).nan_to_num().abs().max() <= 2e-6
        assert changes.nan_to_num().abs().max() > 1e-3
    assert [(one.stack, one.layer, one.head) for one in heads] == [
        (entry.stack, entry.layer, head) for entry in here.records for head in range(entry.num_heads)
    ]
    assert (torch.tensor([one.change for one in heads]) - torch.tensor(expected)).abs().max() <= 2e-6
    # The stream behind the last layer, where the outcome is predicted, is all that the head reads.
    total = patcher.total()
    if place in dict(pairs.get("decoder", [])):
        assert total == pytest.approx(float(found["decoder"][-1, place]), abs=2e-6)
    else:
        assert (total is None) == (place is not None)


def test_batches_of_any_size_agree_and_the_same_text_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = both("decoder, norms behind")
    outcome, pairs = Outcome(2, "", 2), aligned_positions(here.streams, there.streams, None)
    told: list[tuple[int, int]] = []
    notify = lambda done, total: told.append((done, total))  # noqa: E731
    whole = Patcher(here.streams, there.streams, outcome, pairs, here.records, notify)
    streams, heads = whole.streams(), whole.heads()
    assert told[-1][0] == told[-1][1] and told == sorted(told)
    assert (streams["decoder"][:, 3:] == 0).all(), "a causal model does not see what comes behind the position"
    monkeypatch.setattr(effects, "read_tokens", lambda module: 1)
    alone = Patcher(here.streams, there.streams, outcome, pairs, here.records)
    assert torch.allclose(alone.streams()["decoder"], streams["decoder"], atol=1e-6)
    assert [one.change for one in alone.heads()] == pytest.approx([one.change for one in heads], abs=1e-6)
    same = Patcher(here.streams, here.streams, outcome, pairs, here.records)
    assert same.streams()["decoder"].abs().max() <= 1e-6
    assert max(abs(one.change) for one in same.heads()) <= 1e-6


def test_maps_are_patched_refused_and_drawn(made_tokenizer, tmp_path: Path) -> None:  # noqa: F811
    model = model_of(made_tokenizer, "encoder-decoder", "translate")
    here, there = model.attention("abc de", "fa cb"), model.attention("abd de", "fa bb")
    found = here.patch(there, of=(3, "c", "b"))
    assert isinstance(found, Patches) and found.outcome == "'c' rather than 'b'"
    assert {name: tuple(changes.shape) for name, changes in found.streams.items()} == {
        "encoder": (4, 7),
        "decoder": (4, 6),
    }
    assert np.allclose(found.streams["decoder"][-1, 2], found.total, atol=1e-6)
    found.save_picture(tmp_path / "patch.svg")
    picture = (tmp_path / "patch.svg").read_text("utf-8")
    assert "decoder.memory: heads" in picture and "'c' rather than 'b': what the other text brings" in picture
    with pytest.raises(InputError, match=r"patch.svg exists already"):
        found.save_picture(tmp_path / "patch.svg")
    longer = model.attention("abd ded", "fa bb")
    refused = {
        r"the encoder reads 7 tokens of this text and 8 of the other one, so its positions have no counterparts: give "
        r"texts of as many tokens, or positions=\{'encoder': \[\(here, there\), ...\]\}": (longer, None),
        "positions names 'memory'; this model has encoder and decoder": (longer, {"memory": []}),
        "positions joins 7 and 0 of the encoder; expected 0 to 6 in this text and 0 to 7": (
            longer,
            {"encoder": [(7, 0)]},
        ),
        "names a position of the encoder in this text twice": (longer, {"encoder": [(1, 0), (1, 2)]}),
        "the two runs are of different models": (model_of(made_tokenizer, "decoder", "generate").attention("ab"), None),
    }
    for message, (other, positions) in refused.items():
        with pytest.raises(InputError, match=message):
            here.patch(other, positions=positions)
    some = here.patch(longer, of=3, positions={"encoder": [(1, 2)]})
    assert some.streams["encoder"].isnan().sum() == 4 * 6
    assert replace(some, heads=()).heads == ()
