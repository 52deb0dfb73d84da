"""StableLM: LayerNorm, a rotated quarter of each head, and branches one after the other or in parallel.

Source: arXiv 2402.17834, section 2.2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.checkpoints.hf.mapping.llama_like import SELF
from clearhead.checkpoints.hf.mapping.tensor_rules import StackNumbered, module_rule, tensor_rule

FEED, PARALLEL = blocks.FEED_FORWARD, blocks.function("decoder", 0, 1)


def _model(c: Values) -> spec.Model:
    norm, drop = spec.LayerNorm(eps=c["layer_norm_eps"]), c["hidden_dropout"]
    size, has_bias = c["hidden_size"] // c["num_attention_heads"], c["use_qkv_bias"]
    each = spec.QueryKeyNorm(norm=spec.LayerNorm(eps=c["layer_norm_eps"], bias=False), per_head=True)
    attention = llama_like.attention(
        c.with_values(head_dim=None),
        position=rope.read(c, head_size=size, partial=c["partial_rotary_factor"], is_partial=True),
        bias=spec.Biases(query=has_bias, key=has_bias, value=has_bias, out=False),
        query_key_norm=each if c["qk_layernorm"] else None,
    )
    network = llama_like.feed_forward(c)
    if c["use_parallel_residual"]:
        branches = (spec.Branch(function=attention), spec.Branch(function=network, dropout=drop))
        steps: tuple[spec.Step, ...] = (spec.Step(branches=branches, pre=norm),)
    else:
        steps = (blocks.pre(norm, attention), blocks.pre(norm, network, drop))
    return llama_like.decoder(c, [spec.Layer(steps=steps)] * c["num_hidden_layers"], norm)


DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
KEYS = llama_like.keys(
    DEFAULTS,
    Key("intermediate_size", 6912, f"{FEED}.size"),
    Key("hidden_act", "silu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("partial_rotary_factor", 0.25, rope.rotary_share(SELF)),
    Key("use_qkv_bias", False, f"{SELF}.bias.query"),
    Key("qk_layernorm", False, llama_like.has_query_key_norm),
    Key("use_parallel_residual", False, blocks.is_parallel),
    Key("hidden_dropout", 0.0, "decoder.layers.0.steps.-1.branches.-1.dropout"),
    without=("rms_norm_eps", "head_dim"),
)
NORMS = {"q_layernorm": "query_norm", "k_layernorm": "key_norm"}
RULES = (
    *llama_like.rules_without("q_norm", "k_norm"),
    module_rule("layers.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
    *(
        tensor_rule(
            f"layers.{{layer}}.self_attn.{name}.norms.{{head}}.weight", f"{SELF}.{ours}.weight", StackNumbered()
        )
        for name, ours in NORMS.items()
    ),
    *(module_rule(f"layers.{{layer}}.mlp.{name}_proj", f"{PARALLEL}.{name}") for name in ("gate", "up", "down")),
)

FAMILIES = (llama_like.family("stablelm", "StableLm", KEYS, _model, rules=RULES),)
