"""Granite: Llama's layers with constant factors on the embedding, the scores, the branches and the logits.

Source: arXiv 2408.13359 (maximal-update constants) and the released code; tensor names are those of released
checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.family import Key, Values


def _model(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"])
    attention = llama_like.attention(c, scale=float(c["attention_multiplier"]))
    nodes = (attention, llama_like.feed_forward(c, bias=c["mlp_bias"]))
    branches = [spec.Branch(function=node, pre=norm, scale=c["residual_multiplier"]) for node in nodes]
    layer = spec.Layer(steps=tuple(spec.Step(branches=(branch,)) for branch in branches))
    return blocks.one_stack(
        "decoder",
        c["hidden_size"],
        c["vocab_size"],
        [layer] * c["num_hidden_layers"],
        norm,
        scale=c["embedding_multiplier"],
    )


def _divisor(model: spec.Model) -> float:
    last = model.head.layers[-1] if model.head else None
    if not isinstance(last, spec.Linear):
        raise LookupError("there are no outputs to divide")
    return 1 / last.scale


KEYS = llama_like.keys(
    {},
    llama_like.ATTENTION_BIAS,
    llama_like.MLP_BIAS,
    Key("embedding_multiplier", 1.0, "decoder.embedding.scale"),
    Key("attention_multiplier", 1.0, llama_like.scale),
    Key("residual_multiplier", 1.0, f"{blocks.branch('decoder', 0)}.scale"),
    Key("logits_scaling", 1.0, _divisor),
)
HEAD = blocks.lm_head("decoder.embedding.table", scale=lambda c: 1 / c["logits_scaling"])
VARIANTS = blocks.decoder_variants("Granite", "generate", "embed", head=HEAD)

FAMILIES = (llama_like.family("granite", "Granite", KEYS, _model, variants=VARIANTS),)
