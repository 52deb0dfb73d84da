"""Disentangled attention scores: the formula pair by pair, and the results of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead import spec
from clearhead.base.hooks import watching
from clearhead.core import build
from clearhead.core.attention import Attention
from tests.laws.tiny import difference

WIDTH, HEADS, SIZE, ROWS = 15, 3, 5, 13
TERMS = ("content_to_position", "position_to_content")


def model(table: spec.DistanceTable, terms: tuple[str, ...], shared: bool) -> spec.Model:
    attention = spec.Attention(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE, scale=(SIZE * (1 + len(terms))) ** -0.5,
        score_bias=spec.Disentangled(
            table=spec.Reference(path="encoder.score_table"), terms=terms, shared_projections=shared
        ),
    )  # fmt: skip
    layer = spec.Layer(steps=(spec.Step(branches=(spec.Branch(function=attention),)),))
    embedding = spec.Embedding(table=spec.Table(rows=ROWS))
    return spec.Model(encoder=spec.Stack(width=WIDTH, embedding=embedding, layers=(layer,), score_table=table))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("terms", [TERMS, TERMS[:1], TERMS[1:]], ids=len)
@pytest.mark.parametrize("buckets", [None, 6])
def test_attention_is_that_of_transformers(shared: bool, terms: tuple[str, ...], buckets: int | None) -> None:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position

    span, maximum = buckets or 7, 17 if buckets else 7
    short = {"content_to_position": "c2p", "position_to_content": "p2c"}
    config = DebertaV2Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, relative_attention=True, pos_att_type=[short[t] for t in terms],
        position_buckets=buckets or -1, max_relative_positions=maximum, share_att_key=shared,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).eval()
    table = spec.DistanceTable(span=span, buckets=buckets, max_distance=maximum if buckets else None)
    module = build(model(table, terms, shared)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = next(submodule for submodule in module.modules() if isinstance(submodule, Attention))
    names = {"query": "query_proj", "key": "key_proj", "value": "value_proj"}
    names |= {"score_bias.position_key": "pos_key_proj", "score_bias.position_query": "pos_query_proj"}
    state = dict(ours.named_parameters())
    theirs.load_state_dict(
        {
            f"{new}.{kind}": state[f"{old}.{kind}"]
            for old, new in names.items()
            for kind in ("weight", "bias")
            if f"{old}.{kind}" in state
        }
    )
    x = torch.randn(2, 23, WIDTH)
    distance = build_relative_position(x, x, bucket_size=buckets or -1, max_position=maximum)
    everything = torch.ones(2, 1, 23, 23)
    expected = theirs(x, everything, relative_pos=distance, rel_embeddings=module.encoder.score_table.weight)[0]
    added = module.encode(torch.zeros(2, 23, dtype=torch.long), embeddings=x).hidden - x
    assert difference(added, ours.out(expected)) <= 1e-5


def test_scores_are_the_formula_pair_by_pair() -> None:
    table = spec.DistanceTable(span=4, norm=spec.LayerNorm())
    module = build(model(table, TERMS, shared=True)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    attention, seen = next(submodule for submodule in module.modules() if isinstance(submodule, Attention)), []
    x = torch.randn(1, 11, WIDTH)
    with watching({(attention.identity, "scores"): [lambda scores: (seen.append(scores), scores)[1]]}):
        module.encode(torch.zeros(1, 11, dtype=torch.long), embeddings=x)
    rows = module.encoder.score_table.norm(module.encoder.score_table.weight)
    query, key = (projection(x[0]).unflatten(-1, (HEADS, SIZE)) for projection in (attention.query, attention.key))
    far_query, far_key = (
        projection(rows).unflatten(-1, (HEADS, SIZE)) for projection in (attention.query, attention.key)
    )
    for i in range(11):
        for j in range(11):
            row = min(max(i - j + 4, 0), 7)
            expected = (query[i] * key[j] + query[i] * far_key[row] + key[j] * far_query[row]).sum(-1)
            torch.testing.assert_close(seen[0][0, :, i, j], expected / math.sqrt(3 * SIZE), atol=1e-5, rtol=1e-4)
