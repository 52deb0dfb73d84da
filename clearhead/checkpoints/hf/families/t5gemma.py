"""T5Gemma: an encoder and a decoder of Gemma 2's layers, each with a separate config.

The classes for sequence and token classification are not supported. In transformers, they read the label of a text from
a state that depends on padding, so no single answer is right.

Source: arXiv 2504.06225, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like, rope
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.layer_types import Side
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, attention_rules, module_rule

SIDES: tuple[Side, ...] = ("encoder", "decoder")


def _last(side: Side) -> int:
    return 1 if side == "encoder" else 2


def _masks(c: Values, side: Side) -> list[spec.Mask]:
    masks = llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])])
    if side == "decoder":
        return list(masks)
    # A window of the encoder reaches equally far to both sides, and one token farther than the decoder's.
    reach = c["sliding_window"]
    return [spec.Window(before=reach, after=reach) if isinstance(mask, spec.Window) else spec.Full() for mask in masks]


def _stack(c: Values, side: Side) -> spec.Stack:
    norm, drop = spec.RMSNorm(eps=c["rms_norm_eps"], unit_offset=True), c["dropout_rate"]

    def attention(mask: spec.Mask, source: Literal["self", "memory"]) -> spec.Attention:
        return llama_like.attention(
            c,
            mask=mask,
            source=source,
            position=rope.read(c, head_size=c["head_dim"]) if source == "self" else None,
            scale=c["query_pre_attn_scalar"] ** -0.5,
            soft_cap=c["attn_logit_softcapping"],
        )

    network = llama_like.feed_forward(c, act="hidden_activation").model_copy(update={"dropout": drop})
    memory = (attention(spec.Full(), "memory"),) if side == "decoder" else ()
    layers = [
        blocks.layer(norm, attention(mask, "self"), *memory, network, dropout=drop, post=norm)
        for mask in _masks(c, side)
    ]
    embedding = spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        scale=c["hidden_size"] ** 0.5,
        scale_rounding="weights",
        dropout=drop,
    )
    return spec.Stack(width=c["hidden_size"], embedding=embedding, layers=tuple(layers), final_norm=norm)


def _values(c: Values, side: Side) -> Values:
    """Return the config values of the encoder or decoder, with the dropout of the whole model."""
    parsed = configs.parse(STACKS[side], c[side] or {})
    if parsed.faults:
        raise InputError.from_faults(parsed.faults, subject=f"config.json: {side}")
    return parsed.values.with_values(dropout_rate=c["dropout_rate"], attention_dropout=c["attention_dropout"])


def _model(c: Values) -> spec.Model:
    values = [_values(c, side) for side in SIDES]
    encoder, decoder = (_stack(side_values, side) for side_values, side in zip(values, SIDES, strict=True))
    length = min(side_values["max_position_embeddings"] for side_values in values)
    return spec.Model(encoder=encoder, decoder=decoder, initialization=blocks.INITIALIZATION, declared_length=length)


def _lm_head(c: Values) -> spec.Head:
    decoder_values = _values(c, "decoder").with_values(tie_word_embeddings=c["tie_word_embeddings"])
    return blocks.lm_head("decoder.embedding.table")(decoder_values)


# --- from a spec to a config ----------------------------------------------------------------------------------


def _window(side: Side) -> Callable[[spec.Model], int | None]:
    def read_window(model: spec.Model) -> int | None:
        reach = layer_types.window(model, side)
        return None if reach is None else reach + (side == "decoder")

    return read_window


def _scalar(side: Side) -> Callable[[spec.Model], int]:
    def read_scalar(model: spec.Model) -> int:
        first = layer_types.attentions(model, side)[0]
        return first.head_size if first.scale is None else round(first.scale**-2)

    return read_scalar


def _config(side: Side) -> Callable[[spec.Model], dict[str, Any]]:
    """Return a function that gets a spec and returns the nested config of its encoder or decoder."""

    def read_config(model: spec.Model) -> dict[str, Any]:
        kind = {"model_type": "t5_gemma_module", "is_decoder": side == "decoder"}
        return kind | configs.config_values(STACKS[side].keys, model)

    return read_config


def _keys(side: Side) -> tuple[Key, ...]:
    self_attention, feed = blocks.function(side, 0), blocks.function(side, _last(side))
    return (
        Key("vocab_size", 256000, f"{side}.embedding.table.rows"),
        Key("hidden_size", 2304, f"{side}.width"),
        Key("intermediate_size", 9216, f"{feed}.size"),
        Key("num_hidden_layers", 26, blocks.count_layers(side)),
        Key("num_attention_heads", 8, f"{self_attention}.num_heads"),
        Key("num_key_value_heads", 4, f"{self_attention}.num_kv_heads"),
        Key("head_dim", 256, f"{self_attention}.head_size"),
        Key("hidden_activation", "gelu_pytorch_tanh", f"{feed}.activation", names=blocks.ACTIVATIONS),
        Key("rms_norm_eps", 1e-6, f"{side}.final_norm.eps"),
        Key("attention_bias", False, f"{self_attention}.bias.query"),
        Key("query_pre_attn_scalar", 256, _scalar(side)),
        Key("sliding_window", 4096, _window(side), is_nullable=True),
        Key("layer_types", None, layer_types.types_of(side), kind=list[str]),
        Key("attn_logit_softcapping", 50.0, f"{self_attention}.soft_cap", is_nullable=True),
        Key("final_logit_softcapping", 30.0, blocks.in_head(spec.SoftCap, "value"), is_nullable=True),
        *rope.keys(10000.0, self_attention, 8192),
    )


STACKS = {
    side: Family(
        model_type=f"the {side} of t5gemma",
        keys=_keys(side),
        model=lambda c: spec.Model(),
        rules=(),
        variants=(),
        fixed=(Fixed("is_decoder", (side == "decoder",), "swapped stacks are not supported"),),
        # The config of the whole model sets these.
        inert=("attention_dropout", "cross_attention_hidden_size", "dropout_rate", "tie_word_embeddings"),
    )
    for side in SIDES
}


def _rules(side: Side) -> tuple[Rule, ...]:
    theirs, last = f"{side}.layers.{{layer}}", _last(side)
    attentions = {"self_attn": 0} | ({"cross_attn": 1} if side == "decoder" else {})
    network = blocks.function(side, last)
    return (
        module_rule(f"{side}.embed_tokens", f"{side}.embedding.table"),
        module_rule(f"{side}.norm", f"{side}.final_norm"),
        *(
            module_rule(f"{theirs}.{norm_place}_{name}_layernorm", f"{blocks.branch(side, step)}.{norm_place}")
            for name, step in (attentions | {"feedforward": last}).items()
            for norm_place in ("pre", "post")
        ),
        *(
            rule
            for name, step in attentions.items()
            for rule in attention_rules(f"{theirs}.{name}", blocks.function(side, step))
        ),
        *(module_rule(f"{theirs}.mlp.{name}_proj", f"{network}.{name}") for name in ("gate", "up", "down")),
    )


FAMILIES = (
    Family(
        model_type="t5gemma",
        keys=(
            *(Key(side, None, _config(side), kind=dict[str, Any]) for side in SIDES),
            Key("dropout_rate", 0.0, "encoder.embedding.dropout"),
            Key("attention_dropout", 0.0, f"{blocks.function('encoder', 0)}.dropout"),
            blocks.tying(True),
        ),
        model=_model,
        rules=(*_rules("encoder"), *_rules("decoder")),
        variants=(
            Variant(
                ("T5GemmaForConditionalGeneration",),
                "denoise",
                _lm_head,
                (module_rule("lm_head.out_proj", "head.layers.0"),),
                output="lm_head.out_proj.weight",
            ),
            blocks.base_model("T5GemmaModel"),
        ),
        inert=("vocab_size", "classifier_dropout_rate"),
        prefix="model.",
        table="decoder.embed_tokens.weight",
        ignored=llama_like.IGNORED,
    ),
)
