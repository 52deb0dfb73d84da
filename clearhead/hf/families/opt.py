"""OPT: learned positions from the third row on, the norm before or after a branch, words narrower than the stream.

Source: arXiv 2205.01068, section 2.1; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Key, Values
from clearhead.hf.mapping.tensor_rules import module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["hidden_size"], c["num_attention_heads"], c["dropout"]
    has_bias, is_affine, is_pre = c["enable_bias"], c["layer_norm_elementwise_affine"], c["do_layer_norm_before"]
    norm = spec.LayerNorm(eps=1e-5, weight=is_affine, bias=is_affine)
    attention = spec.Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        mask=spec.Causal(),
        bias=blocks.biases(has_bias),
        dropout=c["attention_dropout"],
    )
    network = spec.FeedForward(
        size=c["ffn_dim"], activation=c["activation_function"], bias_in=has_bias, bias_out=has_bias
    )
    step = blocks.pre if is_pre else blocks.after
    own = c["word_embed_proj_dim"] or width
    embedding = spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        width=None if own == width else own,
        projection=None if own == width else spec.Projection(place="before_sum", bias=False),
        position=spec.Learned(rows=c["max_position_embeddings"] + 2, offset=2),
    )
    decoder = spec.Stack(
        width=width,
        embedding=embedding,
        layers=(spec.Layer(steps=(step(norm, attention, drop), step(norm, network, drop))),) * c["num_hidden_layers"],
        final_norm=norm if is_pre and not c["_remove_final_layer_norm"] else None,
        projection_out=None if own == width else spec.OutProjection(size=own),
    )
    return spec.Model(decoder=decoder, initialization=blocks.INITIALIZATION)


def _norm(model: spec.Model) -> spec.LayerNorm:
    assert model.decoder is not None
    step = model.decoder.layers[0].steps[0]
    norm = step.out or step.branches[0].pre
    assert isinstance(norm, spec.LayerNorm)
    return norm


def _is_pre(model: spec.Model) -> bool:
    return model.decoder is not None and model.decoder.layers[0].steps[0].out is None


def _positions(model: spec.Model) -> int:
    assert model.decoder is not None and isinstance(model.decoder.embedding.position, spec.Learned)
    return model.decoder.embedding.position.rows - 2


KEYS = (
    Key("vocab_size", 50272, "decoder.embedding.table.rows"),
    Key("hidden_size", 768, "decoder.width"),
    Key("num_hidden_layers", 12, blocks.count_layers("decoder")),
    Key("ffn_dim", 3072, f"{FEED}.size"),
    Key("max_position_embeddings", 2048, _positions),
    Key("do_layer_norm_before", True, _is_pre),
    Key(
        "_remove_final_layer_norm",
        False,
        lambda model: _is_pre(model) and model.decoder is not None and model.decoder.final_norm is None,
    ),
    Key("word_embed_proj_dim", None, "decoder.table_width", kind=int),
    Key("dropout", 0.1, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("num_attention_heads", 12, f"{SELF}.num_heads"),
    Key("activation_function", "relu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("enable_bias", True, f"{SELF}.bias.query"),
    Key("layer_norm_elementwise_affine", True, lambda model: _norm(model).weight),
    blocks.tying(True),
)

RULES = (
    module_rule("decoder.embed_tokens", "decoder.embedding.table"),
    module_rule("decoder.embed_positions", "decoder.embedding.position"),
    module_rule("decoder.project_in", "decoder.embedding.projection"),
    *(
        module_rule(f"decoder.layers.{{layer}}.self_attn.{theirs}_proj", f"{SELF}.{ours}")
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out"))
    ),
    *(
        rule
        for index, name in enumerate(("self_attn_layer_norm", "final_layer_norm"))
        for rule in (
            module_rule(f"decoder.layers.{{layer}}.{name}", f"{blocks.branch('decoder', index)}.pre"),
            module_rule(f"decoder.layers.{{layer}}.{name}", blocks.out("decoder", index)),
        )
    ),
    module_rule("decoder.layers.{layer}.fc1", f"{FEED}.up"),
    module_rule("decoder.layers.{layer}.fc2", f"{FEED}.down"),
    module_rule("decoder.final_layer_norm", "decoder.final_norm"),
    module_rule("decoder.project_out", "decoder.projection_out"),
)

FAMILIES = (
    Family(
        model_type="opt",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=(
            blocks.writing("OPTForCausalLM"),
            blocks.classifying("OPTForSequenceClassification"),
            blocks.answering("OPTForQuestionAnswering"),
            blocks.bare("OPTModel"),
        ),
        only=(blocks.CAUSAL,),
        # How fresh weights are drawn, and a dropout that no class applies.
        inert=("init_std", "activation_dropout"),
        prefix="model.",
        table="decoder.embed_tokens.weight",
    ),
)
