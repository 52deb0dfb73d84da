"""Command R: parallel attention and feed-forward network after one norm without bias; RoPE rotates adjacent pairs.

Source: the model card and code of the release (2024); norms of query and key arXiv 2302.05442, section 2. Tensor names
are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import RotaryHalves, Rule, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 0, 1)


def _model(c: Values) -> spec.Model:
    norm = spec.LayerNorm(eps=c["layer_norm_eps"], bias=False)
    both = spec.QueryKeyNorm(norm=norm, per_head=True) if c["use_qk_norm"] else None
    layer = blocks.parallel(norm, llama_like.attention(c, query_key_norm=both), llama_like.feed_forward(c))
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
KEYS = llama_like.keys(
    DEFAULTS,
    Key("intermediate_size", 22528, f"{FEED}.size"),
    Key("hidden_act", "silu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    llama_like.ATTENTION_BIAS,
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("use_qk_norm", False, llama_like.has_query_key_norm),
    Key("logit_scale", 0.0625, "head.layers.0.scale"),
    without=("rms_norm_eps",),
)


def _rules() -> tuple[Rule, ...]:
    attention = "layers.{layer}.self_attn"
    rotated = (("q", "query"), ("k", "key"))
    return (
        *llama_like.rules_without("layernorm", ".mlp.", "q_proj", "k_proj", "q_norm", "k_norm"),
        module_rule("layers.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
        *(module_rule(f"{attention}.{name}_proj", f"{SELF}.{ours}", RotaryHalves()) for name, ours in rotated),
        *(
            module_rule(f"{attention}.{name}_norm", f"{SELF}.{ours}_norm", RotaryHalves(axis=1))
            for name, ours in rotated
        ),
        *(module_rule(f"layers.{{layer}}.mlp.{name}_proj", f"{FEED}.{name}") for name in ("gate", "up", "down")),
    )


HEAD = blocks.lm_head("decoder.embedding.table", scale=lambda c: float(c["logit_scale"]))

FAMILIES = (
    llama_like.family(
        "cohere",
        "Cohere",
        KEYS,
        _model,
        rules=_rules(),
        variants=blocks.decoder_variants("Cohere", "generate", "embed", head=HEAD),
        inert=("pretraining_tp", "model_max_length"),
    ),
)
