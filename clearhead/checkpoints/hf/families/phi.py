"""Phi: attention and feed-forward network in parallel after one norm; part of a head is rotated.

Source: arXiv 2309.05463, section 2.2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 0, 1)


def _model(c: Values) -> spec.Model:
    norm, size = spec.LayerNorm(eps=c["layer_norm_eps"]), llama_like.head_size(c)
    attention = llama_like.attention(
        c,
        position=rope.read(c, head_size=size, partial=c["partial_rotary_factor"], is_partial=True),
        query_key_norm=spec.QueryKeyNorm(norm=norm) if c["qk_layernorm"] else None,
    )
    network = llama_like.feed_forward(c, bias=True, gated=False)
    layer = blocks.parallel(norm, attention, network, dropout=c["resid_pdrop"])
    return blocks.one_stack(
        "decoder", c["hidden_size"], c["vocab_size"], [layer] * c["num_hidden_layers"], norm, dropout=c["embd_pdrop"]
    )


KEYS = llama_like.keys(
    {"vocab_size": 51200, "hidden_size": 2048, "num_hidden_layers": 24},
    Key("intermediate_size", 8192, f"{FEED}.size"),
    Key("hidden_act", "gelu_new", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("partial_rotary_factor", 0.5, rope.rotary_share(SELF)),
    Key("qk_layernorm", False, llama_like.has_query_key_norm),
    Key("resid_pdrop", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("embd_pdrop", 0.0, "decoder.embedding.dropout"),
    without=("rms_norm_eps",),
)

RULES = (
    *llama_like.RULES[:5],
    module_rule("layers.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
    module_rule("layers.{layer}.self_attn.dense", f"{SELF}.out"),
    module_rule("layers.{layer}.self_attn.q_layernorm", f"{SELF}.query_norm"),
    module_rule("layers.{layer}.self_attn.k_layernorm", f"{SELF}.key_norm"),
    module_rule("layers.{layer}.mlp.fc1", f"{FEED}.up"),
    module_rule("layers.{layer}.mlp.fc2", f"{FEED}.down"),
    module_rule("final_layernorm", "decoder.final_norm"),
)
VARIANTS = blocks.decoder_variants("Phi", "generate", "classify", "tag", "embed", bias=True, tag_output="score")

FAMILIES = (llama_like.family("phi", "Phi", KEYS, _model, rules=RULES, variants=VARIANTS),)
