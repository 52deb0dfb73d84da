"""A shared weight is one parameter whose gradient is the sum over its uses; nothing else is shared."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import MultiHeadAttention, Transformer, build
from clearhead.core.embedding import Table
from clearhead.core.head import Linear
from tests.laws.tiny import SMALL, VOCAB, difference, resolve_spec, tiny


def build_tied_and_untied(tie: str) -> tuple[Transformer, Transformer]:
    """Build the same function twice: with a shared table, and with a copy of the table for each use."""
    tied = build(resolve_spec(replace(SMALL, tie=tie)))
    untied = build(resolve_spec(replace(SMALL, tie="none")))
    if tie == "all":
        untied = build(
            spec.Model.from_json(
                untied.spec.to_json()
                .replace('"rows": 23', f'"rows": {VOCAB}')
                .replace('"size": 23', f'"size": {VOCAB}')
            )
        )
    state = untied.state_dict() | tied.state_dict()
    owner = "encoder" if tie == "all" else "decoder"
    shared = tied.state_dict()[f"{owner}.embedding.table.weight"]
    state |= {"decoder.embedding.table.weight": shared, "head.layers.0.weight": shared}
    untied.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    return tied.eval(), untied.eval()


def gradients(module: Transformer, ids: Tensor, target_ids: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    logits = module(ids, target_ids).logits
    (logits * torch.randn(logits.shape)).sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("tie", ["decoder", "all"])
def test_a_tied_table_is_one_parameter_with_the_sum_of_the_gradients(tie: str) -> None:
    tied, untied = build_tied_and_untied(tie)
    places = ["decoder.embedding.table.weight", "head.layers.0.weight"]
    places = ["encoder.embedding.table.weight", *places] if tie == "all" else places
    names = dict(tied.named_parameters())
    assert [name for name in places if name in names] == places[:1]
    assert len(dict(untied.named_parameters())) == len(names) + len(places) - 1
    assert set(tied.state_dict()) == set(names)
    ids, target_ids = torch.randint(VOCAB, (3, 7)), torch.randint(23, (3, 5))
    assert torch.equal(tied(ids, target_ids).logits, untied(ids, target_ids).logits)
    together, apart = gradients(tied, ids, target_ids), gradients(untied, ids, target_ids)
    assert difference(together[places[0]], sum(apart[path] for path in places)) <= 1e-5
    assert all(apart[path].abs().max() > 1e-3 for path in places)


def test_a_copy_of_a_model_shares_within_itself_and_not_with_the_first() -> None:
    module = tiny("encoder-decoder/post/buckets")
    twin = copy.deepcopy(module)
    head = twin.head.layers[-1]
    assert isinstance(head, Linear) and isinstance(twin.decoder.embedding.table, Table)
    assert head.projection.weight_VD is twin.decoder.embedding.table.weight
    first = twin.encoder.layers[0].steps[0].branches[0].function
    assert first.tied.module is twin.encoder.score_table is not module.encoder.score_table
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(p.abs().max() > 0 for p in module.parameters() if p.dim() > 1)


def test_all_layers_of_a_stack_share_one_table_of_buckets() -> None:
    module = tiny("encoder-decoder/post/buckets")
    tables = [name for name, _ in module.named_parameters() if "score" in name]
    assert tables == ["encoder.score_table.weight", "decoder.score_table.weight"]


@torch.no_grad()
def test_two_settings_live_in_one_process() -> None:
    """Thetas, layouts, tables and lengths of one model do not affect another, whichever ran first."""

    def rotary(theta: float) -> MultiHeadAttention:
        torch.manual_seed(7)
        return MultiHeadAttention(14, 2, head_size=10, position=spec.Rotary(theta=theta))

    x = torch.randn(3, 11, 14)
    alone = [rotary(theta)(x) for theta in (1e4, 31.0)]
    assert difference(alone[0], alone[1]) > 1e-2
    near, far = rotary(31.0), rotary(1e4)
    for _ in range(2):
        assert torch.equal(near(x), alone[1])
        assert torch.equal(far(x), alone[0])


@torch.no_grad()
def test_two_thetas_and_two_tables_in_one_model() -> None:
    """Each layer keeps its own theta and buckets, though a call of the stack shares the derived tensors."""

    def stack(functions: tuple[spec.Attention, ...]) -> Transformer:
        layers = tuple(spec.Layer(steps=(spec.Step(branches=(spec.Branch(function=f),)),)) for f in functions)
        embedding = spec.Embedding(table=spec.Table(rows=VOCAB))
        model = spec.Model(encoder=spec.Stack(width=13, embedding=embedding, layers=layers))
        torch.manual_seed(11)
        return build(model).eval()

    def chain(kinds: tuple[spec.Attention, ...], ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layers in one model, and one by one in models of a single layer with the same weights."""
        both = stack(kinds)
        x = both.encoder.embedding.table(ids)
        for index, kind in enumerate(kinds):
            single = stack((kind,))
            single.encoder.layers[0].load_state_dict(both.encoder.layers[index].state_dict())
            x = single.encode(ids, embeddings=x).memory
        return both.encode(ids).memory, x

    base = spec.Attention(num_heads=3, num_kv_heads=3, head_size=4)
    ids = torch.randint(VOCAB, (2, 7))
    thetas = tuple(base.model_copy(update={"position": spec.Rotary(theta=theta)}) for theta in (1e4, 17.0))
    buckets = spec.RelativeBuckets(num_heads=3, count=8, max_distance=5, bidirectional=True)
    masks = (
        base.model_copy(update={"mask": spec.Window(before=1, after=0), "score_bias": buckets}),
        base.model_copy(update={"mask": spec.Causal(), "score_bias": buckets}),
    )
    for kinds in (thetas, masks):
        together, one_by_one = chain(kinds, ids)
        assert difference(together, one_by_one) <= 1e-6
    assert difference(chain(thetas, ids)[0], chain((thetas[0], thetas[0]), ids)[0]) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["decoder/post/sinusoidal", "encoder/post/learned"])
def test_a_longer_text_in_between_changes_nothing(name: str) -> None:
    module = tiny(name)
    short, long = torch.randint(23, (2, 3)), torch.randint(23, (1, 17))
    before = module(short).logits
    module(long)
    assert torch.equal(module(short).logits, before)
