"""T5Gemma: two stacks of Gemma 2's layers, the second with attention to the first, each with a config of its own.

Its classes for labels are not among the variants: in the transformers library the state that the label of a text is
read from is another one where the text is padded, so that there is no one answer to agree with.

Source: arXiv 2504.06225, section 2; the layout is that of the published files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import blocks, llama_like, rope
from clearhead.hf.mapping import config as configs
from clearhead.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import Rule, module_rule

Side = Literal["encoder", "decoder"]
SIDES: tuple[Side, ...] = ("encoder", "decoder")


def _last(side: Side) -> int:
    return 1 if side == "encoder" else 2


def _masks(c: Values, side: Side) -> list[spec.Mask]:
    masks = llama_like.masks(c, [index % 2 == 0 for index in range(c["num_hidden_layers"])])
    if side == "decoder":
        return list(masks)
    # In the encoder a window reaches as far on both sides, and one token farther.
    reach = c["sliding_window"]
    return [spec.Window(before=reach, after=reach) if isinstance(mask, spec.Window) else spec.Full() for mask in masks]


def _stack(c: Values, side: Side) -> spec.Stack:
    norm, drop = spec.RMSNorm(eps=c["rms_norm_eps"], unit_offset=True), c["dropout_rate"]

    def attention(mask: spec.Mask, source: Literal["self", "memory"]) -> spec.Attention:
        return spec.Attention(
            source=source,
            num_heads=c["num_attention_heads"],
            num_kv_heads=c["num_key_value_heads"],
            head_size=c["head_dim"],
            mask=mask,
            position=rope.read(c, head_size=c["head_dim"]) if source == "self" else None,
            scale=c["query_pre_attn_scalar"] ** -0.5,
            bias=blocks.biases(c["attention_bias"]),
            soft_cap=c["attn_logit_softcapping"],
            dropout=c["attention_dropout"],
        )

    network = spec.FeedForward(
        size=c["intermediate_size"],
        activation=c["hidden_activation"],
        gated=True,
        bias_in=False,
        bias_out=False,
        dropout=drop,
    )

    def layer(mask: spec.Mask) -> spec.Layer:
        memory = [attention(spec.Full(), "memory")] if side == "decoder" else []
        functions: list[blocks.AnyFunction] = [attention(mask, "self"), *memory, network]
        return spec.Layer(steps=tuple(blocks.pre(norm, function, drop, post=norm) for function in functions))

    embedding = spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        scale=c["hidden_size"] ** 0.5,
        scale_rounding="weights",
        dropout=drop,
    )
    layers = tuple(layer(mask) for mask in _masks(c, side))
    return spec.Stack(width=c["hidden_size"], embedding=embedding, layers=layers, final_norm=norm)


def _values(c: Values, side: Side) -> Values:
    """The values of one stack; rates of dropout are those of the whole."""
    reading = configs.parse(STACKS[side], c[side] or {})
    if reading.faults:
        raise InputError.from_faults(reading.faults, subject=f"config.json: {side}")
    return reading.values.replaced(dropout_rate=c["dropout_rate"], attention_dropout=c["attention_dropout"])


def _model(c: Values) -> spec.Model:
    encoder, decoder = (_stack(_values(c, side), side) for side in SIDES)
    return spec.Model(encoder=encoder, decoder=decoder, initialization=blocks.INITIALIZATION)


def _words(c: Values) -> spec.Head:
    own = _values(c, "decoder")
    weight = spec.Reference(path="decoder.embedding.table") if c["tie_word_embeddings"] else None
    scores = spec.Linear(size=own["vocab_size"], bias=False, weight=weight)
    cap = own["final_logit_softcapping"]
    return spec.Head(layers=(scores,) if cap is None else (scores, spec.SoftCap(value=cap)))


# --- what goes back to a config -------------------------------------------------------------------------------


def _cap(model: spec.Model) -> float | None:
    last = model.head.layers[-1] if model.head else None
    return last.value if isinstance(last, spec.SoftCap) else None


def _attentions(model: spec.Model, side: Side) -> list[spec.Attention]:
    stack = model.encoder if side == "encoder" else model.decoder
    functions = [layer.steps[0].branches[0].function for layer in (stack.layers if stack else ())]
    return [function for function in functions if isinstance(function, spec.Attention)]


def _kinds(side: Side) -> Callable[[spec.Model], list[str]]:
    def found(model: spec.Model) -> list[str]:
        slides = [isinstance(one.mask, spec.Window) for one in _attentions(model, side)]
        return ["sliding_attention" if one else "full_attention" for one in slides]

    return found


def _window(side: Side) -> Callable[[spec.Model], int | None]:
    def found(model: spec.Model) -> int | None:
        windows = [one.mask.before for one in _attentions(model, side) if isinstance(one.mask, spec.Window)]
        return windows[0] + (side == "decoder") if windows else None

    return found


def _scalar(side: Side) -> Callable[[spec.Model], int]:
    def found(model: spec.Model) -> int:
        first = _attentions(model, side)[0]
        return first.head_size if first.scale is None else round(first.scale**-2)

    return found


def _said(side: Side) -> Callable[[spec.Model], dict[str, Any]]:
    """The config of one stack."""

    def found(model: spec.Model) -> dict[str, Any]:
        said: dict[str, Any] = {"model_type": "t5_gemma_module", "is_decoder": side == "decoder"}
        for key in STACKS[side].keys:
            try:
                value = configs.value_at(model, key.at) if key.at is not None else None
            except LookupError:
                continue
            if key.names is not None:
                value = next((theirs for theirs, ours in key.names.items() if ours == value), None)
            if value is not None or key.is_nullable:
                said[key.name] = value
        return said

    return found


def _keys(side: Side) -> tuple[Key, ...]:
    own, feed = blocks.function(side, 0), blocks.function(side, _last(side))
    return (
        Key("vocab_size", 256000, f"{side}.embedding.table.rows"),
        Key("hidden_size", 2304, f"{side}.width"),
        Key("intermediate_size", 9216, f"{feed}.size"),
        Key("num_hidden_layers", 26, blocks.count_layers(side)),
        Key("num_attention_heads", 8, f"{own}.num_heads"),
        Key("num_key_value_heads", 4, f"{own}.num_kv_heads"),
        Key("head_dim", 256, f"{own}.head_size"),
        Key("hidden_activation", "gelu_pytorch_tanh", f"{feed}.activation", names=blocks.ACTIVATIONS),
        Key("rms_norm_eps", 1e-6, f"{side}.final_norm.eps"),
        Key("attention_bias", False, f"{own}.bias.query"),
        Key("query_pre_attn_scalar", 256, _scalar(side)),
        Key("sliding_window", 4096, _window(side), is_nullable=True),
        Key("layer_types", None, _kinds(side), kind=list),
        Key("attn_logit_softcapping", 50.0, f"{own}.soft_cap", is_nullable=True),
        Key("final_logit_softcapping", 30.0, _cap, is_nullable=True),
        *rope.keys(10000.0, own, 8192),
    )


STACKS = {
    side: Family(
        model_type=f"the {side} of t5gemma",
        keys=_keys(side),
        model=lambda c: spec.Model(),
        rules=(),
        variants=(),
        only=(Fixed("is_decoder", (side == "decoder",), "the stacks would change places"),),
        # Of these the config of the whole decides.
        inert=("attention_dropout", "cross_attention_hidden_size", "dropout_rate", "tie_word_embeddings"),
    )
    for side in SIDES
}


def _rules(side: Side) -> tuple[Rule, ...]:
    theirs, last = f"{side}.layers.{{layer}}", _last(side)
    maps = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    steps = {"self_attn": 0, "feedforward": last} | ({"cross_attn": 1} if side == "decoder" else {})
    attentions = {name: step for name, step in steps.items() if name != "feedforward"}
    network = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    return (
        module_rule(f"{side}.embed_tokens", f"{side}.embedding.table"),
        module_rule(f"{side}.norm", f"{side}.final_norm"),
        *(
            module_rule(f"{theirs}.{place}_{name}_layernorm", f"{blocks.branch(side, step)}.{place}")
            for name, step in steps.items()
            for place in ("pre", "post")
        ),
        *(
            module_rule(f"{theirs}.{name}.{one}", f"{blocks.function(side, step)}.{ours}")
            for name, step in attentions.items()
            for one, ours in maps.items()
        ),
        *(module_rule(f"{theirs}.mlp.{one}", f"{blocks.function(side, last)}.{ours}") for one, ours in network.items()),
    )


FAMILIES = (
    Family(
        model_type="t5gemma",
        keys=(
            *(Key(side, None, _said(side), kind=dict) for side in SIDES),
            Key("dropout_rate", 0.0, "encoder.embedding.dropout"),
            Key("attention_dropout", 0.0, f"{blocks.function('encoder', 0)}.dropout"),
            blocks.tying(True),
        ),
        model=_model,
        rules=(*_rules("encoder"), *_rules("decoder")),
        variants=(
            Variant(
                ("T5GemmaForConditionalGeneration",),
                "denoise",
                _words,
                (module_rule("lm_head.out_proj", "head.layers.0"),),
                output="lm_head.out_proj.weight",
            ),
            blocks.bare("T5GemmaModel"),
        ),
        inert=("vocab_size", "classifier_dropout_rate"),
        prefix="model.",
        table="decoder.embed_tokens.weight",
        ignored=llama_like.IGNORED,
    ),
)
