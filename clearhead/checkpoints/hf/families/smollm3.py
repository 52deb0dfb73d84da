"""SmolLM3: the Llama layer, without positions in every fourth layer.

Source: arXiv 2501.18795, section 3 (layers without positions) and the release of 2025; tensor names are those of
released checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import ROPE_KEYS


def _model(c: Values) -> spec.Model:
    count, rotates = c["num_hidden_layers"], c["no_rope_layers"]
    if rotates is None:
        rotates = [(index + 1) % c["no_rope_layer_interval"] != 0 for index in range(count)]
    if len(rotates) != count:
        raise InputError(
            f"config.json: no_rope_layers must be 1 (rotary positions) or 0 (none) for each of {count} layers, "
            f"got {rotates}"
        )
    has_windows = c["use_sliding_window"] and c["sliding_window"] is not None
    masks = llama_like.masks(c, [has_windows and not rotated for rotated in rotates])
    norm, network = spec.RMSNorm(eps=c["rms_norm_eps"]), llama_like.feed_forward(c, bias=c["mlp_bias"])
    position = rope.read(c, head_size=llama_like.head_size(c))
    attentions = [
        llama_like.attention(c, mask=mask, position=position if rotated else None)
        for mask, rotated in zip(masks, rotates, strict=True)
    ]
    return llama_like.decoder(c, [blocks.layer(norm, attention, network) for attention in attentions], norm)


def _is_rotated(layer: spec.Layer) -> bool:
    return layer_types.attention(layer).position is not None


def _rotary_flags(model: spec.Model) -> list[int]:
    return [int(node.position is not None) for node in layer_types.attentions(model)]


DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SHARED_KEYS = llama_like.keys(DEFAULTS)

# The class's default padding id is that of the released vocabulary, which another need not have.
FAMILIES = (
    replace(
        llama_like.family(
            "smollm3",
            "SmolLM3",
            blocks.derive(
                SHARED_KEYS,
                {},
                *layer_types.only_in(_is_rotated, *(key for key in SHARED_KEYS if key.name in ROPE_KEYS)),
                llama_like.ATTENTION_BIAS,
                llama_like.MLP_BIAS,
                llama_like.USE_WINDOW,
                Key("sliding_window", None, llama_like.window, kind=int),
                llama_like.LAYER_TYPES,
                Key("no_rope_layers", None, _rotary_flags, kind=list[Annotated[int, Field(ge=0, le=1)]]),
                Key("no_rope_layer_interval", 4),
            ),
            _model,
            inert=("max_window_layers", "pretraining_tp"),
            answer_prefix="transformer.",
        ),
        written_keys={"pad_token_id": None},
    ),
)
