"""MPT: a penalty by distance in place of positions, no bias anywhere, and bounds on query, key and value.

Source: the release of 2023 and its code; the layout is that of the published files.
"""

from __future__ import annotations

from typing import Any

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.config import INERT
from clearhead.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.hf.mapping.tensor_rules import Rows, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)
# What the object of attention may say without being honoured: the classes compute this and nothing else.
FIXED: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


def _settings(c: Values) -> dict[str, Any]:
    """The object of attention, every key of it accounted for."""
    given = c["attn_config"] or {}
    faults = [
        f"config.json: attn_config.{name} = {value} is not supported; only {FIXED[name][0]} is"
        for name, value in given.items()
        if name in FIXED and value not in FIXED[name]
    ]
    known = {"attn_pdrop", "clip_qkv", "softmax_scale", "attn_impl", *FIXED, *INERT}
    faults += [f"config.json: attn_config.{name} is not known to mpt" for name in given if name not in known]
    for name in ("attn_pdrop", "clip_qkv", "softmax_scale"):
        if not isinstance(given.get(name), int | float | None):
            faults.append(f"config.json: attn_config.{name} must be a number, got {given[name]}")
    if faults:
        raise InputError("\n".join(faults))
    return {name: float(value) for name in ("attn_pdrop", "clip_qkv", "softmax_scale") if (value := given.get(name))}


def _model(c: Values) -> spec.Model:
    width, heads, given = c["d_model"], c["n_heads"], _settings(c)
    drop = given.get("attn_pdrop", 0.0)
    norm = spec.LayerNorm(eps=c["layer_norm_epsilon"], bias=False)
    attention = spec.Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        mask=spec.Causal(),
        score_bias=spec.Alibi(),
        scale=given.get("softmax_scale"),
        bias=blocks.biases(False),
        clip=given.get("clip_qkv"),
        dropout=drop,
    )
    network = spec.FeedForward(size=4 * width, activation="gelu", bias_in=False, bias_out=False)
    layer = spec.Layer(steps=(blocks.pre(norm, attention, drop), blocks.pre(norm, network, drop)))
    decoder = spec.Stack(
        width=width,
        embedding=spec.Embedding(table=spec.Table(rows=c["vocab_size"])),
        layers=(layer,) * c["n_layers"],
        final_norm=norm,
    )
    return spec.Model(decoder=decoder, initialization=blocks.INITIALIZATION)


def _attention(model: spec.Model) -> dict[str, Any]:
    node = llama_like.first_attention(model)
    return {"attn_pdrop": node.dropout or 0, "clip_qkv": node.clip, "softmax_scale": node.scale}


KEYS = (
    Key("d_model", 2048, "decoder.width", aliases=("hidden_size",)),
    Key("n_heads", 16, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("n_layers", 24, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("vocab_size", 50368, "decoder.embedding.table.rows"),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("attn_config", None, _attention, kind=dict),
    blocks.tying(True),
)

RULES = (
    module_rule("wte", "decoder.embedding.table"),
    module_rule("blocks.{layer}.norm_1", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule("blocks.{layer}.attn.Wqkv", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Rows()),
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
        variants=(
            blocks.writing("MptForCausalLM"),
            blocks.classifying("MptForSequenceClassification"),
            blocks.tagging("MptForTokenClassification"),
            blocks.answering("MptForQuestionAnswering"),
            blocks.bare("MptModel"),
        ),
        # The classes read none of these; a value that means something else would be passed over.
        only=(
            blocks.CAUSAL,
            Fixed("expansion_ratio", (4,), "the networks would have another size"),
            Fixed("logit_scale", (None,), "the outputs would be scaled"),
            Fixed("no_bias", (True,), "there would be biases"),
            Fixed("embedding_fraction", (1.0,), "gradients of the word vectors would be scaled"),
            Fixed("emb_pdrop", (0.0,), "the embedding would have dropout"),
            Fixed("resid_pdrop", (0.0,), "branches would have a dropout of their own"),
            Fixed("norm_type", ("low_precision_layernorm", "layernorm"), "the norms would differ"),
        ),
        # Learned positions are off wherever distances count, which is always; the rest are how and how long it trained.
        inert=(
            "learned_pos_emb", "max_seq_len", "init_device", "verbose", "init_config", "classifier_dropout",
            "hidden_dropout",
        ),
        prefix="transformer.",
        table="wte.weight",
    ),
)  # fmt: skip
