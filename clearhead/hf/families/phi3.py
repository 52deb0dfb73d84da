"""Phi-3: the Llama layer with its maps fused, and the long form of rotation.

Source: arXiv 2404.14219, section 2; the layout is that of the published files.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, llama_like, rope
from clearhead.hf.mapping.family import Fixed, Key, Values
from clearhead.hf.mapping.llama_like import FEED, SELF
from clearhead.hf.mapping.tensor_rules import Rows, module_rule


def _model(c: Values) -> spec.Model:
    size = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    position = rope.read(c, head_size=size, partial=c["partial_rotary_factor"], is_partial=True)
    if not isinstance(position.scaling, spec.LongRopeScaling | None):
        raise InputError(f"config.json: phi3 stretches rotation by longrope alone, got {position.scaling.kind}")
    norm, drop = spec.RMSNorm(eps=c["rms_norm_eps"]), c["resid_pdrop"]
    network = llama_like.feed_forward(c)
    masks = llama_like.masks(c, [c["sliding_window"] is not None] * c["num_hidden_layers"])
    layers = []
    for mask in masks:
        attention = llama_like.attention(c, mask, bias=blocks.biases(False), position=position)
        layers.append(spec.Layer(steps=(blocks.pre(norm, attention, drop), blocks.pre(norm, network, drop))))
    return llama_like.decoder(c, layers, norm)


DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
KEYS = (
    *llama_like.replaced(
        blocks.defaults(llama_like.KEYS, DEFAULTS),
        # It has a default here, and counts before the length in the object of the scaling.
        Key("original_max_position_embeddings", 4096, f"{SELF}.position.scaling.original_length"),
    ),
    Key("partial_rotary_factor", 1.0, rope.share(SELF)),
    Key("sliding_window", None, llama_like.window, kind=int),
    Key("resid_pdrop", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
)
RULES = (
    *(
        rule
        for rule in llama_like.RULES
        if not rule.theirs[0].endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    ),
    module_rule("layers.{layer}.self_attn.qkv_proj", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Rows()),
    module_rule("layers.{layer}.mlp.gate_up_proj", (f"{FEED}.gate", f"{FEED}.up"), Rows()),
)

# The class pads with an id of its published vocabulary, which another need not have.
FAMILIES = (
    replace(
        llama_like.record(
            "phi3",
            "Phi3",
            KEYS,
            _model,
            rules=RULES,
            # A dropout that no class applies, and biases that the release names but never has.
            inert=("embd_pdrop",),
            only=(
                Fixed("attention_bias", (False,), "the maps of attention would have biases"),
                Fixed("lm_head_bias", (False,), "the output would have a bias"),
                Fixed("mlp_bias", (False,), "the networks would have biases"),
                Fixed("full_attn_mod", (1,), "some layers would attend otherwise"),
                Fixed("interpolate_factor", (1,), "positions would be stretched"),
            ),
        ),
        written={"pad_token_id": None},
    ),
)
