"""gpt-oss: experts with a clamped gate in every layer, a sink for each head, a window in every other layer.

Source: arXiv 2508.10925, section 2; the layout is that of the published files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like, rope
from clearhead.hf.mapping.config import value_at
from clearhead.hf.mapping.family import Key, Values
from clearhead.hf.mapping.llama_like import FEED, SELF
from clearhead.hf.mapping.tensor_rules import Slots, Transpose, module_rule, tensor_rule

# What the class takes where a config says nothing about rotation.
STRETCHED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class InTurns:
    """One tensor that holds the rows of two of ours in turns, for each expert: rows are the second axis."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Take the even rows and the odd ones apart."""
        (one,) = tensors
        if one.dim() < 2 or one.shape[1] % 2:
            raise ValueError("an even number of rows is needed")
        return [one[:, 0::2], one[:, 1::2]]

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Put them in turns again."""
        return [torch.stack(tensors, dim=2).flatten(1, 2)]


def _model(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    size = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    # An empty object is one, and means the plain rotation.
    given = c["rope_scaling"] or (STRETCHED if c["rope_parameters"] is None else c["rope_parameters"])
    position = rope.rotary(given, c, theta=c["rope_theta"], head_size=size, partial=1.0, is_partial=False)
    gate = spec.ClampedGate(alpha=c["swiglu_alpha"], limit=c["swiglu_limit"])
    mixture = spec.MixtureOfExperts(
        count=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        expert=spec.FeedForward(size=c["intermediate_size"], activation=gate, gated=True),
        router=spec.Router(bias=True),
    )
    layers = []
    for mask in llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])]):
        bias = blocks.biases(c["attention_bias"])
        attention = llama_like.attention(c, mask, bias=bias, position=position, sink=True)
        layers.append(spec.Layer(steps=(blocks.pre(norm, attention), blocks.pre(norm, mixture))))
    return llama_like.decoder(c, layers, norm)


def _scaling(model: spec.Model) -> dict[str, Any]:
    return rope.written(value_at(model, f"{SELF}.position")) or {"rope_type": "default"}


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
KEYS = (
    *llama_like.replaced(
        llama_like.without(blocks.defaults(llama_like.KEYS, DEFAULTS), "hidden_act"),
        Key("intermediate_size", 2880, f"{FEED}.expert.size"),
        Key("rope_scaling", None, _scaling, kind=dict),
    ),
    Key("attention_bias", True, f"{SELF}.bias.query"),
    Key("sliding_window", 128, llama_like.window, is_nullable=True),
    Key("layer_types", None, llama_like.layer_types, kind=list),
    Key("num_local_experts", 128, f"{FEED}.count", aliases=("num_experts",)),
    Key("num_experts_per_tok", 4, f"{FEED}.top_k", aliases=("experts_per_token",)),
    Key("swiglu_alpha", 1.702, f"{FEED}.expert.activation.alpha"),
    Key("swiglu_limit", 7.0, f"{FEED}.expert.activation.limit"),
)
EXPERTS = "layers.{layer}.mlp.experts"
RULES = (
    *(rule for rule in llama_like.RULES if ".mlp." not in rule.theirs[0]),
    tensor_rule("layers.{layer}.self_attn.sinks", f"{SELF}.sink"),
    module_rule("layers.{layer}.mlp.router", f"{FEED}.router"),
    tensor_rule(
        f"{EXPERTS}.gate_up_proj", (f"{FEED}.expert.gate.weight", f"{FEED}.expert.up.weight"), Transpose(), InTurns()
    ),
    tensor_rule(f"{EXPERTS}.gate_up_proj_bias", (f"{FEED}.expert.gate.bias", f"{FEED}.expert.up.bias"), InTurns()),
    tensor_rule(f"{EXPERTS}.down_proj", f"{FEED}.expert.down.weight", Transpose()),
    tensor_rule(f"{EXPERTS}.down_proj_bias", f"{FEED}.expert.down.bias"),
)

FAMILIES = (
    llama_like.record(
        "gpt_oss",
        "GptOss",
        KEYS,
        _model,
        rules=RULES,
        # The form of the gate is fixed, the length of training stands in the rotation's object, the rest is training's.
        inert=("hidden_act", "initial_context_length", "output_router_logits", "router_aux_loss_coef"),
    ),
)
