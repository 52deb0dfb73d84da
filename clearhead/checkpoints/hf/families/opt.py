"""OPT: learned positions from the third row on, pre-norm or post-norm layers.

Source: arXiv 2205.01068, section 2.1; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, drop = c["hidden_size"], c["dropout"]
    has_bias, is_affine, is_pre = c["enable_bias"], c["layer_norm_elementwise_affine"], c["do_layer_norm_before"]
    norm = spec.LayerNorm(eps=1e-5, weight=is_affine, bias=is_affine)
    attention = blocks.attention(
        width,
        c["num_attention_heads"],
        mask=spec.Causal(),
        bias=blocks.biases(has_bias),
        dropout=c["attention_dropout"],
    )
    network = spec.FeedForward(
        size=c["ffn_dim"], activation=c["activation_function"], bias_in=has_bias, bias_out=has_bias
    )
    step = blocks.pre if is_pre else blocks.after
    layer = spec.Layer(steps=(step(norm, attention, drop), step(norm, network, drop)))
    if c["word_embed_proj_dim"] not in (None, width):
        raise InputError(
            f"word_embed_proj_dim {c['word_embed_proj_dim']} differs from hidden_size {width}: OPT-350m alone projects "
            "its embedding before the positions and its output after the layers, which clearhead does not"
        )
    return blocks.one_stack(
        "decoder",
        width,
        c["vocab_size"],
        [layer] * c["num_hidden_layers"],
        norm if is_pre and not c["_remove_final_layer_norm"] else None,
        position=spec.Learned(rows=c["max_position_embeddings"] + 2, offset=2),
    )


def _norm(model: spec.Model) -> spec.LayerNorm:
    assert model.decoder is not None
    step = model.decoder.layers[0].steps[0]
    norm = step.out or step.branches[0].pre
    assert isinstance(norm, spec.LayerNorm)
    return norm


def _is_pre(model: spec.Model) -> bool:
    return model.decoder is not None and model.decoder.layers[0].steps[0].out is None


def _lacks_final_norm(model: spec.Model) -> bool:
    return _is_pre(model) and model.decoder is not None and model.decoder.final_norm is None


def _num_positions(model: spec.Model) -> int:
    assert model.decoder is not None and isinstance(model.decoder.embedding.position, spec.Learned)
    return model.decoder.embedding.position.rows - 2


KEYS = (
    Key("vocab_size", 50272, "decoder.embedding.table.rows"),
    Key("hidden_size", 768, "decoder.width"),
    Key("num_hidden_layers", 12, blocks.count_layers("decoder")),
    Key("ffn_dim", 3072, f"{FEED}.size"),
    Key("max_position_embeddings", 2048, _num_positions),
    Key("do_layer_norm_before", True, _is_pre),
    Key("_remove_final_layer_norm", False, _lacks_final_norm),
    Key("word_embed_proj_dim", None, "decoder.table_width", kind=int),
    Key("dropout", 0.1, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("num_attention_heads", 12, f"{SELF}.num_heads"),
    Key("activation_function", "relu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("enable_bias", True, f"{SELF}.bias.query"),
    Key("layer_norm_elementwise_affine", True, lambda model: _norm(model).weight),
    blocks.tying(True),
)
LAYER = "decoder.layers.{layer}"
RULES = (
    module_rule("decoder.embed_tokens", "decoder.embedding.table"),
    module_rule("decoder.embed_positions", "decoder.embedding.position"),
    *attention_rules(f"{LAYER}.self_attn", SELF, "q_proj k_proj v_proj out_proj"),
    *blocks.step_norm_rules(f"{LAYER}.self_attn_layer_norm", "decoder", 0),
    *blocks.step_norm_rules(f"{LAYER}.final_layer_norm", "decoder", 1),
    module_rule(f"{LAYER}.fc1", f"{FEED}.up"),
    module_rule(f"{LAYER}.fc2", f"{FEED}.down"),
    module_rule("decoder.final_layer_norm", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="opt",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("OPT", "generate", "classify", "answer", "embed"),
        fixed=(blocks.CAUSAL,),
        # Initialization, and a dropout that no class applies.
        inert=("init_std", "activation_dropout"),
        prefix="model.",
        table="decoder.embed_tokens.weight",
    ),
)
