"""nanochat: norms without weights, also after the embedding; RoPE before the query-key norm; squared ReLU; a soft cap.

Source: the class of transformers 5.23; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import FEED, SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import SwapHalves, module_rule


def _model(c: Values) -> spec.Model:
    norm = spec.RMSNorm(eps=c["rms_norm_eps"], weight=False)
    attention = llama_like.attention(c, query_key_norm=spec.QueryKeyNorm(norm=norm, after_rotation=True))
    layer = blocks.layer(norm, attention, llama_like.feed_forward(c, gated=False))
    layers = [layer] * c["num_hidden_layers"]
    return blocks.one_stack("decoder", c["hidden_size"], c["vocab_size"], layers, norm, norm=norm)


DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12,
    "num_attention_heads": 6, "hidden_act": "relu2",
}  # fmt: skip
KEYS = llama_like.keys(
    DEFAULTS,
    llama_like.ATTENTION_BIAS,
    Key("final_logit_softcapping", 15.0, blocks.in_head(spec.SoftCap, "value"), is_nullable=True),
)
RULES = (
    *llama_like.rules_without("layernorm", "_norm", "mlp", "q_proj", "k_proj"),
    # nanochat rotates by the negative angle, which is the core's rotation of heads with swapped halves.
    module_rule("layers.{layer}.self_attn.q_proj", f"{SELF}.query", SwapHalves()),
    module_rule("layers.{layer}.self_attn.k_proj", f"{SELF}.key", SwapHalves()),
    module_rule("layers.{layer}.mlp.fc1", f"{FEED}.up"),
    module_rule("layers.{layer}.mlp.fc2", f"{FEED}.down"),
)

FAMILIES = (
    llama_like.family(
        "nanochat",
        "NanoChat",
        KEYS,
        _model,
        rules=RULES,
        variants=blocks.decoder_variants("NanoChat", "generate", "embed"),
    ),
)
