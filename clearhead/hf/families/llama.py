"""Llama and those that differ from it in a few choices: Mistral, Qwen2, Qwen3.

Source: arXiv 2302.13971, section 2.2; windows arXiv 2310.06825, section 2; norms of query and key arXiv 2505.09388,
section 2. The layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.family import Key, Values


def _model(c: Values, masks: list[llama_like.Mask], *, attention: spec.Biases, mlp: bool, qk_norm: bool) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    both = spec.QueryKeyNorm(norm=norm) if qk_norm else None
    network = llama_like.feed_forward(c, bias=mlp)
    layers = [
        spec.Layer(
            steps=(
                blocks.pre(norm, llama_like.attention(c, mask, bias=attention, query_key_norm=both)),
                blocks.pre(norm, network),
            )
        )
        for mask in masks
    ]
    return llama_like.decoder(c, layers, norm)


def _llama(c: Values) -> spec.Model:
    masks: list[llama_like.Mask] = [spec.Causal()] * c["num_hidden_layers"]
    return _model(c, masks, attention=blocks.biases(c["attention_bias"]), mlp=c["mlp_bias"], qk_norm=False)


def _mistral(c: Values) -> spec.Model:
    masks = llama_like.masks(c, [c["sliding_window"] is not None] * c["num_hidden_layers"])
    return _model(c, masks, attention=blocks.biases(False), mlp=False, qk_norm=False)


def _qwen2(c: Values) -> spec.Model:
    bias = spec.Biases(query=True, key=True, value=True, out=False)
    return _model(c, llama_like.windows(c), attention=bias, mlp=False, qk_norm=False)


def _qwen3(c: Values) -> spec.Model:
    return _model(c, llama_like.windows(c), attention=blocks.biases(c["attention_bias"]), mlp=False, qk_norm=True)


QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
# Classes that find answers kept a prefix that the others left.
OLDER = "transformer."

FAMILIES = (
    llama_like.record(
        "llama",
        "Llama",
        (*llama_like.KEYS, llama_like.ATTENTION_BIAS, llama_like.MLP_BIAS),
        _llama,
        inert=("pretraining_tp",),
        answers=OLDER,
    ),
    llama_like.record(
        "mistral",
        "Mistral",
        (
            *blocks.defaults(llama_like.KEYS, MISTRAL),
            Key("sliding_window", 4096, llama_like.window, is_nullable=True),
        ),
        _mistral,
        answers="model.",
    ),
    llama_like.record(
        "qwen2", "Qwen2", (*blocks.defaults(llama_like.KEYS, QWEN), *llama_like.WINDOWS), _qwen2, answers=OLDER
    ),
    llama_like.record(
        "qwen3",
        "Qwen3",
        (*blocks.defaults(llama_like.KEYS, QWEN | {"head_dim": 128}), llama_like.ATTENTION_BIAS, *llama_like.WINDOWS),
        _qwen3,
        answers=OLDER,
    ),
)
