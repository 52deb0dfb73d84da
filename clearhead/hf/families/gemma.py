"""Gemma, 2 and 3: norms that multiply by one more than their weight, scaled word vectors, tied words.

Source: arXiv 2403.08295, section 2; arXiv 2408.00118, section 2; arXiv 2503.19786, section 2; the layout is that of
the published files.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.hf.mapping import blocks, layer_types, llama_like
from clearhead.hf.mapping.family import Fixed, Key, Values, Variant
from clearhead.hf.mapping.llama_like import FEED, SELF
from clearhead.hf.mapping.tensor_rules import module_rule

TANH = {"gelu_pytorch_tanh": "gelu_tanh"} | blocks.ACTIVATIONS
# The word "gelu" in early files of the first release means the tanh form.
EARLY = TANH | {"gelu": "gelu_tanh"}
FORWARD = Fixed("use_bidirectional_attention", (None, False), "tokens would see what is after them")


def _norm(c: Values) -> spec.RMSNorm:
    return spec.RMSNorm(eps=c["rms_norm_eps"], unit_offset=True)


def _gemma(c: Values) -> spec.Model:
    norm = _norm(c)
    attention = llama_like.attention(c, spec.Causal(), bias=blocks.biases(c["attention_bias"]))
    steps = (blocks.pre(norm, attention), blocks.pre(norm, llama_like.feed_forward(c)))
    layers = [spec.Layer(steps=steps)] * c["num_hidden_layers"]
    return llama_like.decoder(c, layers, norm, scale=c["hidden_size"] ** 0.5, rounding="weights")


def _gemma2(c: Values) -> spec.Model:
    norm = _norm(c)
    masks = llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])])
    network = llama_like.feed_forward(c, act="hidden_activation")

    def layer(mask: llama_like.Mask) -> spec.Layer:
        attention = llama_like.attention(
            c,
            mask,
            bias=blocks.biases(c["attention_bias"]),
            scale=c["query_pre_attn_scalar"] ** -0.5,
            soft_cap=c["attn_logit_softcapping"],
        )
        return spec.Layer(steps=(blocks.pre(norm, attention, post=norm), blocks.pre(norm, network, post=norm)))

    layers = [layer(mask) for mask in masks]
    return llama_like.decoder(c, layers, norm, scale=c["hidden_size"] ** 0.5, rounding="weights")


def _gemma3(c: Values) -> spec.Model:
    norm, every = _norm(c), c["sliding_window_pattern"]
    masks = llama_like.masks(c, [(index + 1) % every != 0 for index in range(c["num_hidden_layers"])])
    network = llama_like.feed_forward(c, act="hidden_activation")
    full, sliding = c["rope_theta"], c["rope_local_base_freq"]
    rotation = layer_types.rotations(
        c, head_size=c["head_dim"] or c["hidden_size"] // c["num_attention_heads"], full=full, sliding=sliding
    )

    def layer(mask: llama_like.Mask) -> spec.Layer:
        attention = llama_like.attention(
            c,
            mask,
            bias=blocks.biases(c["attention_bias"]),
            scale=c["query_pre_attn_scalar"] ** -0.5,
            query_key_norm=spec.QueryKeyNorm(norm=norm),
            position=rotation[layer_types.KINDS[isinstance(mask, spec.Window)]],
        )
        return spec.Layer(steps=(blocks.pre(norm, attention, post=norm), blocks.pre(norm, network, post=norm)))

    layers = [layer(mask) for mask in masks]
    return llama_like.decoder(c, layers, norm, scale=c["hidden_size"] ** 0.5, rounding="weights")


def _words(c: Values) -> spec.Head:
    head = blocks.words("decoder.embedding.table")(c)
    cap = c["final_logit_softcapping"]
    return head if cap is None else spec.Head(layers=(*head.layers, spec.SoftCap(value=cap)))


def _cap(model: spec.Model) -> float | None:
    last = model.head.layers[-1] if model.head else None
    return last.value if isinstance(last, spec.SoftCap) else None


def _third() -> tuple[Variant, ...]:
    usual = {one.task: one for one in llama_like.variants("Gemma3Text", words=_words)}
    words = replace(usual["generate"], classes=("Gemma3ForCausalLM",))
    return words, usual["classify"], usual["embed"]


KEYS = (
    *blocks.defaults(
        llama_like.KEYS,
        {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    llama_like.ATTENTION_BIAS,
)
SECOND = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
THIRD = SECOND | {"vocab_size": 262208, "rope_theta": 1000000.0, "max_position_embeddings": 131072}
ROTATION = ("rope_theta", "rope_scaling", "max_position_embeddings")
THIRD_KEYS = blocks.defaults(llama_like.without(KEYS, "hidden_act"), THIRD)
RULES2 = (
    *(rule for rule in llama_like.RULES if "post_attention" not in rule.theirs[0]),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 0)}.post"),
    module_rule("layers.{layer}.pre_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("layers.{layer}.post_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.post"),
)

FAMILIES = (
    llama_like.record(
        "gemma",
        "Gemma",
        llama_like.replaced(KEYS, Key("hidden_act", "gelu_pytorch_tanh", f"{FEED}.activation", names=EARLY)),
        _gemma,
        only=(FORWARD, Fixed("hidden_activation", (None, "gelu_pytorch_tanh"), "the networks would differ")),
    ),
    llama_like.record(
        "gemma2",
        "Gemma2",
        (
            *blocks.defaults(llama_like.without(KEYS, "hidden_act"), SECOND),
            Key("hidden_activation", "gelu_pytorch_tanh", f"{FEED}.activation", names=TANH),
            Key("query_pre_attn_scalar", 256, lambda model: round(llama_like.scale(model) ** -2)),
            Key("sliding_window", 4096, llama_like.window, is_nullable=True),
            Key("layer_types", None, llama_like.layer_types, kind=list),
            Key("attn_logit_softcapping", 50.0, f"{SELF}.soft_cap", is_nullable=True),
            Key("final_logit_softcapping", 30.0, _cap, is_nullable=True),
        ),
        _gemma2,
        rules=RULES2,
        classes=llama_like.variants("Gemma2", words=_words),
        only=(FORWARD,),
        inert=("hidden_act", "cache_implementation"),
    ),
    llama_like.record(
        "gemma3_text",
        "Gemma3Text",
        (
            *llama_like.without(THIRD_KEYS, *ROTATION),
            *layer_types.among(layer_types.sees_all, *(key for key in THIRD_KEYS if key.name in ROTATION)),
            *layer_types.among(layer_types.slides, Key("rope_local_base_freq", 10000.0, f"{SELF}.position.theta")),
            Key("hidden_activation", "gelu_pytorch_tanh", f"{FEED}.activation", names=TANH),
            Key("query_pre_attn_scalar", 256, lambda model: round(llama_like.scale(model) ** -2)),
            Key("sliding_window", 4096, llama_like.window, is_nullable=True),
            Key("sliding_window_pattern", 6),
            Key("layer_types", None, llama_like.layer_types, kind=list),
            Key("final_logit_softcapping", None, _cap, kind=float),
        ),
        _gemma3,
        rules=RULES2,
        classes=_third(),
        only=(FORWARD, Fixed("attn_logit_softcapping", (None,), "the scores would be bounded")),
        inert=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
    ),
)
