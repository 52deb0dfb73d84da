"""Granite: the Llama layer with four constants, at the embedding, the scores, the branches and the outputs.

Source: arXiv 2408.13359 (maximal-update constants) and the released code; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.family import Key, Values


def _model(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    functions = (
        llama_like.attention(
            c, spec.Causal(), bias=blocks.biases(c["attention_bias"]), scale=float(c["attention_multiplier"])
        ),
        llama_like.feed_forward(c, bias=c["mlp_bias"]),
    )
    branches = [spec.Branch(function=one, pre=norm, scale=c["residual_multiplier"]) for one in functions]
    layer = spec.Layer(steps=tuple(spec.Step(branches=(branch,)) for branch in branches))
    return llama_like.decoder(c, [layer] * c["num_hidden_layers"], norm, scale=c["embedding_multiplier"])


def _divisor(model: spec.Model) -> float:
    words = model.head.layers[-1] if model.head else None
    if not isinstance(words, spec.Linear):
        raise LookupError("there are no outputs to divide")
    return 1 / words.scale


KEYS = (
    *llama_like.KEYS,
    llama_like.ATTENTION_BIAS,
    llama_like.MLP_BIAS,
    Key("embedding_multiplier", 1.0, "decoder.embedding.scale"),
    Key("attention_multiplier", 1.0, llama_like.scale),
    Key("residual_multiplier", 1.0, f"{blocks.branch('decoder', 0)}.scale"),
    Key("logits_scaling", 1.0, _divisor),
)
WORDS = blocks.words("decoder.embedding.table", scale=lambda c: 1 / c["logits_scaling"])

FAMILIES = (
    llama_like.record(
        "granite",
        "Granite",
        KEYS,
        _model,
        classes=tuple(one for one in llama_like.variants("Granite", words=WORDS) if one.task in ("generate", "embed")),
    ),
)
