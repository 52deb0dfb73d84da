"""ModernBERT: norms without bias inside, gated networks, rotation, and windows in most layers.

Source: arXiv 2412.13663, section 2.1; the layout is that of the published files.
"""

from __future__ import annotations

from typing import Any

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.families.bert import FEED, SELF, TABLE
from clearhead.hf.mapping import blocks, rope
from clearhead.hf.mapping.family import Family, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import Rows, module_rule

FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}


def _kinds(c: Values) -> list[str]:
    """The kind of each layer: as listed, else every few layers a full one, the first with them."""
    count, kinds = c["num_hidden_layers"], c["layer_types"]
    if kinds is None:
        every = c["global_attn_every_n_layers"]
        if every < 1:
            raise InputError(f"config.json: global_attn_every_n_layers must be at least 1, got {every}")
        return [SLIDING if index % every else FULL for index in range(count)]
    if len(kinds) != count:
        raise InputError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers {count}")
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown:
        raise InputError(f"config.json: layers of the kind {', '.join(unknown)} are not supported")
    return list(kinds)


def _rotary(c: Values, kind: str, head_size: int) -> spec.Rotary:
    """Each kind of layer has an object of its own; an older one is of both, and so is what it scales."""
    given = (c["rope_parameters"] or {}).get(kind) or {}
    if not isinstance(given, dict):
        raise InputError(f"config.json: rope_parameters.{kind} must be an object")
    given = given | (c["rope_scaling"] or {})
    return rope.rotary(given, c, theta=c[THETAS[kind][0]], head_size=head_size, partial=1.0, is_partial=False)


def _norm(c: Values) -> spec.LayerNorm:
    return spec.LayerNorm(eps=c["norm_eps"], bias=c["norm_bias"])


def _model(c: Values) -> spec.Model:
    if c["layer_norm_eps"] not in (None, c["norm_eps"]):
        raise InputError(f"config.json: layer_norm_eps is {c['layer_norm_eps']}, but norm_eps {c['norm_eps']} is read")
    width, heads, norm = c["hidden_size"], c["num_attention_heads"], _norm(c)
    reach = c["local_attention"] // 2

    def layer(index: int, kind: str) -> spec.Layer:
        attention = spec.Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=width // heads,
            mask=spec.Full() if kind == FULL else spec.Window(before=reach, after=reach),
            position=_rotary(c, kind, width // heads),
            bias=blocks.biases(c["attention_bias"]),
            dropout=c["attention_dropout"],
        )
        bias = c["mlp_bias"]
        network = spec.FeedForward(
            size=c["intermediate_size"],
            activation=c["hidden_activation"],
            gated=True,
            bias_in=bias,
            bias_out=bias,
            dropout=c["mlp_dropout"],
        )
        # The embedding's norm stands before the first attention already.
        first = blocks.pre(norm if index else None, attention, c["attention_dropout"])
        return spec.Layer(steps=(first, blocks.pre(norm, network)))

    embedding = spec.Embedding(table=spec.Table(rows=c["vocab_size"]), norm=norm, dropout=c["embedding_dropout"])
    layers = tuple(layer(index, kind) for index, kind in enumerate(_kinds(c)))
    encoder = spec.Stack(width=width, embedding=embedding, layers=layers, final_norm=norm)
    return spec.Model(encoder=encoder, initialization=blocks.INITIALIZATION)


def _inner(c: Values) -> tuple[spec.HeadLayer, ...]:
    activation = spec.Activation(function=c["classifier_activation"])
    return spec.Linear(size=c["hidden_size"], bias=c["classifier_bias"]), activation, _norm(c)


def _masked(c: Values) -> spec.Head:
    weight = spec.Reference(path=TABLE) if c["tie_word_embeddings"] else None
    return spec.Head(layers=(*_inner(c), spec.Linear(size=c["vocab_size"], bias=c["decoder_bias"], weight=weight)))


def _sequence(c: Values) -> spec.Head:
    return spec.Head(layers=(spec.Pool(by=c["classifier_pooling"]), *_inner(c), spec.Linear(size=c.num_labels)))


def _token(c: Values) -> spec.Head:
    return spec.Head(layers=(*_inner(c), spec.Linear(size=c.num_labels)))


def _bounds(c: Values) -> spec.Head:
    return spec.Head(layers=(*_inner(c), spec.Linear(size=2)))


# --- what goes back to a config -------------------------------------------------------------------------------


def _attentions(model: spec.Model) -> dict[str, spec.Attention]:
    """An attention of each kind."""
    return dict(reversed(_all_attentions(model)))


def _all_attentions(model: spec.Model) -> list[tuple[str, spec.Attention]]:
    layers = model.encoder.layers if model.encoder else ()
    functions = [layer.steps[0].branches[0].function for layer in layers]
    found = [function for function in functions if isinstance(function, spec.Attention)]
    return [(SLIDING if isinstance(one.mask, spec.Window) else FULL, one) for one in found]


def _layer_types(model: spec.Model) -> list[str]:
    return [kind for kind, _ in _all_attentions(model)]


def _window(model: spec.Model) -> int | None:
    windows = [one.mask for _, one in _all_attentions(model) if isinstance(one.mask, spec.Window)]
    return 2 * windows[0].before if windows else None


def _rope_parameters(model: spec.Model) -> dict[str, Any]:
    said: dict[str, Any] = {kind: {"rope_type": "default", "rope_theta": theta} for kind, (_, theta) in THETAS.items()}
    for kind, one in _attentions(model).items():
        if one.position is not None:
            said[kind] = {"rope_type": "default"} | (rope.written(one.position) or {})
            said[kind]["rope_theta"] = one.position.theta
    return said


def _inner_bias(model: spec.Model) -> bool | None:
    layers = model.head.layers if model.head else ()
    return next((one.bias for one in layers if isinstance(one, spec.Linear)), None)


def _activation(model: spec.Model) -> str | None:
    layers = model.head.layers if model.head else ()
    return next((one.function for one in layers if isinstance(one, spec.Activation)), None)


def _pooling(model: spec.Model) -> str | None:
    layers = model.head.layers if model.head else ()
    return next((one.by for one in layers if isinstance(one, spec.Pool)), None)


LAYER = "layers.{layer}"
HEAD = (module_rule("head.dense", "head.layers.0"), module_rule("head.norm", "head.layers.2"))
LAST = module_rule("classifier", "head.layers.3")

FAMILIES = (
    Family(
        model_type="modernbert",
        keys=(
            Key("vocab_size", 50368, f"{TABLE}.rows"),
            Key("hidden_size", 768, "encoder.width"),
            Key("intermediate_size", 1152, f"{FEED}.size"),
            Key("num_hidden_layers", 22, blocks.count_layers("encoder")),
            Key("num_attention_heads", 12, f"{SELF}.num_heads"),
            Key("hidden_activation", "gelu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
            Key("norm_eps", 1e-5, "encoder.final_norm.eps"),
            Key("norm_bias", False, "encoder.final_norm.bias"),
            Key("layer_norm_eps", None, kind=float),
            Key("attention_bias", False, f"{SELF}.bias.query"),
            Key("attention_dropout", 0.0, f"{SELF}.dropout"),
            Key("embedding_dropout", 0.0, "encoder.embedding.dropout"),
            Key("mlp_bias", False, f"{FEED}.bias_in"),
            Key("mlp_dropout", 0.0, f"{FEED}.dropout"),
            Key("layer_types", None, _layer_types, kind=list),
            Key("global_attn_every_n_layers", 3),
            Key("local_attention", 128, _window),
            Key("rope_parameters", None, _rope_parameters, kind=dict),
            Key("rope_scaling", None, kind=dict),
            *(Key(name, theta) for name, theta in THETAS.values()),
            Key("max_position_embeddings", 8192),
            Key("original_max_position_embeddings", None, kind=int),
            Key("classifier_pooling", "cls", _pooling, names={"cls": "first", "mean": "mean"}),
            Key("classifier_bias", False, _inner_bias),
            Key("classifier_activation", "gelu", _activation, names=blocks.ACTIVATIONS),
            Key("decoder_bias", True, "head.layers.-1.bias"),
            blocks.tying(True),
        ),
        model=_model,
        rules=(
            module_rule("embeddings.tok_embeddings", TABLE),
            module_rule("embeddings.norm", "encoder.embedding.norm"),
            module_rule(f"{LAYER}.attn_norm", f"{blocks.branch('encoder', 0)}.pre"),
            module_rule(f"{LAYER}.attn.Wqkv", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Rows()),
            module_rule(f"{LAYER}.attn.Wo", f"{SELF}.out"),
            module_rule(f"{LAYER}.mlp_norm", f"{blocks.branch('encoder', 1)}.pre"),
            module_rule(f"{LAYER}.mlp.Wi", (f"{FEED}.gate", f"{FEED}.up"), Rows()),
            module_rule(f"{LAYER}.mlp.Wo", f"{FEED}.down"),
            module_rule("final_norm", "encoder.final_norm"),
        ),
        variants=(
            Variant(
                ("ModernBertForMaskedLM",),
                "fill",
                _masked,
                (*HEAD, module_rule("decoder", "head.layers.3")),
                output="decoder.weight",
            ),
            Variant(
                ("ModernBertForSequenceClassification",),
                "classify",
                _sequence,
                (
                    module_rule("head.dense", "head.layers.1"),
                    module_rule("head.norm", "head.layers.3"),
                    module_rule("classifier", "head.layers.4"),
                ),
            ),
            Variant(
                ("ModernBertForTokenClassification",), "tag", _token, (*HEAD, LAST)
            ),
            Variant(
                ("ModernBertForQuestionAnswering",), "answer", _bounds, (*HEAD, LAST)
            ),
            blocks.bare("ModernBertModel"),
        ),
        inert=(
            "classifier_dropout", "cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor",
            "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
            "sparse_prediction",
        ),
        prefix="model.",
        table="embeddings.tok_embeddings.weight",
        ignored=(r"rotary_emb\..*inv_freq",),
        written=dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id", "sep_token_id")),
    ),
)  # fmt: skip
