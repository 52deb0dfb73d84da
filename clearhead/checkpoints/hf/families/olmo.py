"""OLMo: norms without weights; OLMo 2: norms after the branches and of query and key; OLMo 3: windows as well.

Source: arXiv 2402.00838, section 2.1; arXiv 2501.00656, section 2.1; the release of OLMo 3 (2025); tensor names are
those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule


def _olmo(c: Values) -> spec.Model:
    norm = spec.LayerNorm(eps=1e-5, weight=False, bias=False)
    layer = blocks.layer(norm, llama_like.attention(c, clip=c["clip_qkv"]), llama_like.feed_forward(c))
    return llama_like.decoder(c, [layer] * c["num_hidden_layers"], norm)


def _post_norm(c: Values, masks: list[llama_like.Mask], positions: dict[bool, spec.Rotary]) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both, network = spec.QueryKeyNorm(norm=norm, over="width"), llama_like.feed_forward(c)

    def layer(mask: llama_like.Mask) -> spec.Layer:
        position = positions[isinstance(mask, spec.Window)]
        attention = llama_like.attention(c, mask=mask, query_key_norm=both, position=position)
        return blocks.layer(None, attention, network, post=norm)

    return llama_like.decoder(c, [layer(mask) for mask in masks], norm)


def _olmo2(c: Values) -> spec.Model:
    positions = {False: rope.read(c, head_size=llama_like.head_size(c))}
    return _post_norm(c, [spec.Causal()] * c["num_hidden_layers"], positions)


def _olmo3(c: Values) -> spec.Model:
    masks = llama_like.masks(c, [(index + 1) % 4 != 0 for index in range(c["num_hidden_layers"])])
    size, theta = llama_like.head_size(c), c["rope_theta"]
    return _post_norm(c, masks, layer_types.rotations(c, head_size=size, full=theta, sliding=THETA))


THETA = 500000.0
DEFAULTS = {"vocab_size": 50304, "rms_norm_eps": 1e-5}
KEYS = llama_like.keys(DEFAULTS, llama_like.ATTENTION_BIAS)
RULES = (
    *llama_like.rules_without("layernorm"),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 0)}.post"),
    module_rule("layers.{layer}.post_feedforward_layernorm", f"{blocks.branch('decoder', 1)}.post"),
)
LATER = (
    # The nested object holds what the older keys do, and what only it can.
    Key("rope_theta", THETA),
    Key("rope_scaling", None, kind=rope.RopeConfig),
    Key("rope_parameters", None, layer_types.rotation_config, kind=layer_types.Rotations),
    *layer_types.only_in(
        layer_types.is_full, *(key for key in rope.keys(THETA, SELF, 2048) if key.name == "max_position_embeddings")
    ),
    Key("sliding_window", 4096, llama_like.window, is_nullable=True),
    llama_like.LAYER_TYPES,
)
OLMO_KEYS = blocks.derive(KEYS, {}, Key("clip_qkv", None, f"{SELF}.clip", kind=float), without=("rms_norm_eps",))


FAMILIES = (
    llama_like.family(
        "olmo",
        "Olmo",
        OLMO_KEYS,
        _olmo,
        variants=blocks.decoder_variants("Olmo", "generate", "classify", "embed"),
        inert=("layer_norm_eps",),
    ),
    llama_like.family(
        "olmo2",
        "Olmo2",
        KEYS,
        _olmo2,
        rules=RULES,
        variants=blocks.decoder_variants("Olmo2", "generate", "classify", "embed"),
    ),
    llama_like.family(
        "olmo3",
        "Olmo3",
        blocks.derive(KEYS, {}, *LATER),
        _olmo3,
        rules=RULES,
        variants=blocks.decoder_variants("Olmo3", "generate", "classify", "embed"),
    ),
)
