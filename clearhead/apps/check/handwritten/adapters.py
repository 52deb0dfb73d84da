"""Checks of the functions in tests/adapters.py of the Stanford course CS336, chosen by function name.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.apps.check.handwritten.attentions import attention
from clearhead.apps.check.handwritten.experiments import Settings, compare_outputs
from clearhead.apps.check.handwritten.report import CannotCompare, Report
from clearhead.apps.check.handwritten.running import CandidateRunner
from clearhead.apps.check.handwritten.small_parts import _first_output, _normalize, _rotate, rope

_EPS, _THETA, _MOST_TOKENS, _VOCABULARY = 1e-5, 10000.0, 16, 29
Weights = Mapping[str, Tensor]
_SUBLAYER = "x = x + attention(rmsnorm(x)); x = x + swiglu(rmsnorm(x)); swiglu(x) = W2 (silu(W1 x) * W3 x)"


def _draw(*shape: int, seed: int = 31) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (
        1.3 / math.sqrt(shape[-1]) if len(shape) == 2 else 1.0
    )


def _attention(settings: Settings, weights: Weights, prefix: str, x: Tensor, heads: int) -> Tensor:
    q, k, v = (
        (x @ weights[f"{prefix}{name}_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv"
    )
    if settings.get("has_rope", True):
        turning = {name: settings[name] for name in ("pairs", "angles", "offset", "sign") if name in settings}
        q, k = (_rotate(turning, vectors, _THETA, "neighbours") for vectors in (q, k))
    scores = q @ k.mT * (1.0 if settings.get("is_unscaled") else q.shape[-1] ** -0.5)
    if settings.get("is_causal", True):
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    merged: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return merged @ weights[f"{prefix}output_proj.weight"].T


def _swiglu(settings: Settings, w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor) -> Tensor:
    gate, plain = (x @ w3.T, x @ w1.T) if settings.get("is_gate_swapped") else (x @ w1.T, x @ w3.T)
    known: Mapping[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": torch.relu,
        "none": lambda y: y,
    }
    return (known[settings.get("activation", "silu")](gate) * (1.0 if settings.get("is_ungated") else plain)) @ w2.T


def _block(settings: Settings, weights: Weights, prefix: str, x: Tensor, heads: int) -> Tensor:
    norms = {
        "is_centred": settings.get("is_layer_norm", False),
        "is_variance": settings.get("is_layer_norm", False),
        "eps": settings.get("eps", _EPS),
    }
    first, second = (partial(_normalize, norms, weight=weights[f"{prefix}ln{i}.weight"], bias=None) for i in (1, 2))

    def feed_forward(y: Tensor) -> Tensor:
        w1, w2, w3 = (weights[f"{prefix}ffn.w{i}.weight"] for i in (1, 2, 3))
        return _swiglu(settings, w1, w2, w3, y)

    def attend(y: Tensor) -> Tensor:
        return _attention(settings, weights, f"{prefix}attn.", y, heads)

    for index, (norm, step) in enumerate(((first, attend), (second, feed_forward))):
        residual = 0.0 if index in settings.get("no_residual", ()) else x
        if settings.get("is_post"):
            x = norm(residual + step(x))
        else:
            x = residual + step(x if index in settings.get("no_norm", ()) else norm(x))
    return x


def _model(settings: Settings, weights: Weights, ids: Tensor, heads: int, layers: int) -> Tensor:
    x = weights["token_embeddings.weight"][ids]
    for index in range(layers):
        x = _block(settings, weights, f"layers.{index}.", x, heads)
    if settings.get("has_final_norm", True):
        x = _normalize({"is_centred": False, "is_variance": False, "eps": _EPS}, x, weights["ln_final.weight"], None)
    return x @ weights["lm_head.weight"].T


_ATTENTION_CHANGES: tuple[tuple[str, Settings], ...] = (
    ("not_rotated", {"has_rope": False}), ("no_scaling", {"is_unscaled": True}),
    ("interleaved_or_halves", {"pairs": "halves", "angles": "halves"}),
    ("angles_and_pairs_mismatched", {"angles": "halves"}), ("position_off_by_one", {"offset": 1}),
    ("wrong_sign", {"sign": -1.0}),
    ("causal_future_visible", {"is_causal": False}),
)  # fmt: skip
_GATE_CHANGES: tuple[tuple[str, Settings], ...] = (
    ("gate_swapped", {"is_gate_swapped": True}), ("gate_missing", {"is_ungated": True}),
    ("activation_missing", {"activation": "none"}), ("wrong_activation", {"activation": "gelu"}),
    ("wrong_activation", {"activation": "relu"}),
)  # fmt: skip
_BLOCK_CHANGES = (
    *_ATTENTION_CHANGES, *_GATE_CHANGES, ("norm_after", {"is_post": True}), ("residual_missing", {"no_residual": (0,)}),
    ("residual_missing", {"no_residual": (1,)}), ("residual_missing", {"no_residual": (0, 1)}),
    ("norm_missing", {"no_norm": (0,)}),
    ("norm_missing", {"no_norm": (1,)}), ("mean_subtracted", {"is_layer_norm": True}),
)  # fmt: skip


def _block_weights(width: int, prefix: str, seed: int) -> dict[str, Tensor]:
    inner = 2 * width
    shapes = {f"attn.{name}_proj.weight": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"ffn.w1.weight": (inner, width), "ffn.w2.weight": (width, inner), "ffn.w3.weight": (inner, width)}
    drawn = {f"{prefix}{name}": _draw(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    return {**drawn, **{f"{prefix}ln{i}.weight": _draw(width, seed=seed + 20 + i) + 1.0 for i in (1, 2)}}


def _compare_once(
    candidate: Callable[..., Any], call: tuple[Any, ...], compute: Callable[[Settings], Tensor],
    changes: tuple[tuple[str, Settings], ...], where: str, mathematics: str,
) -> Report:  # fmt: skip
    """Call the candidate once, and report whether its output is right or a known mistake explains it."""
    subject, runner = candidate.__name__, CandidateRunner(candidate)
    wanted = compute({})
    try:
        with runner.borrow():
            outputs = [_first_output(runner, [call], [tuple(wanted.shape)])]
    except CannotCompare as reason:
        return Report.refuse(subject, reason)
    return compare_outputs(
        subject, outputs, lambda settings: [compute(settings)], changes, runner, [f"output {list(wanted.shape)}"],
        where=where, mathematics=mathematics,
    )  # fmt: skip


def _check_causal_attention(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    return attention(candidate, width=width, heads=heads, causal=True)


def _check_dot_product(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    return attention(candidate, width=width, heads=heads, causal=False)


def _check_rope_attention(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    weights = {name: weight for name, weight in _block_weights(width, "", 41).items() if name.startswith("attn.")}
    x, positions = _draw(2, 7, width), torch.arange(7)
    call = (width, heads, _MOST_TOKENS, _THETA, *weights.values(), x, positions)
    return _compare_once(
        candidate, call, lambda settings: _attention(settings, weights, "attn.", x, heads), _ATTENTION_CHANGES,
        "the attention with RoPE", "softmax(rope(q) rope(k)ᵀ / √d_head) v, causal"
    )  # fmt: skip


def _check_rope(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    def turn(x: Tensor, positions: Tensor) -> Any:
        return candidate(x.shape[-1], _THETA, _MOST_TOKENS, x, positions)

    turn.__name__ = candidate.__name__
    return rope(turn, head_size=width // heads // 2 * 2 or 2, theta=_THETA)


def _check_rms_norm(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    x, weight = _draw(2, 5, width) * torch.tensor([0.01, 1.0])[:, None, None], _draw(width) + 1.0
    base = {"is_centred": False, "is_variance": False, "eps": _EPS}
    changes = (("mean_subtracted", {"is_centred": True, "is_variance": True}), ("sum_for_mean", {"is_sum": True}),
               ("eps_outside_root", {"root": "outside"}), ("eps_missing", {"root": "bare"}),
               ("weight_missing", {"has_weight": False}),
               ("root_missing", {"root": "missing"}))  # fmt: skip
    return _compare_once(
        candidate, (width, _EPS, weight, x), lambda settings: _normalize({**base, **settings}, x, weight, None),
        changes, "the RMS norm", "x / √(mean(x²) + eps) · weight"
    )  # fmt: skip


def _check_swiglu(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    inner = 2 * width
    w1, w2, w3 = _draw(inner, width), _draw(width, inner, seed=32), _draw(inner, width, seed=33)
    x = _draw(2, 5, width, seed=34)
    return _compare_once(
        candidate, (width, inner, w1, w2, w3, x), lambda settings: _swiglu(settings, w1, w2, w3, x), _GATE_CHANGES,
        "the feed-forward", "W2 (silu(W1 x) * W3 x)"
    )  # fmt: skip


def _check_block(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    weights, x = _block_weights(width, "", 51), _draw(2, 7, width)
    call = (width, heads, 2 * width, _MOST_TOKENS, _THETA, weights, x)
    return _compare_once(
        candidate,
        call,
        lambda settings: _block(settings, weights, "", x, heads),
        _BLOCK_CHANGES,
        "the block",
        _SUBLAYER,
    )


def _check_language_model(candidate: Callable[..., Any], width: int, heads: int) -> Report:
    weights = {
        "token_embeddings.weight": _draw(_VOCABULARY, width, seed=1),
        "lm_head.weight": _draw(_VOCABULARY, width, seed=2),
        "ln_final.weight": _draw(width, seed=3) + 1.0,
    }
    for index in range(2):
        weights |= _block_weights(width, f"layers.{index}.", 61 + 30 * index)
    ids = torch.randint(_VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(5))
    call = (_VOCABULARY, _MOST_TOKENS, width, 2, heads, 2 * width, _THETA, weights, ids)
    changes = (*_BLOCK_CHANGES, ("norm_missing", {"has_final_norm": False}))
    return _compare_once(
        candidate, call, lambda settings: _model(settings, weights, ids, heads, 2), changes, "the model", _SUBLAYER
    )


def _make_check(
    make: Callable[[Tensor], tuple[tuple[Any, ...], Tensor]], where: str, mathematics: str
) -> Callable[..., Report]:
    def check(candidate: Callable[..., Any], width: int, heads: int) -> Report:
        call, wanted = make(_draw(3, width) * 4.0)
        return _compare_once(candidate, call, lambda _: wanted, (), where, mathematics)

    return check


def _softmax(x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    return (x + 1000.0, -1), x.softmax(-1)


def _silu(x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    return (x,), functional.silu(x)


def _linear(x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    weight = _draw(5, x.shape[-1])
    return (x.shape[-1], 5, weight, x), x @ weight.T


def _embedding(x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    ids = torch.tensor([[2, 0], [1, 1]])
    return (len(x), x.shape[-1], x, ids), x[ids]


def _cross_entropy(x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    targets = torch.arange(len(x)) % x.shape[-1]
    return (x * 200.0, targets), functional.cross_entropy(x * 200.0, targets)


ADAPTERS: Mapping[str, Callable[[Callable[..., Any], int, int], Report]] = {
    "run_linear": _make_check(_linear, "the linear layer", "x Wᵀ"),
    "run_embedding": _make_check(_embedding, "the embedding", "weights[ids]"),
    "run_softmax": _make_check(_softmax, "the softmax", "exp(x - max(x)) / sum(exp(x - max(x)))"),
    "run_silu": _make_check(_silu, "the activation", "x · sigmoid(x)"),
    "run_cross_entropy": _make_check(_cross_entropy, "the loss", "mean of logsumexp(x) - x[target]"),
    "run_rmsnorm": _check_rms_norm,
    "run_swiglu": _check_swiglu,
    "run_rope": _check_rope,
    "run_scaled_dot_product_attention": _check_dot_product,
    "run_multihead_self_attention": _check_causal_attention,
    "run_multihead_self_attention_with_rope": _check_rope_attention,
    "run_transformer_block": _check_block,
    "run_transformer_lm": _check_language_model,
}
"""The check of each function of the assignment; others, such as tokenizers and optimizers, are not checked."""
