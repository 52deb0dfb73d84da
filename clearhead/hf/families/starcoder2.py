"""StarCoder2: LayerNorm, biases everywhere and a plain network in the layer with grouped keys and windows.

Source: arXiv 2402.19173, section 5.1; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like
from clearhead.hf.mapping.family import Fixed, Key, Values
from clearhead.hf.mapping.llama_like import FEED
from clearhead.hf.mapping.tensor_rules import module_rule


def _model(c: Values) -> spec.Model:
    norm, drop = spec.LayerNorm(eps=c["norm_epsilon"]), c["residual_dropout"]
    network = llama_like.feed_forward(c, bias=c["use_bias"], gated=False)
    masks = llama_like.masks(c, [c["sliding_window"] is not None] * c["num_hidden_layers"])
    layers = []
    for mask in masks:
        attention = llama_like.attention(c, mask, bias=blocks.biases(c["use_bias"]))
        layers.append(spec.Layer(steps=(blocks.pre(norm, attention, drop), blocks.pre(norm, network, drop))))
    return llama_like.decoder(c, layers, norm, dropout=c["embedding_dropout"])


DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

FAMILIES = (
    llama_like.record(
        "starcoder2",
        "Starcoder2",
        (
            *blocks.defaults(llama_like.without(llama_like.KEYS, "rms_norm_eps"), DEFAULTS),
            Key("norm_epsilon", 1e-5, "decoder.final_norm.eps"),
            Key("use_bias", True, f"{FEED}.bias_in"),
            Key("sliding_window", None, llama_like.window, kind=int),
            Key("residual_dropout", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
            Key("embedding_dropout", 0.0, "decoder.embedding.dropout"),
        ),
        _model,
        rules=(
            *(rule for rule in llama_like.RULES if ".mlp." not in rule.theirs[0]),
            module_rule("layers.{layer}.mlp.c_fc", f"{FEED}.up"),
            module_rule("layers.{layer}.mlp.c_proj", f"{FEED}.down"),
        ),
        only=(
            Fixed("mlp_type", ("default",), "the networks would differ"),
            Fixed("norm_type", ("layer_norm",), "the norms would differ"),
        ),
        # What the first release also wrote; the value that is read stands under another name.
        inert=("activation_function",),
    ),
)
