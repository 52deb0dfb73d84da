"""EuroBERT: Llama's layers with bidirectional attention.

Source: arXiv 2503.05500, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.checkpoints.hf.families.bert import FEED, SELF, TABLE
from clearhead.checkpoints.hf.mapping import blocks, llama_like, rope
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, module_rule


def _model(c: Values) -> spec.Model:
    norm, network = spec.RMSNorm(eps=c["rms_norm_eps"]), llama_like.feed_forward(c, bias=c["mlp_bias"])
    layer = blocks.layer(norm, llama_like.attention(c, mask=spec.Full()), network)
    layers = [layer] * c["num_hidden_layers"]
    return blocks.one_stack("encoder", c["hidden_size"], c["vocab_size"], layers, norm)


def _lm_head(c: Values) -> spec.Head:
    """Return the LM head, which has a bias if the feed-forward networks have one."""
    return blocks.lm_head(TABLE, bias=c["mlp_bias"])(c)


def _sequence_head(c: Values) -> spec.Head:
    """Return the head that scores the pooled state; with "late" pooling, it scores every state and takes the mean."""
    inner = (spec.Linear(size=c["hidden_size"]), spec.Activation(function="gelu"), spec.Linear(size=c.num_labels))
    if c["classifier_pooling"] == "late":
        return spec.Head(layers=(*inner, spec.Pool(by="mean")))
    return spec.Head(layers=(spec.Pool(by=c["classifier_pooling"]), *inner))


def _pooling(model: spec.Model) -> object:
    layers = model.head.layers if model.head else ()
    if layers and isinstance(layers[-1], spec.Pool):
        return "late"
    return next((layer.by for layer in layers if isinstance(layer, spec.Pool)), None)


def _in_encoder(rule: Rule) -> Rule:
    return replace(rule, ours=tuple(address.replace("decoder.", "encoder.", 1) for address in rule.ours))


KEYS = (
    Key("vocab_size", 128256, f"{TABLE}.rows"),
    Key("hidden_size", 768, "encoder.width"),
    Key("intermediate_size", 3072, f"{FEED}.size"),
    Key("num_hidden_layers", 12, blocks.count_layers("encoder")),
    Key("num_attention_heads", 12, f"{SELF}.num_heads"),
    Key("num_key_value_heads", None, f"{SELF}.num_kv_heads", kind=int),
    Key("head_dim", None, f"{SELF}.head_size", kind=int),
    Key("hidden_act", "silu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("rms_norm_eps", 1e-5, "encoder.final_norm.eps"),
    Key("attention_dropout", 0.0, f"{SELF}.dropout"),
    Key("attention_bias", False, f"{SELF}.bias.query"),
    Key("mlp_bias", False, f"{FEED}.bias_in"),
    blocks.tying(False),
    *rope.keys(10000.0, SELF, 8192),
)
RULES = tuple(map(_in_encoder, llama_like.rules_without("_norm")))

FAMILIES = (
    Family(
        model_type="eurobert",
        keys=(
            *KEYS,
            Key("classifier_pooling", "late", _pooling, names={"late": "late", "bos": "first", "mean": "mean"}),
        ),
        model=_model,
        rules=RULES,
        variants=(
            Variant(
                ("EuroBertForMaskedLM",),
                "fill",
                _lm_head,
                (module_rule("lm_head", "head.layers.0"),),
                output="lm_head.weight",
            ),
            Variant(
                ("EuroBertForSequenceClassification",),
                "classify",
                _sequence_head,
                (
                    module_rule("dense", "head.layers.0"),
                    module_rule("classifier", "head.layers.2"),
                    module_rule("dense", "head.layers.1"),
                    module_rule("classifier", "head.layers.3"),
                ),
            ),
            blocks.token_classification("EuroBert"),
            blocks.base_model("EuroBertModel"),
        ),
        fixed=(Fixed("clf_pooling", ("late",), "use classifier_pooling for another pooling"),),
        # Released checkpoints name older code (auto_map) that computes the same as the classes.
        inert=("auto_map", "bos_token", "eos_token", "hidden_dropout", "mask_token", "mask_token_id", "pad_token",
               "pretraining_tp"),
        prefix="model.",
        table="embed_tokens.weight",
        ignored=llama_like.IGNORED,
        written_keys={"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "mask_token_id": 0},
    ),
)  # fmt: skip
