"""Changes of weights: planted changes rank first, ranks are true, and shapes decide what is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.checkpoints.stored_weights import ModuleWeights
from clearhead.core import Transformer, build
from clearhead.interpret.difference import weights
from clearhead.interpret.difference.weights import WeightChanges, compare_weights
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

HEAD, HEAD_SIZE, KV_HEAD, ROW = 2, 7, 1, 13
ATTENTION = "decoder.layers.1.steps.0.branches.0.function"
Plant = Callable[[dict[str, Tensor]], None]


def decoder(vocabulary: int = 31, kv_heads: int = 2, feedforward: int = 37) -> Transformer:
    hparams = Hyperparameters(
        family="decoder", layers=3, width=28, heads=4, kv_heads=kv_heads, feedforward=feedforward, norm_place="pre"
    )
    return build(build_spec(hparams, source_vocab=vocabulary, target_vocab=vocabulary))


def compare(a: Transformer, b: Transformer) -> WeightChanges:
    return compare_weights(ModuleWeights("a", a), ModuleWeights("b", b))


def plant_head(state: dict[str, Tensor]) -> None:
    queries = slice(HEAD * HEAD_SIZE, (HEAD + 1) * HEAD_SIZE)
    keys = slice(KV_HEAD * HEAD_SIZE, (KV_HEAD + 1) * HEAD_SIZE)
    for name, rows in (("query", queries), ("key", keys), ("value", keys)):
        state[f"{ATTENTION}.{name}.weight"][rows] *= 1.01
    state[f"{ATTENTION}.out.weight"][:, queries] *= 1.01


def plant_queries(state: dict[str, Tensor]) -> None:
    state[f"{ATTENTION}.query.weight"][HEAD * HEAD_SIZE : (HEAD + 1) * HEAD_SIZE] *= 1.01


def plant_row(state: dict[str, Tensor]) -> None:
    state["decoder.embedding.table.weight"][ROW] *= 1.01


def plant_norm(state: dict[str, Tensor]) -> None:
    state["decoder.layers.2.steps.1.branches.0.pre.weight"] *= 1.01


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (plant_head, ("head", ATTENTION, HEAD)),
        (plant_queries, ("head", ATTENTION, HEAD)),
        (plant_row, ("row", "decoder.embedding.table.weight", ROW)),
        (plant_norm, ("tensor", "decoder.layers.2.steps.1.branches.0.pre.weight", None)),
    ],
)
def test_a_planted_change_ranks_first_over_noise(plant: Plant, first: tuple[str, str, int | None]) -> None:
    a = decoder()
    b = copy.deepcopy(a)
    typical = torch.cat([weight.flatten() for weight in a.state_dict().values()]).square().mean().sqrt()
    with torch.no_grad():
        # A row and a bias far below the typical: noise on them is no change to see.
        a.decoder.embedding.table.weight[3] *= 1e-4
        state = b.state_dict()
        plant(state)
        for weight in state.values():
            size = weight.square().mean().sqrt() or typical * 0.1
            weight += 1e-4 * size * torch.randn_like(weight)
        state["decoder.embedding.table.weight"][3] = a.decoder.embedding.table.weight[3] * 1.5
    changes = compare(a, b).changes
    largest = changes[0]
    assert (largest.kind, largest.address, largest.index) == first
    assert 0.003 < largest.score < 0.0105
    assert largest.score > 10 * changes[8].score, "noise is far below"


def test_the_change_is_the_relative_frobenius_norm() -> None:
    a, b = decoder(kv_heads=4), decoder(kv_heads=4)
    changes = compare(a, b)
    states = a.state_dict(), b.state_dict()
    for change in changes.changes:
        if change.kind == "tensor":
            before, after = (state[change.address].double() for state in states)
            expected = float((after - before).norm() / before.norm()) if before.any() else None
            expected = expected if (after - before).any() else 0.0
            assert change.relative == (expected if expected is None else pytest.approx(expected, rel=1e-5))
    tensors = [change for change in changes.changes if change.kind == "tensor"]
    heads = [change for change in changes.changes if change.kind == "head"]
    assert {change.address for change in tensors} == set(states[0]) and len(heads) == 3 * 4
    # Together the heads are the four projections.
    squares = {"before": 0.0, "change": 0.0}
    for name in ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias", "out.weight"):
        if f"{ATTENTION}.{name}" in states[0]:
            before, after = (state[f"{ATTENTION}.{name}"].double() for state in states)
            squares["before"] += float(before.square().sum())
            squares["change"] += float((after - before).square().sum())
    mean = sum(head.score**2 for head in heads if head.address == ATTENTION) / 4
    assert mean == pytest.approx(squares["change"] / squares["before"], rel=0.05)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("rank", [1, 5, 200, 280])
def test_the_rank_of_a_change_is_that_of_its_singular_values(
    rank: int, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_EXACT", 2**22 if is_exact else 0)
    monkeypatch.setattr(weights, "BLOCK", 5000)
    hparams = Hyperparameters(family="decoder", layers=0, width=280, heads=4, feedforward=37)
    a = build(build_spec(hparams, source_vocab=300, target_vocab=300))
    b = copy.deepcopy(a)
    change_MN = torch.randn(300, rank) @ torch.randn(rank, 280) / rank**0.5
    with torch.no_grad():
        b.decoder.embedding.table.weight += 0.1 * change_MN + 1e-5 * torch.randn(300, 280)
    (tensor_change,) = [
        change for change in compare(a, b).changes if change.kind == "tensor" and len(change.shape) == 2
    ]
    values = torch.linalg.svdvals(change_MN.double())
    expected = int((values > 0.01 * values[0]).sum())
    if is_exact or rank < weights.NUM_DIRECTIONS:
        assert (tensor_change.rank, tensor_change.is_rank_at_least) == (expected, False)
    else:
        assert (tensor_change.rank, tensor_change.is_rank_at_least) == (weights.NUM_DIRECTIONS, True)


def test_grown_tables_are_compared_on_their_common_rows() -> None:
    a = decoder(vocabulary=31)
    b = decoder(vocabulary=37)
    with torch.no_grad():
        for address, weight in b.state_dict().items():
            weight[: len(a.state_dict()[address])] = a.state_dict()[address]
    changes = compare(a, b)
    assert not changes.only_in_a and not changes.only_in_b
    grown = {other.address: (other.a, other.b, other.common_rows) for other in changes.other_shape}
    assert grown["decoder.embedding.table.weight"] == ((31, 28), (37, 28), 31)
    assert all(rows == 31 for _, _, rows in grown.values())
    assert {change.score for change in changes.changes} == {0.0}


def test_weights_that_do_not_agree_are_listed_and_only_strangers_are_refused() -> None:
    hparams = {"layers": 2, "width": 28, "heads": 4, "norm_place": "pre"}
    a = build(
        build_spec(Hyperparameters(family="decoder", feedforward=37, **hparams), source_vocab=31, target_vocab=31)
    )
    b = build(
        build_spec(Hyperparameters(family="decoder", feedforward=41, **hparams), source_vocab=31, target_vocab=31)
    )
    changes = compare(a, b)
    assert {weight.common_rows for weight in changes.other_shape} == {None}
    assert {weight.address.split(".")[-2] for weight in changes.other_shape} == {"up", "down"}
    assert not {weight.address for weight in changes.other_shape} & {change.address for change in changes.changes}
    with pytest.raises(InputError, match="no weight of a has the address and the shape of one of b"):
        other = Hyperparameters(family="encoder", layers=1, width=26, heads=2, feedforward=9)
        compare(a, build(build_spec(other, source_vocab=17, target_vocab=17)))


def test_weights_that_are_no_numbers_are_refused() -> None:
    a = decoder()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.decoder.embedding.table.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"decoder\.embedding\.table\.weight has NaN"):
        compare(a, b)
