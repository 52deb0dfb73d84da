"""Mixtral and Qwen3-MoE: decoders with grouped queries whose feed-forward networks are mixtures of experts.

Source: arXiv 2401.04088, section 2.1; arXiv 2505.09388, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, SplitRows, StackNumbered, tensor_rule
from clearhead.spec.base import MAX_LAYERS


def _decoder(c: Values, attentions: list[spec.Attention], networks: list[blocks.AnyFunction]) -> spec.Model:
    norm, nodes = spec.RMSNorm(eps=c["rms_norm_eps"]), zip(attentions, networks, strict=True)
    return llama_like.decoder(c, [blocks.layer(norm, attention, network) for attention, network in nodes], norm)


def _mixture(c: Values, count: str, size: str, normalize: bool) -> spec.MixtureOfExperts:
    return spec.MixtureOfExperts(
        count=c[count],
        top_k=c["num_experts_per_tok"],
        expert=llama_like.feed_forward(c, size=size),
        router=spec.Router(normalize=normalize),
    )


def _mixtral(c: Values) -> spec.Model:
    mixture = _mixture(c, "num_local_experts", "intermediate_size", normalize=True)
    attentions = [llama_like.attention(c, mask=mask, bias=blocks.biases(False)) for mask in llama_like.masks(c)]
    return _decoder(c, attentions, [mixture] * c["num_hidden_layers"])


def _qwen3_moe(c: Values) -> spec.Model:
    depth, dense = c["num_hidden_layers"], c["mlp_only_layers"] or []
    mixture = _mixture(c, "num_experts", "moe_intermediate_size", normalize=c["norm_topk_prob"])
    network = llama_like.feed_forward(c)
    has_mixture = [index not in dense and (index + 1) % c["decoder_sparse_step"] == 0 for index in range(depth)]
    networks: list[blocks.AnyFunction] = [mixture if has else network for has in has_mixture]
    both = spec.QueryKeyNorm(norm=spec.RMSNorm(eps=c["rms_norm_eps"]))
    masks = llama_like.masks_if_enabled(c)
    return _decoder(c, [llama_like.attention(c, mask=mask, query_key_norm=both) for mask in masks], networks)


def _has_mixture(layer: spec.Layer) -> bool:
    return isinstance(layer.steps[1].branches[0].function, spec.MixtureOfExperts)


def _is_dense(layer: spec.Layer) -> bool:
    return not _has_mixture(layer)


def _dense_layers(model: spec.Model) -> list[int]:
    assert model.decoder is not None
    return [index for index, layer in enumerate(model.decoder.layers) if _is_dense(layer)]


def _activation(model: spec.Model) -> object:
    function = value_at(model, FEED)
    return getattr(getattr(function, "expert", function), "activation", None)


def _expert_rules(block: str, names: dict[str, str]) -> tuple[Rule, ...]:
    experts = f"layers.{{layer}}.{block}.experts.{{expert}}"
    weights = ((f"{experts}.{name}.weight", f"{FEED}.expert.{ours}.weight") for name, ours in names.items())
    return (
        tensor_rule(f"layers.{{layer}}.{block}.gate.weight", f"{FEED}.router.weight"),
        *(tensor_rule(theirs, ours, StackNumbered()) for theirs, ours in weights),
    )


EXPERTS = "layers.{layer}.mlp.experts"
# The layout in which the experts of a layer are one tensor, as newer tools write it.
STACKED = (
    *llama_like.RULES,
    tensor_rule("layers.{layer}.mlp.gate.weight", f"{FEED}.router.weight"),
    tensor_rule(
        f"{EXPERTS}.gate_up_proj", (f"{FEED}.expert.gate.weight", f"{FEED}.expert.up.weight"), SplitRows(axis=1)
    ),
    tensor_rule(f"{EXPERTS}.down_proj", f"{FEED}.expert.down.weight"),
)
MIXTRAL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
}
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
ACTIVATION = Key("hidden_act", "silu", _activation, names=blocks.ACTIVATIONS)
# They change training only.
INERT = ("output_router_logits", "router_aux_loss_coef")

FAMILIES = tuple(
    replace(family, layouts={r"layers\.\d+\.mlp\.experts\.gate_up_proj$": STACKED})
    for family in (
        llama_like.family(
            "mixtral",
            "Mixtral",
            llama_like.keys(
                MIXTRAL,
                Key("intermediate_size", 14336, f"{FEED}.expert.size"),
                ACTIVATION,
                Key("sliding_window", None, llama_like.window, kind=int),
                Key("num_local_experts", 8, f"{FEED}.count", aliases=("num_experts",)),
                Key("num_experts_per_tok", 2, f"{FEED}.top_k"),
            ),
            _mixtral,
            rules=(*llama_like.RULES, *_expert_rules("block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})),
            inert=INERT,
            fixed=(Fixed("router_jitter_noise", (0.0,), "router input jitter is not supported"),),
            answer_prefix="model.",
        ),
        llama_like.family(
            "qwen3_moe",
            "Qwen3Moe",
            llama_like.keys(
                QWEN,
                *layer_types.only_in(_is_dense, Key("intermediate_size", 6144, f"{FEED}.size")),
                ACTIVATION,
                llama_like.ATTENTION_BIAS,
                llama_like.USE_WINDOW,
                Key("sliding_window", 4096, llama_like.window, is_nullable=True),
                *layer_types.only_in(
                    _has_mixture,
                    Key("moe_intermediate_size", 768, f"{FEED}.expert.size"),
                    Key("num_experts", 128, f"{FEED}.count", aliases=("num_local_experts",)),
                    Key("num_experts_per_tok", 8, f"{FEED}.top_k"),
                    Key("norm_topk_prob", False, f"{FEED}.router.normalize"),
                ),
                Key("decoder_sparse_step", 1),
                Key("mlp_only_layers", None, _dense_layers, kind=list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]]),
            ),
            _qwen3_moe,
            rules=(
                *llama_like.RULES,
                *_expert_rules("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}),
            ),
            inert=(*INERT, "max_window_layers"),
            answer_prefix="transformer.",
        ),
    )
)
