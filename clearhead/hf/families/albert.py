"""ALBERT: BERT's layers that share their weights, above an embedding of another width.

Source: arXiv 1909.11942, section 3.1; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.families import bert
from clearhead.hf.families.bert import FEED, SELF
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule, tensor_rule


def _model(c: Values) -> spec.Model:
    depth, groups = c["num_hidden_layers"], c["num_hidden_groups"]
    if not 1 <= groups <= depth:
        raise InputError(f"config.json: num_hidden_groups must be 1 to num_hidden_layers = {depth}, got {groups}")
    # The quotient is rounded as the classes do it.
    order = tuple(int(index / (depth / groups)) for index in range(depth))
    layers = [bert.layer(c, network_dropout=False)] * groups
    model = bert.model(c, bert.embedding(c, width=c["embedding_size"]), layers)
    assert model.encoder is not None
    sharing = None if order == tuple(range(groups)) else order
    return model.model_copy(update={"encoder": model.encoder.model_copy(update={"sharing": sharing})})


def _masked(c: Values) -> spec.Head:
    return bert.transformed(c, c["hidden_act"], size="embedding_size")


def _groups(model: spec.Model) -> int | None:
    return len(model.encoder.layers) if model.encoder else None


DEFAULTS = {
    "vocab_size": 30000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LAYER = "encoder.albert_layer_groups.{layer}.albert_layers.0"
POOLER = r"(albert\.)?pooler\.(weight|bias)"
ORDER = r"sop_classifier\.classifier\.(weight|bias)"

FAMILIES = (
    Family(
        model_type="albert",
        keys=(
            *blocks.defaults(bert.KEYS, DEFAULTS),
            Key("embedding_size", 128, "encoder.table_width"),
            Key("num_hidden_groups", 1, _groups),
        ),
        model=_model,
        rules=(
            *bert.RULES[:4],
            module_rule("encoder.embedding_hidden_mapping_in", "encoder.embedding.projection"),
            module_rule(f"{LAYER}.attention.query", f"{SELF}.query"),
            module_rule(f"{LAYER}.attention.key", f"{SELF}.key"),
            module_rule(f"{LAYER}.attention.value", f"{SELF}.value"),
            module_rule(f"{LAYER}.attention.dense", f"{SELF}.out"),
            module_rule(f"{LAYER}.attention.LayerNorm", blocks.out("encoder", 0)),
            module_rule(f"{LAYER}.ffn", f"{FEED}.up"),
            module_rule(f"{LAYER}.ffn_output", f"{FEED}.down"),
            module_rule(f"{LAYER}.full_layer_layer_norm", blocks.out("encoder", 1)),
        ),
        variants=(
            Variant(
                ("AlbertForMaskedLM", "AlbertForPreTraining"),
                "fill",
                _masked,
                (
                    module_rule("predictions.dense", "head.layers.0"),
                    module_rule("predictions.LayerNorm", "head.layers.2"),
                    tensor_rule("predictions.decoder.weight", "head.layers.3.weight"),
                    tensor_rule(("predictions.bias", "predictions.decoder.bias"), "head.layers.3.bias"),
                ),
                output="predictions.decoder.weight",
                spare=(POOLER, ORDER),
            ),
            Variant(
                ("AlbertForSequenceClassification",),
                "classify",
                bert.TANH,
                (module_rule("albert.pooler", "head.layers.1"), module_rule("classifier", "head.layers.3")),
            ),
            blocks.tagging("AlbertForTokenClassification", spare=(POOLER,)),
            blocks.answering("AlbertForQuestionAnswering", spare=(POOLER,)),
            blocks.bare("AlbertModel", spare=(POOLER,)),
        ),
        only=(*bert.ONLY, Fixed("inner_group_num", (1,), "a group would be several layers")),
        inert=("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
        prefix="albert.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
)
