"""Tiny models, each with one feature that some Hugging Face checkpoint needs and that the presets lack.

Sizes are distinct primes where heads need not divide the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from clearhead import spec
from clearhead.core import Transformer, build
from tests.laws.tiny import hparams, resolve_spec

LENGTH = 7
"""The original length of RoPE scaling that depends on the length; tests use shorter and longer rows."""
ROTARY = "decoder/pre-grouped/rotary"
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(5)), tuple(2.0 + 0.7 * i for i in range(5))
SLOPES = (0.9, 0.02, 0.3, 0.5, 0.11, 0.7)
SCALINGS = {
    "linear": spec.LinearScaling(factor=3.0),
    "band": spec.BandScaling(factor=4.0, low_frequency_factor=1.0, high_frequency_factor=3.0, original_length=LENGTH),
    "yarn": spec.YarnScaling(factor=4.0, original_length=LENGTH, beta_fast=2.0, beta_slow=0.25, magnitude=1.3),
    "dynamic": spec.DynamicScaling(factor=3.0, original_length=LENGTH),
    "long-rope": spec.LongRopeScaling(short_factor=SHORT, long_factor=LONG, original_length=LENGTH, magnitude=1.2),
}


def base(name: str, **changes: Any) -> spec.Model:
    return resolve_spec(replace(hparams(name), **changes))


def change_stack(
    model: spec.Model, function: Callable[[Any], Any], stack: str | None = None, **fields: Any
) -> spec.Model:
    """Replace the functions of all branches of a stack, and fields of the stack itself."""
    stack = stack or ("decoder" if model.decoder else "encoder")
    old = getattr(model, stack)

    def renew_step(step: spec.Step) -> spec.Step:
        branches = tuple(b.model_copy(update={"function": function(b.function)}) for b in step.branches)
        return step.model_copy(update={"branches": branches})

    layers = tuple(spec.Layer(steps=tuple(renew_step(step) for step in layer.steps)) for layer in old.layers)
    return model.model_copy(update={stack: old.model_copy(update={"layers": layers} | fields)})


def attending(name: str, **fields: Any) -> spec.Model:
    """Change fields of every self-attention of the last stack; cross-attention gets those that apply to it."""

    def renew(function: Any) -> Any:
        wanted = fields if getattr(function, "source", "") == "self" else {}
        if getattr(function, "source", "") == "memory":
            wanted = {key: value for key, value in fields.items() if key in {"soft_cap", "sink", "clip"}}
        return function.model_copy(update=wanted)

    return change_stack(base(name, qk_norm=False), renew)


def change_feed_forward(**fields: Any) -> spec.Model:
    def renew(function: Any) -> Any:
        return function.model_copy(update=fields) if isinstance(function, spec.FeedForward) else function

    return change_stack(base(ROTARY), renew)


def use_experts(mixture: Callable[[spec.FeedForward], spec.MixtureOfExperts]) -> spec.Model:
    def renew(function: Any) -> Any:
        return mixture(function) if isinstance(function, spec.FeedForward) else function

    return change_stack(base(ROTARY), renew)


def embed_narrower(place_name: str, **fields: Any) -> spec.Model:
    """Give the only stack an embedding of another width, and tie the head to it if there is one."""
    model = base("encoder/post/learned", tie="none", segments=3)
    embedding = model.encoder.embedding.model_copy(
        update={"width": 11, "projection": spec.Projection(place=place_name, bias=True), "norm": spec.LayerNorm()}
        | fields
    )
    head = spec.Head(
        layers=(spec.Linear(size=11), spec.Linear(size=29, weight=spec.Reference(path="encoder.embedding.table")))
    )
    stack = model.encoder.model_copy(update={"embedding": embedding})
    return model.model_copy(update={"encoder": stack, "head": head})


def use_disentangled(name: str, **fields: Any) -> spec.Model:
    stack = name.split("/")[0]
    table = spec.DistanceTable(span=4, norm=spec.LayerNorm())
    if fields.pop("bucketed", False):
        table = spec.DistanceTable(span=6, buckets=6, max_distance=17)
    terms = fields.pop("terms", ("content_to_position", "position_to_content"))
    bias = spec.Disentangled(table=spec.Reference(path=f"{stack}.score_table"), terms=terms, **fields)

    def renew(function: Any) -> Any:
        is_self = getattr(function, "source", "") == "self"
        return function.model_copy(update={"score_bias": bias, "position": None}) if is_self else function

    return change_stack(base(name, qk_norm=False), renew, score_table=table)


def with_shared_layers(name: str) -> spec.Model:
    """Build a spec with two layers that run at five depths."""
    model = base(name)
    stack = "decoder" if model.decoder else "encoder"
    old = getattr(model, stack)
    new = old.model_copy(update={"layers": (old.layers[0], old.layers[0]), "sharing": (0, 1, 1, 0, 1)})
    return model.model_copy(update={stack: new})


def _norm(model: spec.Model, norm: spec.LayerNorm | spec.RMSNorm) -> spec.Model:
    stack = model.decoder
    layers = tuple(
        spec.Layer(
            steps=tuple(
                step.model_copy(
                    update={"branches": tuple(b.model_copy(update={"pre": norm, "post": norm}) for b in step.branches)}
                )
                for step in layer.steps
            )
        )
        for layer in stack.layers
    )
    return model.model_copy(update={"decoder": stack.model_copy(update={"layers": layers, "final_norm": norm})})


def query_key(**fields: Any) -> spec.Model:
    norm = fields.pop("norm", spec.RMSNorm())
    return attending(ROTARY, query_key_norm=spec.QueryKeyNorm(norm=norm, **fields))


def scale_rotary(name: str) -> spec.Model:
    return attending(ROTARY, position=spec.Rotary(scaling=SCALINGS[name]))


def cap_logits() -> spec.Model:
    model = base(ROTARY)
    return model.model_copy(update={"head": spec.Head(layers=(*model.head.layers, spec.SoftCap(value=0.7)))})


HF_PARTS: dict[str, Callable[[], spec.Model]] = {
    "layer norm without weight": lambda: _norm(base(ROTARY), spec.LayerNorm(weight=False, bias=False)),
    "layer norm with offset": lambda: _norm(base(ROTARY), spec.LayerNorm(unit_offset=True)),
    "rms norm with offset": lambda: _norm(base(ROTARY), spec.RMSNorm(unit_offset=True)),
    "query-key norm per head": lambda: query_key(norm=spec.LayerNorm(), per_head=True),
    "query-key norm over the width": lambda: query_key(over="width"),
    "query-key norm after rotation": lambda: query_key(norm=spec.RMSNorm(weight=False), after_rotation=True),
    "soft cap": lambda: attending(ROTARY, soft_cap=0.5),
    "soft cap on the memory": lambda: attending("encoder-decoder/post/alibi", soft_cap=0.5),
    "sink": lambda: attending(ROTARY, sink=True),
    "sink on the memory": lambda: attending("encoder-decoder/post/sinusoidal", sink=True),
    "clip": lambda: attending(ROTARY, clip=0.3),
    **{f"rotation {name}": lambda name=name: scale_rotary(name) for name in SCALINGS},
    "scaled alibi": lambda: attending("decoder/post/alibi", score_bias=spec.Alibi(scaled=True)),
    "rounded alibi": lambda: attending("decoder/post/alibi", score_bias=spec.Alibi(rounding="bfloat16")),
    "own slopes": lambda: attending("decoder/post/alibi", score_bias=spec.Alibi(slopes=SLOPES)),
    "own buckets": lambda: attending(
        ROTARY, position=None, score_bias=spec.RelativeBuckets(num_heads=6, bidirectional=False)
    ),
    "disentangled": lambda: use_disentangled("encoder/post/sinusoidal"),
    "disentangled, own projections": lambda: use_disentangled("encoder/post/sinusoidal", shared_projections=False),
    "disentangled, one term": lambda: use_disentangled("decoder/post/rotary", terms=("position_to_content",)),
    "disentangled, buckets": lambda: use_disentangled("decoder/post/rotary", bucketed=True),
    "squared relu": lambda: change_feed_forward(activation="relu2"),
    "quick gelu": lambda: change_feed_forward(activation="quick_gelu", gated=False),
    "clamped gate": lambda: change_feed_forward(activation=spec.ClampedGate(alpha=1.7, limit=0.5)),
    "experts": lambda: use_experts(lambda ff: spec.MixtureOfExperts(count=5, top_k=2, expert=ff)),
    "experts with biases": lambda: use_experts(
        lambda ff: spec.MixtureOfExperts(
            count=5, top_k=3, expert=ff.model_copy(update={"gated": False, "bias_in": True, "bias_out": True}),
            router=spec.Router(bias=True, normalize=False),
        )
    ),
    "projection before the norm": lambda: embed_narrower("before_norm", word_norm=spec.LayerNorm()),
    "projection after the norm": lambda: embed_narrower("after_norm", scale=2.3, scale_rounding="weights"),
    "fairseq sinusoids": lambda: change_stack(
        base("decoder/post/sinusoidal"), lambda function: function,
        embedding=base("decoder/post/sinusoidal").decoder.embedding.model_copy(
            update={"position": spec.Sinusoidal(layout="fairseq", offset=2)}
        ),
    ),
    "shared layers": lambda: with_shared_layers("decoder/pre-grouped/rotary"),
    "shared layers with a memory": lambda: with_shared_layers("encoder-decoder/post/learned"),
    "capped outputs": cap_logits,
}  # fmt: skip
DEPENDS_ON_LENGTH = {"rotation dynamic", "rotation long-rope"}


def hf_part(name: str) -> Transformer:
    """Build the model of that name in evaluation mode, with random norm weights, norm biases and sinks."""
    module = build(spec.Model.from_json(HF_PARTS[name]().to_json())).eval()
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            if path.endswith(("norm.weight", "norm.bias", "pre.weight", "post.weight", "out.weight", "sink")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module
