"""OLMo: norms without weights; OLMo 2: norms after the branches and of query and key; OLMo 3: windows as well.

Source: arXiv 2402.00838, section 2.1; arXiv 2501.00656, section 2.1; the release of OLMo 3 (2025); the layout is that
of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.zoo import grouped, kinds, parts, rope
from clearhead.zoo.grouped import SELF
from clearhead.zoo.layout import module
from clearhead.zoo.record import Key, Values, Variant


def _olmo(c: Values) -> spec.Model:
    norm = spec.LayerNorm(eps=1e-5, weight=False, bias=False)
    attention = grouped.attention(c, spec.Causal(), bias=parts.biases(c["attention_bias"]), clip=c["clip_qkv"])
    layer = spec.Layer(steps=(parts.pre(norm, attention), parts.pre(norm, grouped.feed_forward(c))))
    return grouped.decoder(c, [layer] * c["num_hidden_layers"], norm)


def _later(c: Values, attentions: list[spec.Attention], norm: spec.RMSNorm) -> spec.Model:
    network = grouped.feed_forward(c)
    layers = [
        spec.Layer(steps=(parts.pre(None, attention, post=norm), parts.pre(None, network, post=norm)))
        for attention in attentions
    ]
    return grouped.decoder(c, layers, norm)


def _olmo2(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both = spec.QueryKeyNorm(norm=norm, over="width")
    attention = grouped.attention(c, spec.Causal(), bias=parts.biases(c["attention_bias"]), query_key_norm=both)
    return _later(c, [attention] * c["num_hidden_layers"], norm)


def _olmo3(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    masks = grouped.masks(c, [(index + 1) % 4 != 0 for index in range(c["num_hidden_layers"])])
    size = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    rotation = kinds.rotations(c, head_size=size, full=c["rope_theta"], sliding=THETA)
    attentions = [
        grouped.attention(
            c,
            mask,
            bias=parts.biases(c["attention_bias"]),
            query_key_norm=spec.QueryKeyNorm(norm=norm, over="width"),
            position=rotation[kinds.KINDS[isinstance(mask, spec.Window)]],
        )
        for mask in masks
    ]
    return _later(c, attentions, norm)


THETA = 500000.0
KEYS = (
    *parts.defaults(grouped.KEYS, {"vocab_size": 50304, "rms_norm_eps": 1e-5}),
    grouped.ATTENTION_BIAS,
)
RULES = (
    *(rule for rule in grouped.RULES if "layernorm" not in rule.theirs[0]),
    module("layers.{layer}.post_attention_layernorm", f"{parts.branch('decoder', 0)}.post"),
    module("layers.{layer}.post_feedforward_layernorm", f"{parts.branch('decoder', 1)}.post"),
)
LATER = (
    # The nested object says what the older keys say, and what only it can say.
    Key("rope_theta", THETA),
    Key("rope_scaling", None, kind=dict),
    Key("rope_parameters", None, kinds.written, kind=dict),
    *kinds.among(
        kinds.sees_all, *(key for key in rope.keys(THETA, SELF, 2048) if key.name == "max_position_embeddings")
    ),
    Key("sliding_window", 4096, grouped.window, is_nullable=True),
    Key("layer_types", None, grouped.layer_types, kind=list),
)


def _classes(name: str, *tasks: str) -> tuple[Variant, ...]:
    return tuple(one for one in grouped.variants(name) if one.task in tasks)


RECORDS = (
    grouped.record(
        "olmo",
        "Olmo",
        (*grouped.without(KEYS, "rms_norm_eps"), Key("clip_qkv", None, f"{SELF}.clip", kind=float)),
        _olmo,
        classes=_classes("Olmo", "generate", "classify", "embed"),
        inert=("layer_norm_eps",),
    ),
    grouped.record(
        "olmo2", "Olmo2", KEYS, _olmo2, rules=RULES, classes=_classes("Olmo2", "generate", "classify", "embed")
    ),
    grouped.record(
        "olmo3",
        "Olmo3",
        grouped.replaced(KEYS, *LATER),
        _olmo3,
        rules=RULES,
        classes=_classes("Olmo3", "generate", "classify", "embed"),
    ),
)
