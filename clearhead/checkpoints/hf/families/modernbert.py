"""ModernBERT: pre-norm layers without biases, gated networks, rotary positions, and windows in most layers.

Source: arXiv 2412.13663, section 2.1; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from typing import Any

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.families.bert import FEED, SELF, TABLE
from clearhead.checkpoints.hf.mapping import blocks, layer_types, rope
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.layer_types import FULL, SLIDING
from clearhead.checkpoints.hf.mapping.tensor_rules import SplitRows, module_rule

THETAS = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}


def _windows(c: Values) -> list[bool]:
    """Return whether each layer has a window; without `layer_types`, the layers 0, n, 2n, ... have none."""
    every = c["global_attn_every_n_layers"]
    if every < 1 and c["layer_types"] is None:
        raise InputError(f"config.json: global_attn_every_n_layers must be at least 1, got {every}")
    return layer_types.read(c, [index % max(every, 1) != 0 for index in range(c["num_hidden_layers"])])


def _norm(c: Values) -> spec.LayerNorm:
    return spec.LayerNorm(eps=c["norm_eps"], bias=c["norm_bias"])


def _model(c: Values) -> spec.Model:
    if c["layer_norm_eps"] not in (None, c["norm_eps"]):
        raise InputError(
            f"config.json: layer_norm_eps is {c['layer_norm_eps']}, but the classes read norm_eps = {c['norm_eps']}"
        )
    width, heads, norm, drop = c["hidden_size"], c["num_attention_heads"], _norm(c), c["attention_dropout"]
    full, sliding = (c[name] for name in THETAS)
    both = (FULL, SLIDING)
    positions = layer_types.rotations(c, head_size=width // heads, full=full, sliding=sliding, scaled=both)
    reach = c["local_attention"] // 2
    network = spec.FeedForward(
        size=c["intermediate_size"],
        activation=c["hidden_activation"],
        gated=True,
        bias_in=c["mlp_bias"],
        bias_out=c["mlp_bias"],
        dropout=c["mlp_dropout"],
    )

    def layer(index: int, is_window: bool) -> spec.Layer:
        attention = blocks.attention(
            width,
            heads,
            mask=spec.Window(before=reach, after=reach) if is_window else spec.Full(),
            position=positions[is_window],
            bias=blocks.biases(c["attention_bias"]),
            dropout=drop,
        )
        # The embedding ends with a norm, so the first attention has none.
        return spec.Layer(steps=(blocks.pre(norm if index else None, attention, drop), blocks.pre(norm, network)))

    layers = [layer(index, is_window) for index, is_window in enumerate(_windows(c))]
    embedding = {"norm": norm, "dropout": c["embedding_dropout"]}
    return blocks.one_stack("encoder", width, c["vocab_size"], layers, norm, **embedding)


def _head(c: Values, *last: spec.HeadLayer, pool: tuple[spec.HeadLayer, ...] = ()) -> spec.Head:
    activation = spec.Activation(function=c["classifier_activation"])
    inner = (spec.Linear(size=c["hidden_size"], bias=c["classifier_bias"]), activation, _norm(c))
    return spec.Head(layers=(*pool, *inner, *last))


def _lm_head(c: Values) -> spec.Head:
    return _head(c, *blocks.lm_head(TABLE, bias=c["decoder_bias"])(c).layers)


def _sequence_head(c: Values) -> spec.Head:
    return _head(c, spec.Linear(size=c.num_labels), pool=(spec.Pool(by=c["classifier_pooling"]),))


def _token_head(c: Values) -> spec.Head:
    return _head(c, spec.Linear(size=c.num_labels))


def _span_head(c: Values) -> spec.Head:
    return _head(c, spec.Linear(size=2))


# --- from a spec to a config ----------------------------------------------------------------------------------


def _window(model: spec.Model) -> int | None:
    reach = layer_types.window(model, "encoder")
    return None if reach is None else 2 * reach


def _rope_parameters(model: spec.Model) -> dict[str, Any]:
    return layer_types.rotation_config(model, "encoder", dict(zip((FULL, SLIDING), THETAS.values(), strict=True)))


LAYER = "layers.{layer}"
HEAD = (module_rule("head.dense", "head.layers.0"), module_rule("head.norm", "head.layers.2"))
CLASSIFIER = (*HEAD, module_rule("classifier", "head.layers.3"))
POOLINGS = {"cls": "first", "mean": "mean"}

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
            Key("layer_types", None, layer_types.types_of("encoder"), kind=list[str]),
            Key("global_attn_every_n_layers", 3),
            Key("local_attention", 128, _window),
            Key("rope_parameters", None, _rope_parameters, kind=layer_types.Rotations),
            Key("rope_scaling", None, kind=rope.RopeConfig),
            *(Key(name, theta) for name, theta in THETAS.items()),
            Key("max_position_embeddings", 8192, "declared_length"),
            Key("original_max_position_embeddings", None, kind=int),
            Key("classifier_pooling", "cls", blocks.in_head(spec.Pool, "by"), names=POOLINGS),
            Key("classifier_bias", False, blocks.in_head(spec.Linear, "bias")),
            Key("classifier_activation", "gelu", blocks.in_head(spec.Activation, "function"), names=blocks.ACTIVATIONS),
            Key("decoder_bias", True, "head.layers.-1.bias"),
            blocks.tying(True),
        ),
        model=_model,
        rules=(
            module_rule("embeddings.tok_embeddings", TABLE),
            module_rule("embeddings.norm", "encoder.embedding.norm"),
            module_rule(f"{LAYER}.attn_norm", f"{blocks.branch('encoder', 0)}.pre"),
            module_rule(f"{LAYER}.attn.Wqkv", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), SplitRows()),
            module_rule(f"{LAYER}.attn.Wo", f"{SELF}.out"),
            module_rule(f"{LAYER}.mlp_norm", f"{blocks.branch('encoder', 1)}.pre"),
            module_rule(f"{LAYER}.mlp.Wi", (f"{FEED}.gate", f"{FEED}.up"), SplitRows()),
            module_rule(f"{LAYER}.mlp.Wo", f"{FEED}.down"),
            module_rule("final_norm", "encoder.final_norm"),
        ),
        variants=(
            Variant(
                ("ModernBertForMaskedLM",),
                "fill",
                _lm_head,
                (*HEAD, module_rule("decoder", "head.layers.3")),
                output="decoder.weight",
            ),
            Variant(
                ("ModernBertForSequenceClassification",),
                "classify",
                _sequence_head,
                (
                    module_rule("head.dense", "head.layers.1"),
                    module_rule("head.norm", "head.layers.3"),
                    module_rule("classifier", "head.layers.4"),
                ),
            ),
            Variant(("ModernBertForTokenClassification",), "tag", _token_head, CLASSIFIER),
            Variant(("ModernBertForQuestionAnswering",), "answer", _span_head, CLASSIFIER),
            blocks.base_model("ModernBertModel"),
        ),
        inert=(
            "classifier_dropout", "cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor",
            "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
            "sparse_prediction",
        ),
        prefix="model.",
        table="embeddings.tok_embeddings.weight",
        ignored=(r"rotary_emb\..*inv_freq",),
        written_keys=dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id", "sep_token_id")),
    ),
)  # fmt: skip
