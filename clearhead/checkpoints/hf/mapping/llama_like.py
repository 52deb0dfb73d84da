"""Helpers for families that are similar to Llama: config keys, tensor names and layers.

Source: arXiv 2302.13971; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks, layer_types, rope
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, attention_rules, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)
Mask = spec.Causal | spec.Window

KEYS = (
    Key("vocab_size", 32000, "decoder.embedding.table.rows"),
    Key("hidden_size", 4096, "decoder.width"),
    Key("intermediate_size", 11008, f"{FEED}.size"),
    Key("num_hidden_layers", 32, blocks.count_layers("decoder")),
    Key("num_attention_heads", 32, f"{SELF}.num_heads"),
    Key("num_key_value_heads", None, f"{SELF}.num_kv_heads", kind=int),
    Key("head_dim", None, f"{SELF}.head_size", kind=int),
    Key("hidden_act", "silu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("rms_norm_eps", 1e-6, "decoder.final_norm.eps"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    blocks.tying(False),
    *rope.keys(10000.0, SELF, 2048),
)
ROPE_KEYS = ("rope_theta", "rope_scaling", "max_position_embeddings")
"""Config keys whose values come from a layer with rotary positions."""
ATTENTION_BIAS = Key("attention_bias", False, f"{SELF}.bias.query")
MLP_BIAS = Key("mlp_bias", False, f"{FEED}.bias_in")
LAYER_TYPES = Key("layer_types", None, layer_types.types_of(), kind=list[str])

RULES: tuple[Rule, ...] = (
    module_rule("embed_tokens", "decoder.embedding.table"),
    module_rule("layers.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    *attention_rules("layers.{layer}.self_attn", SELF),
    module_rule("layers.{layer}.self_attn.q_norm", f"{SELF}.query_norm"),
    module_rule("layers.{layer}.self_attn.k_norm", f"{SELF}.key_norm"),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 1)}.pre"),
    *(module_rule(f"layers.{{layer}}.mlp.{name}_proj", f"{FEED}.{name}") for name in ("gate", "up", "down")),
    module_rule("norm", "decoder.final_norm"),
)
IGNORED = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def keys(defaults: Mapping[str, Any], *others: Key, without: Sequence[str] = ()) -> tuple[Key, ...]:
    """Return Llama's config keys with new defaults, plus `others`, minus those named in `without`."""
    return blocks.derive(KEYS, defaults, *others, without=without)


def rules_without(*fragments: str) -> tuple[Rule, ...]:
    """Return Llama's tensor rules except those whose tensor name contains one of the fragments."""
    return tuple(rule for rule in RULES if not any(fragment in rule.theirs[0] for fragment in fragments))


def first_attention(model: spec.Model) -> spec.Attention:
    """Return the self-attention node of a decoder's first layer."""
    node = value_at(model, SELF)
    assert isinstance(node, spec.Attention)
    return node


def has_query_key_norm(model: spec.Model) -> bool:
    """Return whether the attention of a decoder normalizes queries and keys."""
    return first_attention(model).query_key_norm is not None


def scale(model: spec.Model) -> float:
    """Return the factor on the attention scores of a decoder's first layer."""
    node = first_attention(model)
    return node.head_size**-0.5 if node.scale is None else node.scale


def head_size(c: Values) -> int:
    """Return the size of an attention head from config values."""
    size: int = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    return size


def attention(c: Values, **fields: Unpack[blocks.AttentionFields]) -> spec.Attention:
    """Return the self-attention that Llama's config keys describe, causal by default; `fields` replace its fields."""
    heads = c["num_attention_heads"]
    defaults: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": c["num_key_value_heads"] or heads,
        "head_size": head_size(c),
        "mask": spec.Causal(),
        "dropout": c["attention_dropout"],
    }
    if "position" not in fields:
        defaults["position"] = rope.read(c, head_size=head_size(c))
    if "bias" not in fields and "attention_bias" in c:
        defaults["bias"] = blocks.biases(c["attention_bias"])
    return spec.Attention(**(defaults | dict(fields)))


def feed_forward(
    c: Values, *, bias: bool = False, gated: bool = True, size: str = "intermediate_size", act: str = "hidden_act"
) -> spec.FeedForward:
    """Return the feed-forward network of config values; `size` and `act` name the keys of its width and activation."""
    return spec.FeedForward(size=c[size], activation=c[act], gated=gated, bias_in=bias, bias_out=bias)


def decoder(c: Values, layers: Sequence[spec.Layer], norm: blocks.AnyNorm) -> spec.Model:
    """Return the spec of a decoder without a head, whose embedding is the token embedding alone."""
    return blocks.one_stack("decoder", c["hidden_size"], c["vocab_size"], layers, norm)


def masks(c: Values, pattern: Sequence[bool] | None = None) -> list[Mask]:
    """Return the attention mask of each layer, causal or a sliding window, from config values.

    Args:
        c: the config values; `layer_types` takes precedence over the pattern.
        pattern: True for each layer with a window. None means all layers if `sliding_window` has a size, else none.

    Raises:
        InputError: a type of layer is not known, the list has a wrong length, or a window has no size.
    """
    size = c["sliding_window"]
    windows = layer_types.read(c, pattern or [size is not None] * c["num_hidden_layers"])
    if any(windows) and not size:
        raise InputError("config.json: some layers have a window, but sliding_window, its size, is missing")
    return [spec.Window(before=size - 1, after=0) if is_window else spec.Causal() for is_window in windows]


def window(model: spec.Model) -> int | None:
    """Return the size of a decoder's attention window in tokens, query included; None if no layer has a window."""
    before = layer_types.window(model)
    return None if before is None else before + 1


def masks_if_enabled(c: Values) -> list[Mask]:
    """Return the attention mask of each layer, for families whose windows need `use_sliding_window`.

    Windows begin at layer `max_window_layers`."""
    is_on = c["use_sliding_window"] and c["sliding_window"] is not None
    first = c.get("max_window_layers", 0)
    return masks(c, [is_on and index >= first for index in range(c["num_hidden_layers"])])


USE_WINDOW = Key("use_sliding_window", False, lambda model: window(model) is not None)
WINDOWS = (
    USE_WINDOW,
    Key("sliding_window", 4096, window, is_nullable=True),
    Key("max_window_layers", 28),
    LAYER_TYPES,
)


def family(
    model_type: str,
    name: str,
    keys: tuple[Key, ...],
    model: Callable[[Values], spec.Model],
    *,
    rules: tuple[Rule, ...] = RULES,
    inert: tuple[str, ...] = (),
    fixed: tuple[Fixed, ...] = (),
    variants: tuple[Variant, ...] | None = None,
    answer_prefix: str | None = None,
) -> Family:
    """Return a family whose tensors are named as in Llama.

    Args:
        model_type, keys, model, rules, inert, fixed: same as in `Family`.
        name: the start of the class names, such as "Llama".
        variants: the classes. None means ForCausalLM, ForSequenceClassification, ForTokenClassification and Model.
        answer_prefix: the prefix of tensors in the class for question answering. None means no such class.
    """
    tasks: tuple[blocks.DecoderTask, ...] = ("generate", "classify", "tag", "embed")
    all_variants = blocks.decoder_variants(name, *tasks, tag_output="score") if variants is None else variants
    if answer_prefix is not None:
        all_variants = (*all_variants, blocks.question_answering(name, prefix=answer_prefix))
    return Family(
        model_type=model_type,
        keys=keys,
        model=model,
        rules=rules,
        variants=all_variants,
        fixed=(blocks.CAUSAL, *fixed),
        inert=inert,
        prefix="model.",
        table="embed_tokens.weight",
        ignored=IGNORED,
    )
