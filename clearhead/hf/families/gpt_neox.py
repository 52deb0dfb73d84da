"""GPT-NeoX: both branches of a layer read the stream side by side, each through its own norm; part of a head rotates.

Source: arXiv 2204.06745, section 2.1; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, rope
from clearhead.hf.mapping.family import Family, Key, Values
from clearhead.hf.mapping.tensor_rules import Grouped, Rule, module_rule

SELF, SIDE, FEED = blocks.function("decoder", 0), blocks.function("decoder", 0, 1), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["hidden_size"], c["num_attention_heads"], c["hidden_dropout"]
    norm = spec.LayerNorm(eps=c["layer_norm_eps"])
    given = c["rope_scaling"] or c["rope_parameters"] or {}
    attention = spec.Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        mask=spec.Causal(),
        position=rope.rotary(
            given,
            c,
            theta=c["rotary_emb_base"],
            head_size=width // heads,
            partial=c["rotary_pct"],
            is_partial=True,
        ),
        bias=blocks.biases(c["attention_bias"]),
        dropout=c["attention_dropout"],
    )
    network = spec.FeedForward(size=c["intermediate_size"], activation=c["hidden_act"])
    branches = tuple(spec.Branch(function=function, pre=norm, dropout=drop) for function in (attention, network))
    beside = (spec.Step(branches=branches),)
    steps = beside if c["use_parallel_residual"] else tuple(spec.Step(branches=(one,)) for one in branches)
    embedding = spec.Embedding(table=spec.Table(rows=c["vocab_size"]), dropout=drop)
    layers = (spec.Layer(steps=steps),) * c["num_hidden_layers"]
    decoder = spec.Stack(width=width, embedding=embedding, layers=layers, final_norm=norm)
    return spec.Model(decoder=decoder, initialization=blocks.INITIALIZATION)


def _is_parallel(model: spec.Model) -> bool:
    return model.decoder is not None and len(model.decoder.layers[0].steps) == 1


def _network(model: spec.Model) -> spec.FeedForward:
    assert model.decoder is not None
    network = model.decoder.layers[0].steps[-1].branches[-1].function
    assert isinstance(network, spec.FeedForward)
    return network


KEYS = (
    Key("vocab_size", 50432, "decoder.embedding.table.rows"),
    Key("hidden_size", 6144, "decoder.width"),
    Key("num_hidden_layers", 44, blocks.count_layers("decoder")),
    Key("num_attention_heads", 64, f"{SELF}.num_heads"),
    Key("intermediate_size", 24576, lambda model: _network(model).size),
    Key("hidden_act", "gelu", lambda model: _network(model).activation, names=blocks.ACTIVATIONS),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("hidden_dropout", 0.0, "decoder.embedding.dropout"),
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("use_parallel_residual", True, _is_parallel),
    Key("attention_bias", True, f"{SELF}.bias.query"),
    Key("rotary_emb_base", 10000.0, f"{SELF}.position.theta"),
    Key("rotary_pct", 0.25, rope.share(SELF)),
    *(key for key in rope.keys(10000.0, SELF, 2048) if key.name != "rope_theta"),
    blocks.tying(False),
)


def _network_rules(branch: str) -> tuple[Rule, ...]:
    return (
        module_rule("layers.{layer}.post_attention_layernorm", f"{branch}.pre"),
        module_rule("layers.{layer}.mlp.dense_h_to_4h", f"{branch}.function.up"),
        module_rule("layers.{layer}.mlp.dense_4h_to_h", f"{branch}.function.down"),
    )


RULES = (
    module_rule("embed_in", "decoder.embedding.table"),
    module_rule("layers.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule(
        "layers.{layer}.attention.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Grouped()
    ),
    module_rule("layers.{layer}.attention.dense", f"{SELF}.out"),
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
        variants=(
            blocks.writing("GPTNeoXForCausalLM", output="embed_out"),
            blocks.classifying("GPTNeoXForSequenceClassification"),
            blocks.tagging("GPTNeoXForTokenClassification"),
            blocks.answering("GPTNeoXForQuestionAnswering"),
            blocks.bare("GPTNeoXModel"),
        ),
        # A theta under its usual name has no effect in this family; one that differs from the family's own misleads.
        only=(blocks.CAUSAL,),
        inert=("classifier_dropout", "rope_theta", "partial_rotary_factor"),
        prefix="gpt_neox.",
        table="embed_in.weight",
        ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
)
