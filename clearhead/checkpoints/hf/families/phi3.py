"""Phi-3: the Llama layer with fused projections, and LongRoPE.

Source: arXiv 2404.14219, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED, SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import SplitRows, module_rule


def _model(c: Values) -> spec.Model:
    size, share = llama_like.head_size(c), c["partial_rotary_factor"]
    position = rope.read(c, head_size=size, partial=share, is_partial=True)
    if not isinstance(position.scaling, spec.LongRopeScaling | None):
        raise InputError(f"config.json: phi3 supports rope scaling by longrope only, got {position.scaling.kind}")
    norm, network = spec.RMSNorm(eps=c["rms_norm_eps"]), llama_like.feed_forward(c)
    bias = blocks.biases(False)
    attentions = [llama_like.attention(c, mask=mask, bias=bias, position=position) for mask in llama_like.masks(c)]
    layers = [blocks.layer(norm, attention, network, dropout=c["resid_pdrop"]) for attention in attentions]
    return llama_like.decoder(c, layers, norm)


DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
KEYS = llama_like.keys(
    DEFAULTS,
    # It has a default here, which takes precedence over the length in the object of the scaling.
    Key("original_max_position_embeddings", 4096, f"{SELF}.position.scaling.original_length"),
    Key("partial_rotary_factor", 1.0, rope.rotary_share(SELF)),
    Key("sliding_window", None, llama_like.window, kind=int),
    Key("resid_pdrop", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
)
RULES = (
    *llama_like.rules_without("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    module_rule("layers.{layer}.self_attn.qkv_proj", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), SplitRows()),
    module_rule("layers.{layer}.mlp.gate_up_proj", (f"{FEED}.gate", f"{FEED}.up"), SplitRows()),
)

# The class's default padding id is that of the released vocabulary, which another need not have.
FAMILIES = (
    replace(
        llama_like.family(
            "phi3",
            "Phi3",
            KEYS,
            _model,
            rules=RULES,
            # A dropout that no class applies.
            inert=("embd_pdrop",),
            fixed=(
                Fixed("attention_bias", (False,), "biases of attention are not supported"),
                Fixed("lm_head_bias", (False,), "a bias of the output is not supported"),
                Fixed("mlp_bias", (False,), "biases of the feed-forward networks are not supported"),
                Fixed("full_attn_mod", (1,), "layers with other attention are not supported"),
                Fixed("interpolate_factor", (1,), "interpolated positions are not supported"),
            ),
        ),
        written_keys={"pad_token_id": None},
    ),
)
