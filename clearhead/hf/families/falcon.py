"""Falcon: branches side by side, few keys for many queries, and rotation or a penalty by distance.

There are four forms of layer: one shared norm, two norms, and one branch after the other; the two older ones have one
key head or as many as queries. Source: arXiv 2311.16867, section 4; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, llama_like, rope
from clearhead.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.hf.mapping.tensor_rules import Grouped, Rule, module_rule

SELF = blocks.function("decoder", 0)


def _kv_heads(c: Values) -> int:
    """How many keys there are; the older forms have one, or one for each query.

    Raises:
        InputError: choices that no form of layer has.
    """
    heads = c["num_attention_heads"]
    said = c["num_kv_heads"] or heads
    count = c["num_ln_in_parallel_attn"]
    if c["new_decoder_architecture"]:
        if not c["parallel_attn"] or count not in (None, 1, 2):
            raise InputError("config.json: the new form of layer needs parallel_attn = true and one norm or two")
        return int(said)
    if count not in (None, 1):
        raise InputError(f"config.json: the older form of layer has no num_ln_in_parallel_attn = {count}")
    if not c["multi_query"] and said != heads:
        raise InputError(f"config.json: {heads} queries without multi_query need as many num_kv_heads, got {said}")
    return 1 if c["multi_query"] else heads


def _attention(c: Values) -> spec.Attention:
    heads = c["num_attention_heads"]
    size = c["hidden_size"] // heads
    return spec.Attention(
        num_heads=heads,
        num_kv_heads=_kv_heads(c),
        head_size=size,
        mask=spec.Causal(),
        position=None if c["alibi"] else rope.read(c, head_size=size),
        score_bias=spec.Alibi(scaled=True, rounding="bfloat16") if c["alibi"] else None,
        bias=blocks.biases(c["bias"]),
        dropout=c["attention_dropout"],
    )


def _model(c: Values) -> spec.Model:
    width, drop, has_bias = c["hidden_size"], c["hidden_dropout"], c["bias"]
    norm, attention = spec.LayerNorm(eps=c["layer_norm_epsilon"]), _attention(c)
    size = c["ffn_hidden_size"] or 4 * width
    network = spec.FeedForward(size=size, activation=c["activation"], bias_in=has_bias, bias_out=has_bias)
    if not c["parallel_attn"]:
        # The first branch takes the dropout of attention.
        steps: tuple[spec.Step, ...] = (
            blocks.pre(norm, attention, c["attention_dropout"]),
            blocks.pre(norm, network, drop),
        )
    else:
        has_two = c["new_decoder_architecture"] and c["num_ln_in_parallel_attn"] != 1
        own, shared = (norm, None) if has_two else (None, norm)
        branches = tuple(spec.Branch(function=one, pre=own, dropout=drop) for one in (attention, network))
        steps = (spec.Step(branches=branches, pre=shared),)
    embedding = spec.Embedding(table=spec.Table(rows=c["vocab_size"]))
    layers = (spec.Layer(steps=steps),) * c["num_hidden_layers"]
    decoder = spec.Stack(width=width, embedding=embedding, layers=layers, final_norm=norm)
    return spec.Model(decoder=decoder, initialization=blocks.INITIALIZATION)


def _steps(model: spec.Model) -> tuple[spec.Step, ...]:
    assert model.decoder is not None
    return model.decoder.layers[0].steps


def _network(model: spec.Model) -> spec.FeedForward:
    network = _steps(model)[-1].branches[-1].function
    assert isinstance(network, spec.FeedForward)
    return network


def _is_new(model: spec.Model) -> bool:
    """Whether only the new form says the layer: two norms, or a number of keys of its own."""
    steps, node = _steps(model), llama_like.first_attention(model)
    if len(steps) == 2:
        return False
    return steps[0].pre is None or node.num_kv_heads not in (1, node.num_heads)


KEYS = (
    Key("vocab_size", 65024, "decoder.embedding.table.rows"),
    Key("hidden_size", 4544, "decoder.width", aliases=("n_embed",)),
    Key("num_hidden_layers", 32, blocks.count_layers("decoder")),
    Key("num_attention_heads", 71, f"{SELF}.num_heads"),
    Key("num_ln_in_parallel_attn", None, lambda m: (2 if _steps(m)[0].pre is None else 1) if _is_new(m) else None, int),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("hidden_dropout", 0.0, lambda model: _steps(model)[-1].branches[-1].dropout),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("num_kv_heads", None, lambda m: llama_like.first_attention(m).num_kv_heads if _is_new(m) else None, int),
    Key("alibi", False, lambda model: llama_like.first_attention(model).score_bias is not None),
    Key("new_decoder_architecture", False, _is_new),
    Key("multi_query", True, lambda model: llama_like.first_attention(model).num_kv_heads == 1),
    Key("parallel_attn", True, lambda model: len(_steps(model)) == 1),
    Key("bias", False, f"{SELF}.bias.query"),
    Key("ffn_hidden_size", None, lambda model: _network(model).size, kind=int),
    Key("activation", "gelu", lambda model: _network(model).activation, names=blocks.ACTIVATIONS),
    *rope.keys(10000.0, SELF, 2048),
    blocks.tying(True),
)


def _network_rules(branch: str) -> tuple[Rule, ...]:
    return (
        module_rule("h.{layer}.mlp.dense_h_to_4h", f"{branch}.function.up"),
        module_rule("h.{layer}.mlp.dense_4h_to_h", f"{branch}.function.down"),
    )


FIRST, SIDE, SECOND = blocks.branch("decoder", 0), blocks.branch("decoder", 0, 1), blocks.branch("decoder", 1)
RULES = (
    module_rule("word_embeddings", "decoder.embedding.table"),
    module_rule("h.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
    # The first norm of two steps, and of two branches side by side, has one address, but two names.
    module_rule("h.{layer}.input_layernorm", f"{FIRST}.pre", beside=f"{SECOND}.pre.weight"),
    module_rule("h.{layer}.ln_attn", f"{FIRST}.pre"),
    module_rule("h.{layer}.ln_mlp", f"{SIDE}.pre"),
    module_rule("h.{layer}.post_attention_layernorm", f"{SECOND}.pre"),
    module_rule(
        "h.{layer}.self_attention.query_key_value", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Grouped()
    ),
    module_rule("h.{layer}.self_attention.dense", f"{SELF}.out"),
    *_network_rules(SIDE),
    *_network_rules(SECOND),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="falcon",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=(
            blocks.writing("FalconForCausalLM"),
            blocks.classifying("FalconForSequenceClassification"),
            blocks.tagging("FalconForTokenClassification"),
            blocks.answering("FalconForQuestionAnswering"),
            blocks.bare("FalconModel"),
        ),
        only=(
            blocks.CAUSAL,
            Fixed("apply_residual_connection_post_layernorm", (False,), "branches would be added to the normed stream"),
        ),
        # The size of the networks stands in another key, and a head's dropout.
        inert=("ff_factor", "classifier_dropout"),
        prefix="transformer.",
        table="word_embeddings.weight",
        ignored=(r"h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    ),
)
