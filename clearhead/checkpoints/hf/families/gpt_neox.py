"""GPT-NeoX: attention and feed-forward network in parallel, each after its own norm; part of a head is rotated.

Source: arXiv 2204.06745, section 2.1; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, rope
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import GroupedQKV, Rule, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.FEED_FORWARD


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["hidden_size"], c["num_attention_heads"], c["hidden_dropout"]
    norm = spec.LayerNorm(eps=c["layer_norm_eps"])
    rope_config, share = c["rope_scaling"] or c["rope_parameters"] or {}, c["rotary_pct"]
    position = rope.rotary(
        rope_config, c, theta=c["rotary_emb_base"], head_size=width // heads, partial=share, is_partial=True
    )
    attention = blocks.attention(
        width,
        heads,
        mask=spec.Causal(),
        position=position,
        bias=blocks.biases(c["attention_bias"]),
        dropout=c["attention_dropout"],
    )
    network = spec.FeedForward(size=c["intermediate_size"], activation=c["hidden_act"])
    if c["use_parallel_residual"]:
        layer = blocks.parallel(norm, attention, network, dropout=drop, is_shared=False)
    else:
        layer = blocks.layer(norm, attention, network, dropout=drop)
    layers = [layer] * c["num_hidden_layers"]
    return blocks.one_stack("decoder", width, c["vocab_size"], layers, norm, dropout=drop)


KEYS = (
    Key("vocab_size", 50432, "decoder.embedding.table.rows"),
    Key("hidden_size", 6144, "decoder.width"),
    Key("num_hidden_layers", 44, blocks.count_layers("decoder")),
    Key("num_attention_heads", 64, f"{SELF}.num_heads"),
    Key("intermediate_size", 24576, f"{FEED}.size"),
    Key("hidden_act", "gelu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("hidden_dropout", 0.0, "decoder.embedding.dropout"),
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("use_parallel_residual", True, blocks.is_parallel),
    Key("attention_bias", True, f"{SELF}.bias.query"),
    Key("rotary_emb_base", 10000.0, f"{SELF}.position.theta"),
    Key("rotary_pct", 0.25, rope.rotary_share(SELF)),
    *blocks.derive(rope.keys(10000.0, SELF, 2048), {}, without=("rope_theta",)),
    blocks.tying(False),
)


def _network_rules(branch: str) -> tuple[Rule, ...]:
    return (
        module_rule("layers.{layer}.post_attention_layernorm", f"{branch}.pre"),
        module_rule("layers.{layer}.mlp.dense_h_to_4h", f"{branch}.function.up"),
        module_rule("layers.{layer}.mlp.dense_4h_to_h", f"{branch}.function.down"),
    )


ATTENTION = "layers.{layer}.attention"
RULES = (
    module_rule("embed_in", "decoder.embedding.table"),
    module_rule("layers.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule(f"{ATTENTION}.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), GroupedQKV()),
    module_rule(f"{ATTENTION}.dense", f"{SELF}.out"),
    *_network_rules(blocks.branch("decoder", 0, 1)),
    *_network_rules(blocks.branch("decoder", 1)),
    module_rule("final_layer_norm", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="gpt_neox",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("GPTNeoX", output="embed_out"),
        fixed=(blocks.CAUSAL,),
        # A theta under its usual name has no effect in this family.
        inert=("classifier_dropout", "rope_theta", "partial_rotary_factor"),
        prefix="gpt_neox.",
        table="embed_in.weight",
        ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
)
