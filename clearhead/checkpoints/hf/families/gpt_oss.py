"""gpt-oss: mixtures of experts with a clamped gate, a sink for each head, a window in every other layer.

Source: arXiv 2508.10925, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from typing import Any

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED, SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import InterleavedRows, Transpose, module_rule, tensor_rule

# The class's default where a config has no rope_parameters.
DEFAULT_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _model(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    # An empty object means rotary positions without scaling.
    rope_config = c["rope_scaling"] or (DEFAULT_SCALING if c["rope_parameters"] is None else c["rope_parameters"])
    position = rope.rotary(rope_config, c, theta=c["rope_theta"], head_size=llama_like.head_size(c))
    gate = spec.ClampedGate(alpha=c["swiglu_alpha"], limit=c["swiglu_limit"])
    mixture = spec.MixtureOfExperts(
        count=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        expert=spec.FeedForward(size=c["intermediate_size"], activation=gate, gated=True),
        router=spec.Router(bias=True),
    )
    masks = llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])])
    attentions = [llama_like.attention(c, mask=mask, position=position, sink=True) for mask in masks]
    return llama_like.decoder(c, [blocks.layer(norm, attention, mixture) for attention in attentions], norm)


def _scaling(model: spec.Model) -> dict[str, Any]:
    return rope.scaling_config(value_at(model, f"{SELF}.position")) or {"rope_type": "default"}


DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}
KEYS = llama_like.keys(
    DEFAULTS,
    Key("intermediate_size", 2880, f"{FEED}.expert.size"),
    Key("rope_scaling", None, _scaling, kind=rope.RopeConfig),
    Key("attention_bias", True, f"{SELF}.bias.query"),
    Key("sliding_window", 128, llama_like.window, is_nullable=True),
    llama_like.LAYER_TYPES,
    Key("num_local_experts", 128, f"{FEED}.count", aliases=("num_experts",)),
    Key("num_experts_per_tok", 4, f"{FEED}.top_k", aliases=("experts_per_token",)),
    Key("swiglu_alpha", 1.702, f"{FEED}.expert.activation.alpha"),
    Key("swiglu_limit", 7.0, f"{FEED}.expert.activation.limit"),
    without=("hidden_act",),
)
EXPERTS, EXPERT = "layers.{layer}.mlp.experts", f"{FEED}.expert"
GATE_UP = (Transpose(), InterleavedRows())
RULES = (
    *llama_like.rules_without(".mlp."),
    tensor_rule("layers.{layer}.self_attn.sinks", f"{SELF}.sink"),
    module_rule("layers.{layer}.mlp.router", f"{FEED}.router"),
    tensor_rule(f"{EXPERTS}.gate_up_proj", (f"{EXPERT}.gate.weight", f"{EXPERT}.up.weight"), *GATE_UP),
    tensor_rule(f"{EXPERTS}.gate_up_proj_bias", (f"{EXPERT}.gate.bias", f"{EXPERT}.up.bias"), InterleavedRows()),
    tensor_rule(f"{EXPERTS}.down_proj", f"{EXPERT}.down.weight", Transpose()),
    tensor_rule(f"{EXPERTS}.down_proj_bias", f"{EXPERT}.down.bias"),
)

FAMILIES = (
    llama_like.family(
        "gpt_oss",
        "GptOss",
        KEYS,
        _model,
        rules=RULES,
        # The form of the gate is fixed; the original length is in the object of the scaling; the rest is for training.
        inert=("hidden_act", "initial_context_length", "output_router_logits", "router_aux_loss_coef"),
    ),
)
