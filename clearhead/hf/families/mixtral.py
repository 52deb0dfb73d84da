"""Mixtral and Qwen3-MoE: grouped decoders whose networks are mixtures of experts.

Source: arXiv 2401.04088, section 2.1; arXiv 2505.09388, section 2; the layout is that of the published files.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.hf.mapping import blocks, layer_types, llama_like
from clearhead.hf.mapping.family import Fixed, Key, Values
from clearhead.hf.mapping.llama_like import FEED
from clearhead.hf.mapping.tensor_rules import Rows, Rule, Stacked, tensor_rule


def _layers(
    c: Values, masks: list[llama_like.Mask], networks: list[blocks.AnyFunction], bias: bool, norms: bool
) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both = spec.QueryKeyNorm(norm=norm) if norms else None
    layers = []
    for mask, network in zip(masks, networks, strict=True):
        attention = llama_like.attention(c, mask, bias=blocks.biases(bias), query_key_norm=both)
        layers.append(spec.Layer(steps=(blocks.pre(norm, attention), blocks.pre(norm, network))))
    return llama_like.decoder(c, layers, norm)


def _mixture(c: Values, count: str, size: str, normalize: bool) -> spec.MixtureOfExperts:
    return spec.MixtureOfExperts(
        count=c[count],
        top_k=c["num_experts_per_tok"],
        expert=llama_like.feed_forward(c, size=size),
        router=spec.Router(normalize=normalize),
    )


def _mixtral(c: Values) -> spec.Model:
    depth = c["num_hidden_layers"]
    masks = llama_like.masks(c, [c["sliding_window"] is not None] * depth)
    mixture = _mixture(c, "num_local_experts", "intermediate_size", normalize=True)
    return _layers(c, masks, [mixture] * depth, bias=False, norms=False)


def _qwen3_moe(c: Values) -> spec.Model:
    depth, dense = c["num_hidden_layers"], c["mlp_only_layers"] or []
    masks = llama_like.masks(c, [c["use_sliding_window"] and c["sliding_window"] is not None] * depth)
    mixture = _mixture(c, "num_experts", "moe_intermediate_size", normalize=c["norm_topk_prob"])
    network = llama_like.feed_forward(c)
    is_mixed = [index not in dense and (index + 1) % c["decoder_sparse_step"] == 0 for index in range(depth)]
    networks: list[blocks.AnyFunction] = [mixture if one else network for one in is_mixed]
    return _layers(c, masks, networks, bias=c["attention_bias"], norms=True)


def _is_mixed(layer: spec.Layer) -> bool:
    return isinstance(layer.steps[1].branches[0].function, spec.MixtureOfExperts)


def _is_dense(layer: spec.Layer) -> bool:
    return not _is_mixed(layer)


def _dense_layers(model: spec.Model) -> list[int]:
    assert model.decoder is not None
    return [index for index, layer in enumerate(model.decoder.layers) if _is_dense(layer)]


def _activation(model: spec.Model) -> object:
    assert model.decoder is not None
    function = model.decoder.layers[0].steps[1].branches[0].function
    return getattr(getattr(function, "expert", function), "activation", None)


def _expert_rules(block: str, names: dict[str, str]) -> tuple[Rule, ...]:
    experts = f"layers.{{layer}}.{block}.experts.{{expert}}"
    return (
        tensor_rule(f"layers.{{layer}}.{block}.gate.weight", f"{FEED}.router.weight"),
        *(
            tensor_rule(f"{experts}.{one}.weight", f"{FEED}.expert.{ours}.weight", Stacked())
            for one, ours in names.items()
        ),
    )


def _stacked() -> dict[str, tuple[Rule, ...]]:
    """The layout in which the experts of a layer are one tensor, as newer tools write it."""
    experts = "layers.{layer}.mlp.experts"
    both = (f"{FEED}.expert.gate.weight", f"{FEED}.expert.up.weight")
    own = (
        tensor_rule("layers.{layer}.mlp.gate.weight", f"{FEED}.router.weight"),
        tensor_rule(f"{experts}.gate_up_proj", both, Rows(axis=1)),
        tensor_rule(f"{experts}.down_proj", f"{FEED}.expert.down.weight"),
    )
    return {r"layers\.\d+\.mlp\.experts\.gate_up_proj$": (*llama_like.RULES, *own)}


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
# They steer training alone.
INERT = ("output_router_logits", "router_aux_loss_coef")

FAMILIES = tuple(
    replace(record, layouts=_stacked())
    for record in (
        llama_like.record(
            "mixtral",
            "Mixtral",
            (
                *llama_like.replaced(
                    blocks.defaults(llama_like.KEYS, MIXTRAL),
                    Key("intermediate_size", 14336, f"{FEED}.expert.size"),
                    ACTIVATION,
                ),
                Key("sliding_window", None, llama_like.window, kind=int),
                Key("num_local_experts", 8, f"{FEED}.count", aliases=("num_experts",)),
                Key("num_experts_per_tok", 2, f"{FEED}.top_k"),
            ),
            _mixtral,
            rules=(*llama_like.RULES, *_expert_rules("block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})),
            inert=INERT,
            only=(Fixed("router_jitter_noise", (0.0,), "what the router reads would be shaken in training"),),
            answers="model.",
        ),
        llama_like.record(
            "qwen3_moe",
            "Qwen3Moe",
            (
                *llama_like.replaced(
                    blocks.defaults(llama_like.KEYS, QWEN),
                    *layer_types.among(_is_dense, Key("intermediate_size", 6144, f"{FEED}.size")),
                    ACTIVATION,
                ),
                llama_like.ATTENTION_BIAS,
                Key("use_sliding_window", False, lambda model: llama_like.window(model) is not None),
                Key("sliding_window", 4096, llama_like.window, is_nullable=True),
                *layer_types.among(
                    _is_mixed,
                    Key("moe_intermediate_size", 768, f"{FEED}.expert.size"),
                    Key("num_experts", 128, f"{FEED}.count", aliases=("num_local_experts",)),
                    Key("num_experts_per_tok", 8, f"{FEED}.top_k"),
                    Key("norm_topk_prob", False, f"{FEED}.router.normalize"),
                ),
                Key("decoder_sparse_step", 1),
                Key("mlp_only_layers", None, _dense_layers, kind=list),
            ),
            _qwen3_moe,
            rules=(
                *llama_like.RULES,
                *_expert_rules("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}),
            ),
            inert=(*INERT, "max_window_layers"),
            answers="transformer.",
        ),
    )
)
