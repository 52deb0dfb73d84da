"""GPT-Neo: the GPT-2 layer with unscaled scores, and a window in every other layer.

Source: the release of 2021 (doi 10.5281/zenodo.5297715) and its code; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule
from clearhead.spec.base import MAX_LAYERS

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)

Pattern = tuple[list[Literal["global", "local"]], Annotated[int, Field(ge=0, le=MAX_LAYERS)]]


def _types(c: Values) -> list[str]:
    """Return the attention type of each layer, global or local, from the repeated patterns in `attention_types`."""
    patterns = c["attention_types"] or [[["global", "local"], 12]]
    count = sum(len(pattern) * times for pattern, times in patterns)
    if count != c["num_layers"]:
        raise InputError(f"config.json: attention_types is for {count} layers, but num_layers is {c['num_layers']}")
    return [kind for pattern, times in patterns for kind in pattern * times]


def _model(c: Values) -> spec.Model:
    width, norm = c["hidden_size"], spec.LayerNorm(eps=c["layer_norm_epsilon"])
    network = spec.FeedForward(size=c["intermediate_size"] or 4 * width, activation=c["activation_function"])

    def layer(kind: str) -> spec.Layer:
        attention = blocks.attention(
            width,
            c["num_heads"],
            mask=spec.Window(before=c["window_size"] - 1, after=0) if kind == "local" else spec.Causal(),
            scale=1.0,
            bias=spec.Biases(query=False, key=False, value=False, out=True),
            dropout=c["attention_dropout"],
        )
        return blocks.layer(norm, attention, network, dropout=c["resid_dropout"])

    layers = [layer(kind) for kind in _types(c)]
    position = spec.Learned(rows=c["max_position_embeddings"])
    return blocks.one_stack(
        "decoder", width, c["vocab_size"], layers, norm, position=position, dropout=c["embed_dropout"]
    )


def _pattern(model: spec.Model) -> list[list[object]]:
    types = [("global", "local")[isinstance(node.mask, spec.Window)] for node in layer_types.attentions(model)]
    return [[types, 1]]


def _window(model: spec.Model) -> int:
    size = llama_like.window(model)
    if size is None:
        raise LookupError("no layer has a window")
    return size


KEYS = (
    Key("vocab_size", 50257, "decoder.embedding.table.rows"),
    Key("max_position_embeddings", 2048, "decoder.embedding.position.rows"),
    Key("hidden_size", 2048, "decoder.width"),
    Key("num_layers", 24, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("attention_types", None, _pattern, kind=list[Pattern]),
    Key("num_heads", 16, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("intermediate_size", None, f"{FEED}.size", kind=int),
    Key("window_size", 256, _window),
    Key("activation_function", "gelu_new", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("resid_dropout", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("embed_dropout", 0.0, "decoder.embedding.dropout"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    blocks.tying(True),
)

RULES = (
    module_rule("wte", "decoder.embedding.table"),
    module_rule("wpe", "decoder.embedding.position"),
    module_rule("h.{layer}.ln_1", f"{blocks.branch('decoder', 0)}.pre"),
    *attention_rules("h.{layer}.attn.attention", SELF, "q_proj k_proj v_proj out_proj"),
    module_rule("h.{layer}.ln_2", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("h.{layer}.mlp.c_fc", f"{FEED}.up"),
    module_rule("h.{layer}.mlp.c_proj", f"{FEED}.down"),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="gpt_neo",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("GPTNeo"),
        fixed=(blocks.CAUSAL,),
        # attention_layers repeats attention_types; the other keys configure heads that no class has.
        inert=(
            "attention_layers", "classifier_dropout", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj",
        ),
        prefix="transformer.",
        table="wte.weight",
        ignored=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    ),
)  # fmt: skip
