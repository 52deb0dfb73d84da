"""StarCoder2: LayerNorm, biases, feed-forward networks without gates, grouped-query attention and windows.

Source: arXiv 2402.19173, section 5.1; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.family import Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule


def _model(c: Values) -> spec.Model:
    norm, network = spec.LayerNorm(eps=c["norm_epsilon"]), llama_like.feed_forward(c, bias=c["use_bias"], gated=False)
    bias = blocks.biases(c["use_bias"])
    attentions = [llama_like.attention(c, mask=mask, bias=bias) for mask in llama_like.masks(c)]
    layers = [blocks.layer(norm, attention, network, dropout=c["residual_dropout"]) for attention in attentions]
    return blocks.one_stack("decoder", c["hidden_size"], c["vocab_size"], layers, norm, dropout=c["embedding_dropout"])


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
    llama_like.family(
        "starcoder2",
        "Starcoder2",
        llama_like.keys(
            DEFAULTS,
            Key("norm_epsilon", 1e-5, "decoder.final_norm.eps"),
            Key("use_bias", True, f"{FEED}.bias_in"),
            Key("sliding_window", None, llama_like.window, kind=int),
            Key("residual_dropout", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
            Key("embedding_dropout", 0.0, "decoder.embedding.dropout"),
            without=("rms_norm_eps",),
        ),
        _model,
        rules=(
            *llama_like.rules_without(".mlp."),
            module_rule("layers.{layer}.mlp.c_fc", f"{FEED}.up"),
            module_rule("layers.{layer}.mlp.c_proj", f"{FEED}.down"),
        ),
        fixed=(
            Fixed("mlp_type", ("default",), "other feed-forward networks are not supported"),
            Fixed("norm_type", ("layer_norm",), "other norms are not supported"),
        ),
        # A key of the first release; the classes read hidden_act instead.
        inert=("activation_function",),
    ),
)
