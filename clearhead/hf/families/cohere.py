"""Command R: both branches of a layer read one norm without bias; neighbours in a head rotate together.

Source: the model card and code of the release (2024); norms of query and key arXiv 2302.05442, section 2. The layout
is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.family import Key, Values
from clearhead.hf.mapping.tensor_rules import Halves, Rule, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 0, 1)


def _model(c: Values) -> spec.Model:
    norm = spec.LayerNorm(eps=c["layer_norm_eps"], bias=False)
    attention = llama_like.attention(
        c,
        spec.Causal(),
        bias=blocks.biases(c["attention_bias"]),
        query_key_norm=spec.QueryKeyNorm(norm=norm, per_head=True) if c["use_qk_norm"] else None,
    )
    branches = tuple(spec.Branch(function=function) for function in (attention, llama_like.feed_forward(c)))
    layer = spec.Layer(steps=(spec.Step(branches=branches, pre=norm),))
    return llama_like.decoder(c, [layer] * c["num_hidden_layers"], norm)


DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
KEYS = (
    *llama_like.replaced(
        llama_like.without(blocks.defaults(llama_like.KEYS, DEFAULTS), "rms_norm_eps"),
        Key("intermediate_size", 22528, f"{FEED}.size"),
        Key("hidden_act", "silu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    ),
    llama_like.ATTENTION_BIAS,
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("use_qk_norm", False, lambda model: llama_like.first_attention(model).query_key_norm is not None),
    Key("logit_scale", 0.0625, "head.layers.0.scale"),
)


def _rules() -> tuple[Rule, ...]:
    usual = {rule.theirs[0].removeprefix("layers.{layer}."): rule for rule in llama_like.RULES}
    for gone in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        del usual[gone]
    usual["input_layernorm"] = module_rule("layers.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre")
    for name, ours in (("q", "query"), ("k", "key")):
        usual[f"self_attn.{name}_proj"] = module_rule(
            f"layers.{{layer}}.self_attn.{name}_proj", f"{SELF}.{ours}", Halves()
        )
        norm = module_rule(f"layers.{{layer}}.self_attn.{name}_norm", f"{SELF}.{ours}_norm", Halves(axis=1))
        usual[f"self_attn.{name}_norm"] = norm
    network = (module_rule(f"layers.{{layer}}.mlp.{name}_proj", f"{FEED}.{name}") for name in ("gate", "up", "down"))
    return (*usual.values(), *network)


WORDS = blocks.words("decoder.embedding.table", scale=lambda c: float(c["logit_scale"]))

FAMILIES = (
    llama_like.record(
        "cohere",
        "Cohere",
        KEYS,
        _model,
        rules=_rules(),
        classes=tuple(one for one in llama_like.variants("Cohere", words=WORDS) if one.task in ("generate", "embed")),
        inert=("pretraining_tp", "model_max_length"),
    ),
)
