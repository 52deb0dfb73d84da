"""StableLM: LayerNorm, and a quarter of each head rotates; the branches one after the other or side by side.

Source: arXiv 2402.17834, section 2.2; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.mapping import blocks, llama_like, rope
from clearhead.hf.mapping.family import Key, Values
from clearhead.hf.mapping.llama_like import SELF
from clearhead.hf.mapping.tensor_rules import Rule, Stacked, module_rule, tensor_rule


def _model(c: Values) -> spec.Model:
    norm, drop = spec.LayerNorm(eps=c["layer_norm_eps"]), c["hidden_dropout"]
    size, has_bias = c["hidden_size"] // c["num_attention_heads"], c["use_qkv_bias"]
    each = spec.QueryKeyNorm(norm=spec.LayerNorm(eps=c["layer_norm_eps"], bias=False), per_head=True)
    attention = llama_like.attention(
        c.replaced(head_dim=None),
        spec.Causal(),
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


def _branch(model: spec.Model) -> spec.Branch:
    assert model.decoder is not None
    return model.decoder.layers[0].steps[-1].branches[-1]


def _network(model: spec.Model) -> spec.FeedForward:
    function = _branch(model).function
    assert isinstance(function, spec.FeedForward)
    return function


DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
KEYS = (
    *llama_like.replaced(
        llama_like.without(blocks.defaults(llama_like.KEYS, DEFAULTS), "rms_norm_eps", "head_dim"),
        Key("intermediate_size", 6912, lambda model: _network(model).size),
        Key("hidden_act", "silu", lambda model: _network(model).activation, names=blocks.ACTIVATIONS),
    ),
    Key("layer_norm_eps", 1e-5, "decoder.final_norm.eps"),
    Key("partial_rotary_factor", 0.25, rope.share(SELF)),
    Key("use_qkv_bias", False, f"{SELF}.bias.query"),
    Key("qk_layernorm", False, lambda model: llama_like.first_attention(model).query_key_norm is not None),
    Key(
        "use_parallel_residual",
        False,
        lambda model: model.decoder is not None and len(model.decoder.layers[0].steps) == 1,
    ),
    Key("hidden_dropout", 0.0, lambda model: _branch(model).dropout),
)


def _rules() -> tuple[Rule, ...]:
    beside = blocks.function("decoder", 0, 1)
    return (
        *llama_like.RULES,
        module_rule("layers.{layer}.input_layernorm", "decoder.layers.{layer}.steps.0.pre"),
        *(
            tensor_rule(
                f"layers.{{layer}}.self_attn.{name}_layernorm.norms.{{head}}.weight", f"{SELF}.{ours}", Stacked()
            )
            for name, ours in (("q", "query_norm.weight"), ("k", "key_norm.weight"))
        ),
        *(module_rule(f"layers.{{layer}}.mlp.{name}_proj", f"{beside}.{name}") for name in ("gate", "up", "down")),
    )


FAMILIES = (
    llama_like.record(
        "stablelm",
        "StableLm",
        KEYS,
        _model,
        rules=tuple(rule for rule in _rules() if not rule.theirs[0].endswith(("q_norm", "k_norm"))),
    ),
)
