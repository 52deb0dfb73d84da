"""MPT: ALiBi instead of positions, no biases, and clipped queries, keys and values.

Source: the release of 2023 and its code; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.config import INERT
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import SplitRows, module_rule
from clearhead.spec.base import Rate

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)
# Keys of attn_config, with the only values that the classes compute.
ATTENTION_FIXED: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


class AttentionNumbers(BaseModel):
    """Numbers in attn_config; 0 means the same as an absent key."""

    attn_pdrop: Rate | None = None
    clip_qkv: Annotated[float, Field(ge=0)] | None = None
    softmax_scale: Annotated[float, Field(ge=0)] | None = None


def _read_numbers(c: Values) -> dict[str, float]:
    """Check every key of attn_config, and return its numbers that are not 0."""
    config = c["attn_config"] or {}
    faults = [
        f"config.json: attn_config.{name} = {value} is not supported; expected {ATTENTION_FIXED[name][0]}"
        for name, value in config.items()
        if name in ATTENTION_FIXED and value not in ATTENTION_FIXED[name]
    ]
    known = {*AttentionNumbers.model_fields, "attn_impl", *ATTENTION_FIXED, *INERT}
    faults += [f"config.json: mpt has no key attn_config.{name}" for name in config if name not in known]
    if faults:
        raise InputError.from_faults(faults, subject="config.json")
    return {name: float(value) for name in AttentionNumbers.model_fields if (value := config.get(name))}


def _model(c: Values) -> spec.Model:
    width, numbers = c["d_model"], _read_numbers(c)
    drop = numbers.get("attn_pdrop", 0.0)
    norm = spec.LayerNorm(eps=c["layer_norm_epsilon"], bias=False)
    attention = blocks.attention(
        width,
        c["n_heads"],
        mask=spec.Causal(),
        score_bias=spec.Alibi(),
        scale=numbers.get("softmax_scale"),
        bias=blocks.biases(False),
        clip=numbers.get("clip_qkv"),
        dropout=drop,
    )
    network = spec.FeedForward(size=4 * width, activation="gelu", bias_in=False, bias_out=False)
    layer = blocks.layer(norm, attention, network, dropout=drop)
    return blocks.one_stack("decoder", width, c["vocab_size"], [layer] * c["n_layers"], norm)


def _attention(model: spec.Model) -> dict[str, Any]:
    node = llama_like.first_attention(model)
    return {"attn_pdrop": node.dropout or 0, "clip_qkv": node.clip, "softmax_scale": node.scale}


KEYS = (
    Key("d_model", 2048, "decoder.width", aliases=("hidden_size",)),
    Key("n_heads", 16, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("n_layers", 24, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("vocab_size", 50368, "decoder.embedding.table.rows"),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("attn_config", None, _attention, kind=AttentionNumbers),
    blocks.tying(True),
)

RULES = (
    module_rule("wte", "decoder.embedding.table"),
    module_rule("blocks.{layer}.norm_1", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule("blocks.{layer}.attn.Wqkv", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), SplitRows()),
    module_rule("blocks.{layer}.attn.out_proj", f"{SELF}.out"),
    module_rule("blocks.{layer}.norm_2", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("blocks.{layer}.ffn.up_proj", f"{FEED}.up"),
    module_rule("blocks.{layer}.ffn.down_proj", f"{FEED}.down"),
    module_rule("norm_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="mpt",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("Mpt"),
        # The classes read none of these keys: they would ignore another value.
        fixed=(
            blocks.CAUSAL,
            Fixed("expansion_ratio", (4,), "another size of the feed-forward networks is not supported"),
            Fixed("logit_scale", (None,), "scaled logits are not supported"),
            Fixed("no_bias", (True,), "biases are not supported"),
            Fixed("embedding_fraction", (1.0,), "scaled gradients of the token embedding are not supported"),
            Fixed("emb_pdrop", (0.0,), "dropout of the embedding is not supported"),
            Fixed("resid_pdrop", (0.0,), "another dropout of the branches is not supported"),
            Fixed("norm_type", ("low_precision_layernorm", "layernorm"), "other norms are not supported"),
        ),
        # ALiBi is always on, and turns learned positions off. The other keys affect initialization and training.
        inert=(
            "learned_pos_emb", "max_seq_len", "init_device", "verbose", "init_config", "classifier_dropout",
            "hidden_dropout",
        ),
        prefix="transformer.",
        table="wte.weight",
    ),
)  # fmt: skip
