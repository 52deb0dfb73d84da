"""OLMo: norms without weights; OLMo 2: norms after the branches and of query and key; OLMo 3: windows as well.

Source: arXiv 2402.00838, section 2.1; arXiv 2501.00656, section 2.1; the release of OLMo 3 (2025); the layout is that
of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, layer_types, llama_like, rope
from clearhead.hf.mapping.family import Key, Values, Variant
from clearhead.hf.mapping.llama_like import SELF
from clearhead.hf.mapping.tensor_rules import module_rule


def _olmo(c: Values) -> spec.Model:
    norm = spec.LayerNorm(eps=1e-5, weight=False, bias=False)
    attention = llama_like.attention(c, spec.Causal(), bias=blocks.biases(c["attention_bias"]), clip=c["clip_qkv"])
    layer = spec.Layer(steps=(blocks.pre(norm, attention), blocks.pre(norm, llama_like.feed_forward(c))))
    return llama_like.decoder(c, [layer] * c["num_hidden_layers"], norm)


def _later(c: Values, attentions: list[spec.Attention], norm: spec.RMSNorm) -> spec.Model:
    network = llama_like.feed_forward(c)
    layers = [
        spec.Layer(steps=(blocks.pre(None, attention, post=norm), blocks.pre(None, network, post=norm)))
        for attention in attentions
    ]
    return llama_like.decoder(c, layers, norm)


def _olmo2(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both = spec.QueryKeyNorm(norm=norm, over="width")
    attention = llama_like.attention(c, spec.Causal(), bias=blocks.biases(c["attention_bias"]), query_key_norm=both)
    return _later(c, [attention] * c["num_hidden_layers"], norm)


def _olmo3(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    masks = llama_like.masks(c, [(index + 1) % 4 != 0 for index in range(c["num_hidden_layers"])])
    size = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    rotation = layer_types.rotations(c, head_size=size, full=c["rope_theta"], sliding=THETA)
    attentions = [
        llama_like.attention(
            c,
            mask,
            bias=blocks.biases(c["attention_bias"]),
            query_key_norm=spec.QueryKeyNorm(norm=norm, over="width"),
            position=rotation[layer_types.KINDS[isinstance(mask, spec.Window)]],
        )
        for mask in masks
    ]
    return _later(c, attentions, norm)


THETA = 500000.0
KEYS = (
    *blocks.defaults(llama_like.KEYS, {"vocab_size": 50304, "rms_norm_eps": 1e-5}),
    llama_like.ATTENTION_BIAS,
)
RULES = (
    *(rule for rule in llama_like.RULES if "layernorm" not in rule.theirs[0]),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 0)}.post"),
    module_rule("layers.{layer}.post_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.post"),
)
LATER = (
    # The nested object says what the older keys say, and what only it can say.
    Key("rope_theta", THETA),
    Key("rope_scaling", None, kind=dict),
    Key("rope_parameters", None, layer_types.written, kind=dict),
    *layer_types.among(
        layer_types.sees_all,
        *(key for key in rope.keys(THETA, SELF, 2048) if key.name == "max_position_embeddings"),
    ),
    Key("sliding_window", 4096, llama_like.window, is_nullable=True),
    Key("layer_types", None, llama_like.layer_types, kind=list),
)


def _classes(name: str, *tasks: str) -> tuple[Variant, ...]:
    return tuple(one for one in llama_like.variants(name) if one.task in tasks)


FAMILIES = (
    llama_like.record(
        "olmo",
        "Olmo",
        (*llama_like.without(KEYS, "rms_norm_eps"), Key("clip_qkv", None, f"{SELF}.clip", kind=float)),
        _olmo,
        classes=_classes("Olmo", "generate", "classify", "embed"),
        inert=("layer_norm_eps",),
    ),
    llama_like.record(
        "olmo2", "Olmo2", KEYS, _olmo2, rules=RULES, classes=_classes("Olmo2", "generate", "classify", "embed")
    ),
    llama_like.record(
        "olmo3",
        "Olmo3",
        llama_like.replaced(KEYS, *LATER),
        _olmo3,
        rules=RULES,
        classes=_classes("Olmo3", "generate", "classify", "embed"),
    ),
)
