"""The order of an embedding: rows, scale, word norm, projection, sum, norm, and a projection at any of three places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.core.embedding import Embedding, LearnedPosition, SinusoidalPosition
from clearhead.core.kernels.positions import sinusoidal_table

WIDTH, ROWS, OWN = 7, 13, 5
IDS = torch.tensor([[3, 0, 12, 5]])
POSITION = torch.arange(4)[None]


def embedding(**fields: object) -> Embedding:
    options = {"table": spec.Table(rows=ROWS), "scale": 1.7, "num_segments": 3, "position": spec.Learned(rows=11)}
    module = Embedding(WIDTH, spec.Embedding(**(options | fields)))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("order", ["before_norm", "after_norm"])
def test_a_projection_stands_where_it_is_said_to(order: str) -> None:
    module = embedding(
        width=OWN, projection=spec.Projection(place=order, bias=True), norm=spec.LayerNorm(), word_norm=spec.RMSNorm()
    )
    segments = torch.tensor([[0, 2, 1, 1]])
    words = module.word_norm(module.table.weight[IDS] * 1.7)
    x = words + module.segments.weight[segments] + module.position.weight[POSITION]
    x = module.projection(x) if order == "before_norm" else x
    x = module.norm(x)
    x = module.projection(x) if order == "after_norm" else x
    assert x.shape == (1, 4, WIDTH)
    torch.testing.assert_close(module(IDS, POSITION, 4, segments), x)


def test_a_word_norm_stands_before_the_sum_and_the_norm_after_it() -> None:
    module = embedding(word_norm=spec.LayerNorm(), num_segments=0)
    expected = module.word_norm(module.table.weight[IDS] * 1.7) + module.position.weight[POSITION]
    torch.testing.assert_close(module(IDS, POSITION, 4), expected)


def test_a_rounded_scale_is_a_number_of_the_dtype_of_the_weights() -> None:
    """55.4256 is 55.5 in bfloat16: the product with the rounded constant differs from the rounded product."""
    table = {"scale": 3072**0.5, "num_segments": 0, "position": None}
    rounded, exact = embedding(scale_rounding="weights", **table), embedding(**table)
    exact.load_state_dict(rounded.state_dict())
    torch.testing.assert_close(rounded(IDS, POSITION, 4), exact(IDS, POSITION, 4), atol=0, rtol=1e-6)
    rounded, exact = rounded.bfloat16(), exact.bfloat16()
    actual = rounded(IDS, POSITION, 4)
    assert torch.equal(actual, rounded.table.weight[IDS] * torch.tensor(55.5, dtype=torch.bfloat16))
    assert not torch.equal(actual, exact(IDS, POSITION, 4))


def test_fairseq_sinusoids_are_those_of_transformers() -> None:
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

    table = sinusoidal_table(2003, 14, spec.Sinusoidal(layout="fairseq"))
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(2003, 14, None)
    assert torch.equal(table, theirs)
    assert (table - sinusoidal_table(2003, 14, spec.Sinusoidal(layout="halves"))).abs().max() > 1.0


def test_a_table_of_its_own_width_is_tied_to_a_head_of_that_width() -> None:
    tied = spec.Head(
        layers=(spec.Linear(size=OWN), spec.Linear(size=ROWS, weight=spec.Reference(path="encoder.embedding.table")))
    )
    embedding_spec = spec.Embedding(
        table=spec.Table(rows=ROWS), width=OWN, projection=spec.Projection(place="after_norm", bias=True)
    )
    model = spec.Model(encoder=spec.Stack(width=WIDTH, embedding=embedding_spec, layers=()), head=tied)
    module = build(model)
    assert module.head.layers[1].projection.weight_VD is module.encoder.embedding.table.weight
    assert module(IDS).logits.shape == (1, 4, ROWS)
    short = model.model_copy(update={"head": spec.Head(layers=tied.layers[1:])})
    with pytest.raises(ValueError, match=f"'encoder.embedding.table' has width {OWN}, but {WIDTH} is needed"):
        build(short)


def test_the_table_grows_and_starts_at_its_offset() -> None:
    kind = spec.Sinusoidal(offset=3)
    module, table = SinusoidalPosition(6, kind), sinusoidal_table(50, 6, kind)
    for longest in (5, 2, 31):
        position = torch.arange(longest)[None]
        assert torch.equal(module(position, longest)[0], table[3 : 3 + longest])
    assert not module.state_dict()


def test_learned_positions_start_at_their_offset_and_end_with_their_rows() -> None:
    module = LearnedPosition(5, spec.Learned(rows=13, offset=2))
    torch.nn.init.normal_(module.weight)
    assert torch.equal(module(torch.arange(11)[None], 11)[0], module.weight[2:])
    assert torch.equal(module(torch.tensor([[0, 0, 10, 10]]), 17)[0, 2], module.weight[12])
    with pytest.raises(InputError, match="12 tokens is longer than the model's 11 positions; shorten or split it"):
        module(torch.arange(12)[None], 12)
