"""Llama and decoders that differ from it in a few choices: Mistral, Qwen2, Qwen3.

Source: arXiv 2302.13971, section 2.2; windows arXiv 2310.06825, section 2; norms of query and key arXiv 2505.09388,
section 2. Tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.family import Key, Values


def _model(c: Values, attentions: list[spec.Attention]) -> spec.Model:
    norm, network = spec.RMSNorm(eps=c["rms_norm_eps"]), llama_like.feed_forward(c, bias=c.get("mlp_bias", False))
    return llama_like.decoder(c, [blocks.layer(norm, attention, network) for attention in attentions], norm)


def _llama(c: Values) -> spec.Model:
    return _model(c, [llama_like.attention(c)] * c["num_hidden_layers"])


def _mistral(c: Values) -> spec.Model:
    return _model(c, [llama_like.attention(c, mask=mask, bias=blocks.biases(False)) for mask in llama_like.masks(c)])


def _qwen2(c: Values) -> spec.Model:
    bias = spec.Biases(query=True, key=True, value=True, out=False)
    return _model(c, [llama_like.attention(c, mask=mask, bias=bias) for mask in llama_like.masks_if_enabled(c)])


def _qwen3(c: Values) -> spec.Model:
    both = spec.QueryKeyNorm(norm=spec.RMSNorm(eps=c["rms_norm_eps"]))
    return _model(
        c, [llama_like.attention(c, mask=mask, query_key_norm=both) for mask in llama_like.masks_if_enabled(c)]
    )


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
