"""Llama and those that differ from it in a few choices: Mistral, Qwen2, Qwen3.

Source: arXiv 2302.13971, section 2.2; windows arXiv 2310.06825, section 2; norms of query and key arXiv 2505.09388,
section 2. The layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.zoo import grouped, parts
from clearhead.zoo.record import Key, Values


def _model(c: Values, masks: list[grouped.Mask], *, attention: spec.Biases, mlp: bool, qk_norm: bool) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both = spec.QueryKeyNorm(norm=norm) if qk_norm else None
    network = grouped.feed_forward(c, bias=mlp)
    layers = [
        spec.Layer(
            steps=(
                parts.pre(norm, grouped.attention(c, mask, bias=attention, query_key_norm=both)),
                parts.pre(norm, network),
            )
        )
        for mask in masks
    ]
    return grouped.decoder(c, layers, norm)


def _llama(c: Values) -> spec.Model:
    masks: list[grouped.Mask] = [spec.Causal()] * c["num_hidden_layers"]
    return _model(c, masks, attention=parts.biases(c["attention_bias"]), mlp=c["mlp_bias"], qk_norm=False)


def _mistral(c: Values) -> spec.Model:
    masks = grouped.masks(c, [c["sliding_window"] is not None] * c["num_hidden_layers"])
    return _model(c, masks, attention=parts.biases(False), mlp=False, qk_norm=False)


def _qwen2(c: Values) -> spec.Model:
    bias = spec.Biases(query=True, key=True, value=True, out=False)
    return _model(c, grouped.windows(c), attention=bias, mlp=False, qk_norm=False)


def _qwen3(c: Values) -> spec.Model:
    return _model(c, grouped.windows(c), attention=parts.biases(c["attention_bias"]), mlp=False, qk_norm=True)


QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
# Classes that find answers kept a prefix that the others left.
OLDER = "transformer."

RECORDS = (
    grouped.record(
        "llama",
        "Llama",
        (*grouped.KEYS, grouped.ATTENTION_BIAS, grouped.MLP_BIAS),
        _llama,
        inert=("pretraining_tp",),
        answers=OLDER,
    ),
    grouped.record(
        "mistral",
        "Mistral",
        (
            *parts.defaults(grouped.KEYS, MISTRAL),
            Key("sliding_window", 4096, grouped.window, is_nullable=True),
        ),
        _mistral,
        answers="model.",
    ),
    grouped.record("qwen2", "Qwen2", (*parts.defaults(grouped.KEYS, QWEN), *grouped.WINDOWS), _qwen2, answers=OLDER),
    grouped.record(
        "qwen3",
        "Qwen3",
        (*parts.defaults(grouped.KEYS, QWEN | {"head_dim": 128}), grouped.ATTENTION_BIAS, *grouped.WINDOWS),
        _qwen3,
        answers=OLDER,
    ),
)
