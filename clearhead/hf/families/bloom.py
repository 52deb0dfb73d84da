"""BLOOM: a penalty by distance in place of positions, and a norm on the word vectors.

Source: arXiv 2211.05100, section 3.2.3; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.hf.mapping.tensor_rules import Grouped, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["hidden_size"], c["n_head"], c["hidden_dropout"]
    norm = spec.LayerNorm(eps=c["layer_norm_epsilon"])
    attention = spec.Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        mask=spec.Causal(),
        score_bias=spec.Alibi(),
        dropout=c["attention_dropout"],
    )
    network = spec.FeedForward(size=4 * width, activation="gelu_tanh")
    layer = spec.Layer(steps=(blocks.pre(norm, attention, drop), blocks.pre(norm, network, drop)))
    decoder = spec.Stack(
        width=width,
        embedding=spec.Embedding(table=spec.Table(rows=c["vocab_size"]), norm=norm),
        layers=(layer,) * c["n_layer"],
        final_norm=norm,
    )
    return spec.Model(decoder=decoder, initialization=blocks.INITIALIZATION)


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

RULES = (
    module_rule("word_embeddings", "decoder.embedding.table"),
    module_rule("word_embeddings_layernorm", "decoder.embedding.norm"),
    module_rule("h.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule(
        "h.{layer}.self_attention.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Grouped()
    ),
    module_rule("h.{layer}.self_attention.dense", f"{SELF}.out"),
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
        variants=(
            blocks.writing("BloomForCausalLM"),
            blocks.classifying("BloomForSequenceClassification"),
            blocks.tagging("BloomForTokenClassification"),
            blocks.answering("BloomForQuestionAnswering"),
            blocks.bare("BloomModel"),
        ),
        only=(
            blocks.CAUSAL,
            Fixed("apply_residual_connection_post_layernorm", (False,), "branches would be added to the normed stream"),
            Fixed("slow_but_exact", (False,), "the outputs of branches would lose their biases"),
            Fixed("n_inner", (None,), "the networks would have another size"),
        ),
        # The length of training, how the model was once split and computed, and the dropout of a head.
        inert=(
            "seq_length", "offset_alibi", "pretraining_tp", "attention_softmax_in_fp32", "masked_softmax_fusion",
            "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "classifier_dropout",
        ),
        prefix="transformer.",
        table="word_embeddings.weight",
    ),
)  # fmt: skip
