"""BLOOM: ALiBi in place of positions, and a norm after the token embedding.

Source: arXiv 2211.05100, section 3.2.3; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import GroupedQKV, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, norm, drop = c["hidden_size"], spec.LayerNorm(eps=c["layer_norm_epsilon"]), c["attention_dropout"]
    attention = blocks.attention(width, c["n_head"], mask=spec.Causal(), score_bias=spec.Alibi(), dropout=drop)
    network = spec.FeedForward(size=4 * width, activation="gelu_tanh")
    layer = blocks.layer(norm, attention, network, dropout=c["hidden_dropout"])
    return blocks.one_stack("decoder", width, c["vocab_size"], [layer] * c["n_layer"], norm, norm=norm)


KEYS = (
    Key("vocab_size", 250880, "decoder.embedding.table.rows"),
    Key("hidden_size", 64, "decoder.width", aliases=("n_embed",)),
    Key("n_layer", 2, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("n_head", 8, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("hidden_dropout", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    blocks.tying(True),
)
ATTENTION = "h.{layer}.self_attention"
RULES = (
    module_rule("word_embeddings", "decoder.embedding.table"),
    module_rule("word_embeddings_layernorm", "decoder.embedding.norm"),
    module_rule("h.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule(f"{ATTENTION}.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), GroupedQKV()),
    module_rule(f"{ATTENTION}.dense", f"{SELF}.out"),
    module_rule("h.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("h.{layer}.mlp.dense_h_to_4h", f"{FEED}.up"),
    module_rule("h.{layer}.mlp.dense_4h_to_h", f"{FEED}.down"),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="bloom",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("Bloom"),
        fixed=(
            blocks.CAUSAL,
            blocks.RESIDUAL_BEFORE_NORM,
            Fixed("slow_but_exact", (False,), "computation split over tensor-parallel ranks is not supported"),
            Fixed("n_inner", (None,), "another size of the feed-forward networks is not supported"),
        ),
        # Length and sharding in training, fused kernels, and the dropout of a head.
        inert=(
            "seq_length", "offset_alibi", "pretraining_tp", "attention_softmax_in_fp32", "masked_softmax_fusion",
            "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "classifier_dropout",
        ),
        prefix="transformer.",
        table="word_embeddings.weight",
    ),
)  # fmt: skip
