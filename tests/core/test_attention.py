"""What attention says of itself, what can be watched and replaced in it, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import MultiHeadAttention, attention, build
from clearhead.core.attention import Attention, attention_weights
from clearhead.errors import InputError
from tests.laws.tiny import TARGET_VOCAB, difference, resolved, tiny
from tests.laws.tiny import recipe as recipe_of


def attentions(module: nn.Module) -> list[Attention]:
    return [part for part in module.modules() if isinstance(part, Attention)]


def test_body_answers_for_the_present_mode() -> None:
    plain, dropped = MultiHeadAttention(15, 3), MultiHeadAttention(15, 3, dropout=0.3)
    assert plain.train().body()[0] == "fused"
    assert dropped.train().body() == ("explicit", "the fused kernel has no attention dropout on a CPU")
    assert dropped.eval().body()[0] == "fused"
    buckets = tiny("decoder/post/buckets")
    assert all(one.body()[0] == "fused" for one in attentions(buckets))
    assert all("trainable score bias" in one.body()[1] for one in attentions(buckets.train()))
    handle = plain.weights.register_forward_hook(lambda *call: None)
    assert plain.body() == ("explicit", "scores or weights are being watched")
    handle.remove()
    assert plain.body()[0] == "fused"


@pytest.mark.parametrize(("length", "fused"), [(attention.SHORT_ON_CPU, False), (attention.SHORT_ON_CPU + 1, True)])
def test_short_sequences_take_the_explicit_body_on_a_cpu(
    length: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kernel = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), kernel(*a, **k))[1]
    )
    MultiHeadAttention(10, 2)(torch.randn(1, length, 10))
    assert bool(calls) == fused


@torch.no_grad()
def test_watching_weights_shows_them_and_replacing_them_counts() -> None:
    module = tiny("decoder/post/sinusoidal")
    ids = torch.randint(TARGET_VOCAB, (2, 7))
    before, seen = module(ids).logits, []
    target = module.decoder.layers[0].steps[0].branches[0].function
    watch = target.weights.register_forward_hook(lambda *call: seen.append(call[2]))
    assert torch.equal(module(ids).logits, before)
    watch.remove()
    assert seen[0].shape == (2, 6, 7, 7)
    assert difference(seen[0].sum(-1), torch.ones(2, 6, 7)) <= 1e-5
    assert not seen[0].triu(1).any()
    replace = target.weights.register_forward_hook(lambda *call: torch.zeros_like(call[2]))
    assert (module(ids).logits - before).abs().max() > 1e-3
    replace.remove()
    scores = target.scores.register_forward_hook(lambda *call: call[2] * 0)
    assert (module(ids).logits - before).abs().max() > 1e-3, "scores can be replaced as well"
    scores.remove()
    assert torch.equal(module(ids).logits, before)


def test_weights_sum_to_one_over_what_is_allowed() -> None:
    scores, allowed = torch.randn(2, 3, 5, 7), torch.rand(2, 1, 5, 7) > 0.5
    allowed[0, 0, 1] = False
    weights = attention_weights(scores, allowed)
    assert not weights.masked_select(~allowed).any()
    torch.testing.assert_close(weights.sum(-1), allowed.any(-1).expand(2, 3, 5).float())
    expected = scores.exp().masked_fill(~allowed, 0)
    torch.testing.assert_close(weights[1], (expected / expected.sum(-1, keepdim=True))[1])


def test_grouped_heads_are_repeated_in_their_order() -> None:
    """Query heads 0, 1, 2 read key head 0; 3, 4, 5 read key head 1."""
    module = MultiHeadAttention(14, 6, num_kv_heads=2, head_size=5)
    full = MultiHeadAttention(14, 6, head_size=5)
    state = module.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        state[name] = state[name].unflatten(0, (2, 5)).repeat_interleave(3, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(3, 7, 14)
    assert difference(module(x), full(x)) <= 1e-5


def test_scale_and_query_key_norm() -> None:
    config = spec.Attention(
        num_heads=2, num_kv_heads=2, head_size=5, scale=0.7, query_key_norm=spec.QueryKeyNorm(norm=spec.RMSNorm())
    )
    module = build(
        spec.Model(
            encoder=spec.Stack(
                width=11,
                embedding=spec.Embedding(table=spec.Table(rows=13)),
                layers=(spec.Layer(steps=(spec.Step(branches=(spec.Branch(function=config),)),)),),
            )
        )
    ).eval()
    one, seen = attentions(module)[0], []
    nn.init.normal_(one.query_norm.weight), nn.init.normal_(one.key_norm.weight)
    handle = one.scores.register_forward_hook(lambda *call: seen.append(call[2]))
    x = torch.randn(3, 7, 11)
    module.encode(torch.zeros(3, 7, dtype=torch.long), embeddings=x)
    handle.remove()

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        heads = y.unflatten(-1, (2, 5)).transpose(1, 2)
        return heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    query, key = normed(one.query(x), one.query_norm.weight), normed(one.key(x), one.key_norm.weight)
    torch.testing.assert_close(seen[0], query @ key.mT * 0.7, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 14, "num_heads": 3}, "width must be a multiple of num_heads; got width 14 and 3 heads"),
        ({"width": 14, "num_heads": 0}, "width must be a multiple"),
        ({"width": 15, "num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"width": 15, "num_heads": 3, "num_kv_heads": 0}, "num_kv_heads: expected greater than or equal to 1, got 0"),
        ({"width": 15, "num_heads": 3, "position": spec.Rotary()}, "rotary size must be even"),
        ({"width": 15, "num_heads": 3, "dropout": 1.5}, "dropout: expected less than 1, got 1.5"),
        (
            {"width": 15, "num_heads": 3, "position": spec.RelativeBuckets(num_heads=5, bidirectional=True)},
            "score_bias has 5 heads, the attention 3",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        MultiHeadAttention(**options)


def test_attention_in_a_model_is_drawn_like_attention_alone() -> None:
    assert len(attentions(build(resolved(recipe_of("encoder-decoder/post/alibi"))))) == 3 + 2 * 2
