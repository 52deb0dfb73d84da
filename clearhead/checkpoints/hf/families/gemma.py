"""Gemma, Gemma 2 and Gemma 3: norms that multiply by 1 + weight, and a scaled and tied token embedding.

Source: arXiv 2403.08295, section 2; arXiv 2408.00118, section 2; arXiv 2503.19786, section 2; tensor names are those
of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like
from clearhead.checkpoints.hf.mapping.family import Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED, ROPE_KEYS, SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule

TANH = {"gelu_pytorch_tanh": "gelu_tanh"} | blocks.ACTIVATIONS
# In early files of the first release, "gelu" means the tanh approximation.
EARLY = TANH | {"gelu": "gelu_tanh"}
UNIDIRECTIONAL = Fixed("use_bidirectional_attention", (None, False), "bidirectional attention is not supported")


def _norm(c: Values) -> spec.RMSNorm:
    return spec.RMSNorm(eps=c["rms_norm_eps"], unit_offset=True)


def _decoder(c: Values, layers: list[spec.Layer]) -> spec.Model:
    return blocks.one_stack(
        "decoder",
        c["hidden_size"],
        c["vocab_size"],
        layers,
        _norm(c),
        scale=c["hidden_size"] ** 0.5,
        scale_rounding="weights",
    )


def _gemma(c: Values) -> spec.Model:
    layer = blocks.layer(_norm(c), llama_like.attention(c), llama_like.feed_forward(c))
    return _decoder(c, [layer] * c["num_hidden_layers"])


def _later(c: Values, attentions: list[spec.Attention]) -> spec.Model:
    network, norm = llama_like.feed_forward(c, act="hidden_activation"), _norm(c)
    return _decoder(c, [blocks.layer(norm, attention, network, post=norm) for attention in attentions])


def _gemma2(c: Values) -> spec.Model:
    masks = llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])])
    scale, cap = c["query_pre_attn_scalar"] ** -0.5, c["attn_logit_softcapping"]
    return _later(c, [llama_like.attention(c, mask=mask, scale=scale, soft_cap=cap) for mask in masks])


def _gemma3(c: Values) -> spec.Model:
    every = c["sliding_window_pattern"]
    masks = llama_like.masks(c, [(index + 1) % every != 0 for index in range(c["num_hidden_layers"])])
    size, theta = llama_like.head_size(c), c["rope_theta"]
    positions = layer_types.rotations(c, head_size=size, full=theta, sliding=c["rope_local_base_freq"])
    attentions = [
        llama_like.attention(
            c,
            mask=mask,
            scale=c["query_pre_attn_scalar"] ** -0.5,
            query_key_norm=spec.QueryKeyNorm(norm=_norm(c)),
            position=positions[isinstance(mask, spec.Window)],
        )
        for mask in masks
    ]
    return _later(c, attentions)


DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SECOND = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
THIRD = SECOND | {"vocab_size": 262208, "rope_theta": 1000000.0, "max_position_embeddings": 131072}
LATER_KEYS = (
    llama_like.ATTENTION_BIAS,
    Key("hidden_activation", "gelu_pytorch_tanh", f"{FEED}.activation", names=TANH),
    Key("query_pre_attn_scalar", 256, lambda model: round(llama_like.scale(model) ** -2)),
    Key("sliding_window", 4096, llama_like.window, is_nullable=True),
    llama_like.LAYER_TYPES,
)
KEYS = llama_like.keys(DEFAULTS)
ROTATIONS = Key("rope_parameters", None, kind=layer_types.Rotations)
THIRD_KEYS = blocks.derive(KEYS, THIRD, *LATER_KEYS, ROTATIONS, without=("hidden_act",))
SOFT_CAP = blocks.in_head(spec.SoftCap, "value")
LATER_RULES = (
    *llama_like.rules_without("post_attention"),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 0)}.post"),
    module_rule("layers.{layer}.pre_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("layers.{layer}.post_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.post"),
)

FAMILIES = (
    llama_like.family(
        "gemma",
        "Gemma",
        blocks.derive(
            KEYS,
            {},
            Key("hidden_act", "gelu_pytorch_tanh", f"{FEED}.activation", names=EARLY),
            llama_like.ATTENTION_BIAS,
        ),
        _gemma,
        fixed=(
            UNIDIRECTIONAL,
            Fixed("hidden_activation", (None, "gelu_pytorch_tanh"), "use hidden_act for another activation"),
        ),
    ),
    llama_like.family(
        "gemma2",
        "Gemma2",
        blocks.derive(
            KEYS,
            SECOND,
            *LATER_KEYS,
            Key("attn_logit_softcapping", 50.0, f"{SELF}.soft_cap", is_nullable=True),
            Key("final_logit_softcapping", 30.0, SOFT_CAP, is_nullable=True),
            without=("hidden_act",),
        ),
        _gemma2,
        rules=LATER_RULES,
        fixed=(UNIDIRECTIONAL,),
        inert=("hidden_act", "cache_implementation"),
    ),
    llama_like.family(
        "gemma3_text",
        "Gemma3Text",
        (
            *(key for key in THIRD_KEYS if key.name not in ROPE_KEYS),
            *layer_types.only_in(layer_types.is_full, *(key for key in THIRD_KEYS if key.name in ROPE_KEYS)),
            *layer_types.only_in(
                layer_types.is_sliding, Key("rope_local_base_freq", 10000.0, f"{SELF}.position.theta")
            ),
            Key("sliding_window_pattern", 6),
            Key("final_logit_softcapping", None, SOFT_CAP, kind=float),
        ),
        _gemma3,
        rules=LATER_RULES,
        variants=(
            *blocks.decoder_variants("Gemma3", "generate"),
            *blocks.decoder_variants("Gemma3Text", "classify", "embed"),
        ),
        fixed=(UNIDIRECTIONAL, Fixed("attn_logit_softcapping", (None,), "a soft cap on the scores is not supported")),
        inert=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
    ),
)
