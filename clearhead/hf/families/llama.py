"""Llama and decoders that differ from it in a few choices: Mistral, Qwen2, Qwen3.

Source: arXiv 2302.13971, section 2.2; windows arXiv 2310.06825, section 2; norms of query and key arXiv 2505.09388,
section 2. Tensor names are those of released checkpoints.
"""

from __future__ import annotations

from typing import Any

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.family import Key, Values


def _model(c: Values, masks: list[llama_like.Mask], **fields: Any) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    network = llama_like.feed_forward(c, bias=c.get("mlp_bias", False))
    layers = [blocks.layer(norm, llama_like.attention(c, mask, **fields), network) for mask in masks]
    return llama_like.decoder(c, layers, norm)


def _llama(c: Values) -> spec.Model:
    return _model(c, [spec.Causal()] * c["num_hidden_layers"])


def _mistral(c: Values) -> spec.Model:
    return _model(c, llama_like.masks(c), bias=blocks.biases(False))


def _qwen2(c: Values) -> spec.Model:
    return _model(c, llama_like.switched_masks(c), bias=spec.Biases(query=True, key=True, value=True, out=False))


def _qwen3(c: Values) -> spec.Model:
    both = spec.QueryKeyNorm(norm=spec.RMSNorm(eps=c["rms_norm_eps"]))
    return _model(c, llama_like.switched_masks(c), query_key_norm=both)


QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
MISTRAL_WINDOW = Key("sliding_window", 4096, llama_like.window, is_nullable=True)
# The classes that find answers kept a prefix that the others dropped.
OLDER = "transformer."

FAMILIES = (
    llama_like.family(
        "llama",
        "Llama",
        llama_like.keys({}, llama_like.ATTENTION_BIAS, llama_like.MLP_BIAS),
        _llama,
        inert=("pretraining_tp",),
        answer_prefix=OLDER,
    ),
    llama_like.family("mistral", "Mistral", llama_like.keys(MISTRAL, MISTRAL_WINDOW), _mistral, answer_prefix="model."),
    llama_like.family("qwen2", "Qwen2", llama_like.keys(QWEN, *llama_like.WINDOWS), _qwen2, answer_prefix=OLDER),
    llama_like.family(
        "qwen3",
        "Qwen3",
        llama_like.keys(QWEN | {"head_dim": 128}, llama_like.ATTENTION_BIAS, *llama_like.WINDOWS),
        _qwen3,
        answer_prefix=OLDER,
    ),
)
