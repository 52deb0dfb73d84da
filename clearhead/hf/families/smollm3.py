"""SmolLM3: the Llama layer, without any position in every fourth layer.

Source: arXiv 2501.18795, section 3 (layers without positions) and the release of 2025; the layout is that of the
published files.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, layer_types, llama_like
from clearhead.hf.mapping.family import Key, Values


def _model(c: Values) -> spec.Model:
    count = c["num_hidden_layers"]
    rotates = c["no_rope_layers"]
    if rotates is None:
        rotates = [(index + 1) % c["no_rope_layer_interval"] != 0 for index in range(count)]
    if len(rotates) != count or not set(rotates) <= {0, 1}:
        raise InputError(f"config.json: no_rope_layers must hold {count} times 1 (rotation) or 0 (none), got {rotates}")
    slides = c["use_sliding_window"] and c["sliding_window"] is not None
    masks = llama_like.masks(c, [slides and not one for one in rotates])
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    network = llama_like.feed_forward(c, bias=c["mlp_bias"])
    bias = blocks.biases(c["attention_bias"])
    layers = []
    for mask, is_rotated in zip(masks, rotates, strict=True):
        choices = {} if is_rotated else {"position": None}
        attention = llama_like.attention(c, mask, bias=bias, **choices)
        layers.append(spec.Layer(steps=(blocks.pre(norm, attention), blocks.pre(norm, network))))
    return llama_like.decoder(c, layers, norm)


def _rotates(layer: spec.Layer) -> bool:
    return layer_types.attention(layer).position is not None


ROTATION = {"rope_theta", "rope_scaling", "max_position_embeddings"}
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
USUAL = blocks.defaults(llama_like.KEYS, DEFAULTS)

# The class pads with an id of its published vocabulary, which another need not have.
FAMILIES = (
    replace(
        llama_like.record(
            "smollm3",
            "SmolLM3",
            (
                *(key for key in USUAL if key.name not in ROTATION),
                *layer_types.among(_rotates, *(key for key in USUAL if key.name in ROTATION)),
                llama_like.ATTENTION_BIAS,
                llama_like.MLP_BIAS,
                Key("use_sliding_window", False, lambda model: llama_like.window(model) is not None),
                Key("sliding_window", None, llama_like.window, kind=int),
                Key("layer_types", None, llama_like.layer_types, kind=list),
                Key(
                    "no_rope_layers",
                    None,
                    lambda model: [int(node.position is not None) for node in layer_types.attentions(model)],
                    kind=list,
                ),
                Key("no_rope_layer_interval", 4),
            ),
            _model,
            inert=("max_window_layers", "pretraining_tp"),
            answers="transformer.",
        ),
        written={"pad_token_id": None},
    ),
)
