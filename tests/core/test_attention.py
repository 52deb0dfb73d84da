"""Attention: its choice of kernel, capturing and editing its weights, and options that it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.hooks import watching
from clearhead.core import MultiHeadAttention, build
from clearhead.core.attention import Attention, attention_weights
from clearhead.core.kernels import attention
from clearhead.core.kernels.positions import rotary_angles, rotate
from tests.laws.tiny import TARGET_VOCAB, difference, resolve_spec, tiny
from tests.laws.tiny import hparams as recipe_of


def attentions(module: nn.Module) -> list[Attention]:
    return [submodule for submodule in module.modules() if isinstance(submodule, Attention)]


def test_the_kernel_depends_on_the_present_mode() -> None:
    plain, dropped = MultiHeadAttention(15, 3).attention, MultiHeadAttention(15, 3, dropout=0.3).attention
    assert plain.train().kernel()[0] == "fused"
    assert dropped.train().kernel() == ("eager", "the fused kernel has no attention dropout on a CPU")
    assert dropped.eval().kernel()[0] == "fused"
    buckets = tiny("decoder/post/buckets")
    assert all(layer.kernel()[0] == "fused" for layer in attentions(buckets))
    assert all("trainable score bias" in layer.kernel()[1] for layer in attentions(buckets.train()))
    with watching({(plain.identity, "weights"): [lambda weights: weights]}):
        assert plain.kernel() == ("eager", "scores or weights are captured")
    assert plain.kernel()[0] == "fused"


@pytest.mark.parametrize(("length", "fused"), [(attention.SHORT_ON_CPU, False), (attention.SHORT_ON_CPU + 1, True)])
def test_short_sequences_take_the_eager_kernel_on_a_cpu(
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
def test_weights_can_be_captured_and_edited() -> None:
    module = tiny("decoder/post/sinusoidal")
    ids = torch.randint(TARGET_VOCAB, (2, 7))
    before, seen = module(ids).logits, []
    target = module.decoder.layers[0].steps[0].branches[0].function
    with watching({(target.identity, "weights"): [lambda weights: (seen.append(weights), weights)[1]]}):
        assert torch.equal(module(ids).logits, before)
    assert seen[0].shape == (2, 6, 7, 7)
    assert difference(seen[0].sum(-1), torch.ones(2, 6, 7)) <= 1e-5
    assert not seen[0].triu(1).any()
    with watching({(target.identity, "weights"): [torch.zeros_like]}):
        assert (module(ids).logits - before).abs().max() > 1e-3
    with watching({(target.identity, "scores"): [lambda scores: scores.clamp(max=0)]}):
        assert (module(ids).logits - before).abs().max() > 1e-3, "scores can be replaced as well"
    assert not target.is_watched("scores", "weights")
    assert torch.equal(module(ids).logits, before)


def test_weights_sum_to_one_over_unmasked_keys() -> None:
    scores, allowed = torch.randn(2, 3, 5, 7), torch.rand(2, 1, 5, 7) > 0.5
    allowed[0, 0, 1] = False
    weights = attention_weights(scores.masked_fill(~allowed, float("-inf")), allowed)
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
    layer, seen = attentions(module)[0], []
    nn.init.normal_(layer.query_norm.weight), nn.init.normal_(layer.key_norm.weight)
    x = torch.randn(3, 7, 11)
    with watching({(layer.identity, "scores"): [lambda scores: (seen.append(scores), scores)[1]]}):
        module.encode(torch.zeros(3, 7, dtype=torch.long), embeddings=x)

    def norm_heads(y: Tensor, weight: Tensor) -> Tensor:
        heads = y.unflatten(-1, (2, 5)).transpose(1, 2)
        return heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    query, key = norm_heads(layer.query(x), layer.query_norm.weight), norm_heads(layer.key(x), layer.key_norm.weight)
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
            "score_bias has 5 heads, but the attention has 3",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        MultiHeadAttention(**options)


def test_attention_in_a_model_is_initialized_like_standalone_attention() -> None:
    assert len(attentions(build(resolve_spec(recipe_of("encoder-decoder/post/alibi"))))) == 3 + 2 * 2


def alone(**changes: object) -> tuple[nn.Module, Attention]:
    """Build a model of one attention with six query heads and three key heads, with random weights everywhere."""
    options = {"num_heads": 6, "num_kv_heads": 3, "head_size": 5, "scale": 0.7} | changes
    step = spec.Step(branches=(spec.Branch(function=spec.Attention(**options)),))
    embedding = spec.Embedding(table=spec.Table(rows=13))
    stack = spec.Stack(width=11, embedding=embedding, layers=(spec.Layer(steps=(step,)),))
    module = build(spec.Model(encoder=stack)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module, attentions(module)[0]


def run_attention(
    module: nn.Module, layer: Attention, x: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores and weights of a call, and the output of the attention."""
    taps: list[Tensor] = []
    with watching({(layer.identity, name): [lambda x: (taps.append(x), x)[1]] for name in ("scores", "weights")}):
        out = module.encode(torch.zeros(x.shape[:2], dtype=torch.long), embeddings=x, mask=mask).hidden - x
    return taps[0], taps[1], out


def split(y: Tensor) -> Tensor:
    return y.unflatten(-1, (-1, 5)).transpose(1, 2)


def test_a_soft_cap_bounds_scaled_scores() -> None:
    module, layer = alone(soft_cap=3.0)
    x = torch.randn(2, 7, 11)
    scores, weights, _ = run_attention(module, layer, x)
    raw = split(layer.query(x)) @ split(layer.key(x)).repeat_interleave(2, 1).mT * 0.7
    assert raw.abs().max() > 6 and scores.abs().max() <= 3
    torch.testing.assert_close(scores, 3.0 * torch.tanh(raw / 3.0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights, scores.softmax(-1))


def test_a_sink_takes_weight_and_adds_no_value() -> None:
    module, layer = alone(sink=True)
    x, mask = torch.randn(2, 7, 11), torch.arange(7) < torch.tensor([[7], [4]])
    scores, weights, out = run_attention(module, layer, x, mask)
    powers = scores.exp() * mask[:, None, None, :]
    expected = powers / (powers.sum(-1, keepdim=True) + layer.sink.exp()[:, None, None])
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-4)
    assert weights.sum(-1).min() < 0.99
    mixed = weights @ split(layer.value(x)).repeat_interleave(2, 1)
    torch.testing.assert_close(out, layer.out(mixed.transpose(1, 2).flatten(2)), atol=1e-4, rtol=1e-4)
    assert layer.kernel() == ("eager", "the fused kernel has no sink")
    _, _, out = run_attention(module, layer, x, torch.zeros(2, 7, dtype=torch.bool))
    torch.testing.assert_close(out, layer.out.bias.expand_as(out), atol=1e-5, rtol=1e-5)


def test_a_clip_bounds_query_key_and_value() -> None:
    module, layer = alone(clip=0.9)
    x = torch.randn(2, 7, 11)
    scores, weights, out = run_attention(module, layer, x)
    query, key, value = (split(projection(x).clip(-0.9, 0.9)) for projection in (layer.query, layer.key, layer.value))
    assert layer.value(x).abs().max() > 2
    torch.testing.assert_close(scores, query @ key.repeat_interleave(2, 1).mT * 0.7, atol=1e-5, rtol=1e-4)
    mixed = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, layer.out(mixed.transpose(1, 2).flatten(2)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["head", "own", "width", "late"])
def test_query_and_key_are_normed_where_the_spec_places_it(variant: str) -> None:
    choice = spec.QueryKeyNorm(
        norm=spec.RMSNorm(), over="width" if variant == "width" else "head", per_head=variant == "own",
        after_rotation=variant == "late",
    )  # fmt: skip
    rotary = spec.Rotary(size=4)
    module, layer = alone(query_key_norm=choice, position=rotary)
    x = torch.randn(2, 7, 11)
    shapes = {"head": ((5,), (5,)), "late": ((5,), (5,)), "own": ((6, 5), (3, 5)), "width": ((30,), (15,))}
    assert (layer.query_norm.weight.shape, layer.key_norm.weight.shape) == shapes[variant]

    def rms(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotate_heads(projection: nn.Module, norm: nn.Module) -> Tensor:
        y = projection(x)
        y = split(rms(y) * norm.weight if variant == "width" else y)
        weight = norm.weight[:, None] if variant == "own" else norm.weight
        y = rms(y) * weight if variant in {"head", "own"} else y
        y = rotate(y, *rotary_angles(torch.arange(7)[None], rotary, 5, None))
        return rms(y) * weight if variant == "late" else y

    query, key = rotate_heads(layer.query, layer.query_norm), rotate_heads(layer.key, layer.key_norm)
    scores, _, _ = run_attention(module, layer, x)
    torch.testing.assert_close(scores, query @ key.repeat_interleave(2, 1).mT * 0.7, atol=1e-4, rtol=1e-4)


def test_scaled_alibi_is_scaled_with_the_scores() -> None:
    plain, layer = alone(score_bias=spec.Alibi())
    scaled, other = alone(score_bias=spec.Alibi(scaled=True))
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 11)
    products = split(layer.query(x)) @ split(layer.key(x)).repeat_interleave(2, 1).mT * 0.7
    penalty, _, _ = run_attention(plain, layer, x)
    scores, _, _ = run_attention(scaled, other, x)
    torch.testing.assert_close(scores - products, (penalty - products) * 0.7, atol=1e-4, rtol=1e-4)
