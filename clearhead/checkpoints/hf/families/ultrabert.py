"""UltraBERT: the layers of EuroBERT, two of three with a window, and each kind of layer with its own rotation.

Source: its classes in transformers; tensor names are those of the files that they write.
"""

from __future__ import annotations

import functools
from typing import Any

from clearhead import spec
from clearhead.checkpoints.hf.families.bert import TABLE
from clearhead.checkpoints.hf.families.eurobert import KEYS, RULES
from clearhead.checkpoints.hf.mapping import blocks, layer_types, llama_like
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.layer_types import FULL, SLIDING
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule

THETAS = {FULL: 2_560_000.0, SLIDING: 10_000.0}
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
OLDER = "files from before its classes are not supported; save it again with transformers"


def _model(c: Values) -> spec.Model:
    # The older object of scalings belongs to no kind of layer.
    rotations = layer_types.rotations(
        c.with_values(rope_scaling=None), head_size=llama_like.head_size(c), full=THETAS[FULL], sliding=THETAS[SLIDING]
    )
    norm, network = spec.RMSNorm(eps=c["rms_norm_eps"]), llama_like.feed_forward(c, bias=c["mlp_bias"])
    reach = c["sliding_window"]
    pattern = [(index + 1) % 3 != 0 for index in range(c["num_hidden_layers"])]
    layers = []
    for is_window in layer_types.read(c, pattern):
        mask = spec.Window(before=reach, after=reach) if is_window else spec.Full()
        layers.append(blocks.layer(norm, llama_like.attention(c, mask=mask, position=rotations[is_window]), network))
    return blocks.one_stack("encoder", c["hidden_size"], c["vocab_size"], layers, norm)


def _lm_head(c: Values) -> spec.Head:
    """Two linear layers, each with an activation, in front of the output."""
    activation = spec.Activation(function="gelu_tanh")
    inner = (spec.Linear(size=c["prediction_head_size"], bias=False), activation)
    outer = (spec.Linear(size=c["hidden_size"], bias=False), activation)
    return spec.Head(layers=(*inner, *outer, *blocks.lm_head(TABLE)(c).layers))


def _prediction_size(model: spec.Model) -> int | None:
    linears = [layer for layer in (model.head.layers if model.head else ()) if isinstance(layer, spec.Linear)]
    return linears[0].size if len(linears) == 3 else None


def _rope_parameters(model: spec.Model) -> dict[str, Any]:
    return layer_types.rotation_config(model, "encoder", THETAS)


def _sequence_head(c: Values) -> spec.Head:
    return spec.Head(layers=(spec.Pool(by=c["classifier_pooling"]), spec.Linear(size=c.num_labels)))


FAMILIES = (
    Family(
        model_type="ultrabert",
        keys=blocks.derive(
            KEYS,
            DEFAULTS,
            Key("sliding_window", 128, functools.partial(layer_types.window, side="encoder")),
            Key("layer_types", None, layer_types.types_of("encoder"), kind=list[str]),
            Key("rope_parameters", None, _rope_parameters, kind=layer_types.Rotations),
            Key("prediction_head_size", 768, _prediction_size),
            Key("classifier_pooling", "cls", blocks.in_head(spec.Pool, "by"), names={"cls": "first", "mean": "mean"}),
            without=("rope_theta", "rope_scaling"),
        ),
        model=_model,
        rules=RULES,
        variants=(
            Variant(
                ("UltrabertForMaskedLM",),
                "fill",
                _lm_head,
                (
                    module_rule("head.linear1", "head.layers.0"),
                    module_rule("head.linear2", "head.layers.2"),
                    module_rule("cls", "head.layers.4"),
                ),
                output="cls.weight",
            ),
            Variant(
                ("UltrabertForSequenceClassification",),
                "classify",
                _sequence_head,
                (module_rule("classifier", "head.layers.1"),),
            ),
            *blocks.token_tasks("Ultrabert"),
        ),
        fixed=tuple(Fixed(name, (None,), OLDER) for name in ("attention_windows", "rope_theta")),
        inert=("classifier_dropout",),
        prefix="ultrabert.",
        table="embed_tokens.weight",
        ignored=llama_like.IGNORED,
    ),
)
