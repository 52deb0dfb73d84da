"""Falcon: multi-query or grouped-query attention, with rotary positions or ALiBi.

The new form of layer has parallel branches after one shared norm or after two norms, and any number of key heads. The
older forms are parallel after one norm, or sequential. They have one key head, or one for each query head.

Source: arXiv 2311.16867, section 4; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import GroupedQKV, Rule, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.FEED_FORWARD


def _kv_heads(c: Values) -> int:
    """Return the number of key heads; layers of older Falcon models have one, or one for each query head.

    Raises:
        InputError: no form of layer has this combination of config values.
    """
    heads = c["num_attention_heads"]
    kv_heads = c["num_kv_heads"] or heads
    num_norms = c["num_ln_in_parallel_attn"]
    if c["new_decoder_architecture"]:
        if not c["parallel_attn"] or num_norms not in (None, 1, 2):
            raise InputError("config.json: new_decoder_architecture needs parallel_attn = true and 1 or 2 norms")
        return int(kv_heads)
    if num_norms not in (None, 1):
        raise InputError(f"config.json: num_ln_in_parallel_attn = {num_norms} needs new_decoder_architecture = true")
    if not c["multi_query"] and kv_heads != heads:
        raise InputError(f"config.json: num_kv_heads must be {heads} with multi_query = false, got {kv_heads}")
    return 1 if c["multi_query"] else heads


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["hidden_size"], c["num_attention_heads"], c["hidden_dropout"]
    norm = spec.LayerNorm(eps=c["layer_norm_epsilon"])
    attention = blocks.attention(
        width,
        heads,
        num_kv_heads=_kv_heads(c),
        mask=spec.Causal(),
        position=None if c["alibi"] else rope.read(c, head_size=width // heads),
        score_bias=spec.Alibi(scaled=True, rounding="bfloat16") if c["alibi"] else None,
        bias=blocks.biases(c["bias"]),
        dropout=c["attention_dropout"],
    )
    size = c["ffn_hidden_size"] or 4 * width
    network = spec.FeedForward(size=size, activation=c["activation"], bias_in=c["bias"], bias_out=c["bias"])
    if c["parallel_attn"]:
        has_two_norms = c["new_decoder_architecture"] and c["num_ln_in_parallel_attn"] != 1
        layer = blocks.parallel(norm, attention, network, dropout=drop, is_shared=not has_two_norms)
    else:
        # In the classes, the first branch has the dropout rate of the attention weights.
        first = blocks.pre(norm, attention, c["attention_dropout"])
        layer = spec.Layer(steps=(first, blocks.pre(norm, network, drop)))
    return blocks.one_stack("decoder", width, c["vocab_size"], [layer] * c["num_hidden_layers"], norm)


def _num_norms(model: spec.Model) -> int:
    return 2 if value_at(model, "decoder.layers.0.steps.0.pre") is None else 1


def _kv_heads_of(model: spec.Model) -> int:
    return llama_like.first_attention(model).num_kv_heads


def _is_new(model: spec.Model) -> bool:
    """Return whether a model needs `new_decoder_architecture`: parallel layers with two norms or grouped queries."""
    if not blocks.is_parallel(model):
        return False
    return _num_norms(model) == 2 or _kv_heads_of(model) not in (1, llama_like.first_attention(model).num_heads)


KEYS = (
    Key("vocab_size", 65024, "decoder.embedding.table.rows"),
    Key("hidden_size", 4544, "decoder.width", aliases=("n_embed",)),
    Key("num_hidden_layers", 32, blocks.count_layers("decoder")),
    Key("num_attention_heads", 71, f"{SELF}.num_heads"),
    Key("num_ln_in_parallel_attn", None, lambda model: _num_norms(model) if _is_new(model) else None, int),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("hidden_dropout", 0.0, "decoder.layers.0.steps.-1.branches.-1.dropout"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("num_kv_heads", None, lambda model: _kv_heads_of(model) if _is_new(model) else None, int),
    Key("alibi", False, lambda model: llama_like.first_attention(model).score_bias is not None),
    Key("new_decoder_architecture", False, _is_new),
    Key("multi_query", True, lambda model: _kv_heads_of(model) == 1),
    Key("parallel_attn", True, blocks.is_parallel),
    Key("bias", False, f"{SELF}.bias.query"),
    Key("ffn_hidden_size", None, f"{FEED}.size", kind=int),
    Key("activation", "gelu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    *rope.keys(10000.0, SELF, 2048),
    blocks.tying(True),
)


def _network_rules(branch: str) -> tuple[Rule, ...]:
    return (
        module_rule("h.{layer}.mlp.dense_h_to_4h", f"{branch}.function.up"),
        module_rule("h.{layer}.mlp.dense_4h_to_h", f"{branch}.function.down"),
    )


FIRST, PARALLEL, SECOND = blocks.branch("decoder", 0), blocks.branch("decoder", 0, 1), blocks.branch("decoder", 1)
ATTENTION = "h.{layer}.self_attention"
RULES = (
    module_rule("word_embeddings", "decoder.embedding.table"),
    module_rule("h.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
    # The first norm has one address in sequential layers and in parallel layers with two norms, but two names.
    module_rule("h.{layer}.input_layernorm", f"{FIRST}.pre", requires=f"{SECOND}.pre.weight"),
    module_rule("h.{layer}.ln_attn", f"{FIRST}.pre"),
    module_rule("h.{layer}.ln_mlp", f"{PARALLEL}.pre"),
    module_rule("h.{layer}.post_attention_layernorm", f"{SECOND}.pre"),
    module_rule(f"{ATTENTION}.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), GroupedQKV()),
    module_rule(f"{ATTENTION}.dense", f"{SELF}.out"),
    *_network_rules(PARALLEL),
    *_network_rules(SECOND),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="falcon",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("Falcon"),
        fixed=(blocks.CAUSAL, blocks.RESIDUAL_BEFORE_NORM),
        # The size of the feed-forward networks is read from another key. The other key is the dropout of a head.
        inert=("ff_factor", "classifier_dropout"),
        prefix="transformer.",
        table="word_embeddings.weight",
        ignored=(r"h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    ),
)
