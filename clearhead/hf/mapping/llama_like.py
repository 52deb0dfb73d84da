"""What the many decoders share that followed arXiv 2302.13971: its config keys, its names for tensors, its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, rope
from clearhead.hf.mapping.config import value_at
from clearhead.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import Rule, module_rule

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
ATTENTION_BIAS = Key("attention_bias", False, f"{SELF}.bias.query")
MLP_BIAS = Key("mlp_bias", False, f"{FEED}.bias_in")

RULES: tuple[Rule, ...] = (
    module_rule("embed_tokens", "decoder.embedding.table"),
    module_rule("layers.{layer}.input_layernorm", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule("layers.{layer}.self_attn.q_proj", f"{SELF}.query"),
    module_rule("layers.{layer}.self_attn.k_proj", f"{SELF}.key"),
    module_rule("layers.{layer}.self_attn.v_proj", f"{SELF}.value"),
    module_rule("layers.{layer}.self_attn.o_proj", f"{SELF}.out"),
    module_rule("layers.{layer}.self_attn.q_norm", f"{SELF}.query_norm"),
    module_rule("layers.{layer}.self_attn.k_norm", f"{SELF}.key_norm"),
    module_rule("layers.{layer}.post_attention_layernorm", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("layers.{layer}.mlp.gate_proj", f"{FEED}.gate"),
    module_rule("layers.{layer}.mlp.up_proj", f"{FEED}.up"),
    module_rule("layers.{layer}.mlp.down_proj", f"{FEED}.down"),
    module_rule("norm", "decoder.final_norm"),
)
IGNORED = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def replaced(keys: Sequence[Key], *others: Key) -> tuple[Key, ...]:
    """The same keys, with others in place of those of their names, or after them."""
    return tuple({key.name: key for key in (*keys, *others)}.values())


def without(keys: Sequence[Key], *names: str) -> tuple[Key, ...]:
    """The same keys but for a few."""
    return tuple(key for key in keys if key.name not in names)


def first_attention(model: spec.Model) -> spec.Attention:
    """The self-attention of the first layer."""
    found = value_at(model, SELF)
    assert isinstance(found, spec.Attention)
    return found


def scale(model: spec.Model) -> float:
    """What multiplies the scores of the first layer."""
    node = first_attention(model)
    return node.head_size**-0.5 if node.scale is None else node.scale


def attention(c: Values, mask: Mask, **choices: Any) -> spec.Attention:
    """Self-attention as the shared keys say; choices are other fields of the node."""
    heads = c["num_attention_heads"]
    head_size = c["head_dim"] or c["hidden_size"] // heads
    usual: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": c["num_key_value_heads"] or heads,
        "head_size": head_size,
        "mask": mask,
        "dropout": c["attention_dropout"],
    }
    if "position" not in choices:
        usual["position"] = rope.read(c, head_size=head_size)
    return spec.Attention.model_validate(usual | choices)


def feed_forward(
    c: Values, *, bias: bool = False, gated: bool = True, size: str = "intermediate_size", act: str = "hidden_act"
) -> spec.FeedForward:
    """The network as the shared keys say; size and activation may stand under other names."""
    return spec.FeedForward(size=c[size], activation=c[act], gated=gated, bias_in=bias, bias_out=bias)


def decoder(
    c: Values,
    layers: Sequence[spec.Layer],
    norm: blocks.AnyNorm,
    *,
    scale: float = 1.0,
    rounding: Literal["none", "weights"] = "none",
    dropout: float = 0.0,
) -> spec.Model:
    """A decoder without positions at the embedding."""
    table = spec.Table(rows=c["vocab_size"])
    embedding = spec.Embedding(table=table, scale=scale, scale_rounding=rounding, dropout=dropout)
    stack = spec.Stack(width=c["hidden_size"], embedding=embedding, layers=tuple(layers), final_norm=norm)
    return spec.Model(decoder=stack, initialization=blocks.INITIALIZATION)


def masks(c: Values, windows: Sequence[bool]) -> list[Mask]:
    """The mask of each layer: `layer_types` where the config has it, else the pattern that is given.

    Raises:
        InputError: a kind of layer that is not known, a list of another length, or a window without a size.
    """
    types = c.get("layer_types")
    if types is not None:
        if len(types) != c["num_hidden_layers"]:
            raise InputError(
                f"config.json: layer_types has {len(types)} entries, num_hidden_layers {c['num_hidden_layers']}"
            )
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise InputError(f"config.json: layers of the kind {', '.join(unknown)} are not supported")
        windows = [kind == "sliding_attention" for kind in types]
    size = c["sliding_window"]
    if any(windows) and not size:
        raise InputError("config.json: some layers slide, but sliding_window says not how far")
    return [spec.Window(before=size - 1, after=0) if is_window else spec.Causal() for is_window in windows]


def layer_masks(model: spec.Model) -> list[Any]:
    """The mask of each layer of the decoder."""
    assert model.decoder is not None
    functions = [layer.steps[0].branches[0].function for layer in model.decoder.layers]
    return [function.mask for function in functions if isinstance(function, spec.Attention)]


def window(model: spec.Model) -> int | None:
    """How many keys a window has, the query's own with them; None where no layer has one."""
    return next((mask.before + 1 for mask in layer_masks(model) if isinstance(mask, spec.Window)), None)


def layer_types(model: spec.Model) -> list[str]:
    """The kinds of the layers in the words of configs."""
    slides = [isinstance(mask, spec.Window) for mask in layer_masks(model)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def windows(c: Values) -> list[Mask]:
    """The masks where a window counts only if it is switched on, and then from a layer upwards."""
    slides = c["use_sliding_window"] and c["sliding_window"] is not None
    return masks(c, [slides and index >= c["max_window_layers"] for index in range(c["num_hidden_layers"])])


WINDOWS = (
    Key("use_sliding_window", False, lambda model: window(model) is not None),
    Key("sliding_window", 4096, window, is_nullable=True),
    Key("max_window_layers", 28),
    Key("layer_types", None, layer_types, kind=list),
)


def record(
    model_type: str,
    name: str,
    keys: tuple[Key, ...],
    model: Callable[[Values], spec.Model],
    *,
    rules: tuple[Rule, ...] = RULES,
    inert: tuple[str, ...] = (),
    only: tuple[Fixed, ...] = (),
    classes: tuple[Variant, ...] | None = None,
    ignored: tuple[str, ...] = (),
    answers: str | None = None,
) -> Family:
    """A family whose files have the shared names; the names of its classes begin with `name`.

    Args:
        model_type, keys, model, rules, inert, only, ignored: as in `Record`.
        name: how the names of the classes begin.
        classes: the variants, where they are others than usual.
        answers: the prefix of the class that finds answers; None: there is none.
    """
    found = classes or variants(name)
    if answers is not None:
        found = (*found, blocks.answering(f"{name}ForQuestionAnswering", prefix=answers))
    return Family(
        model_type=model_type,
        keys=keys,
        model=model,
        rules=rules,
        variants=found,
        only=(blocks.CAUSAL, *only),
        inert=inert,
        prefix="model.",
        table="embed_tokens.weight",
        ignored=(*IGNORED, *ignored),
    )


def variants(
    name: str, *, head_bias: bool = False, words: Callable[[Values], spec.Head] | None = None
) -> tuple[Variant, ...]:
    """The classes of a family of this kind, whose names begin alike; words: its own head over the vocabulary."""
    return (
        blocks.writing(f"{name}ForCausalLM", words, bias=head_bias),
        blocks.classifying(f"{name}ForSequenceClassification"),
        blocks.tagging(f"{name}ForTokenClassification", by="score"),
        blocks.bare(f"{name}Model"),
    )
