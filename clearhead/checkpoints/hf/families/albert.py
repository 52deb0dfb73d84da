"""ALBERT: BERT's layers with shared weights, above an embedding of another width.

Source: arXiv 1909.11942, section 3.1; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.families import bert
from clearhead.checkpoints.hf.families.bert import FEED, SELF
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule


def _model(c: Values) -> spec.Model:
    depth, groups = c["num_hidden_layers"], c["num_hidden_groups"]
    if not 1 <= groups <= depth:
        raise InputError(f"config.json: num_hidden_groups must be 1 to num_hidden_layers = {depth}, got {groups}")
    # The quotient is rounded as in the classes.
    order = tuple(int(index / (depth / groups)) for index in range(depth))
    model = bert.model(c, [bert.layer(c, network_dropout=False)] * groups, width=c["embedding_size"])
    assert model.encoder is not None
    sharing = None if order == tuple(range(groups)) else order
    return model.model_copy(update={"encoder": model.encoder.model_copy(update={"sharing": sharing})})


def _lm_head(c: Values) -> spec.Head:
    return bert.lm_head(c, c["hidden_act"], size="embedding_size")


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
POOLER = (r"(albert\.)?pooler\.(weight|bias)",)
ORDER = r"sop_classifier\.classifier\.(weight|bias)"

FAMILIES = (
    Family(
        model_type="albert",
        keys=blocks.derive(
            bert.KEYS,
            DEFAULTS,
            Key("embedding_size", 128, "encoder.table_width"),
            Key("num_hidden_groups", 1, _groups),
        ),
        model=_model,
        rules=(
            *bert.RULES[:4],
            module_rule("encoder.embedding_hidden_mapping_in", "encoder.embedding.projection"),
            *attention_rules(f"{LAYER}.attention", SELF, "query key value dense"),
            module_rule(f"{LAYER}.attention.LayerNorm", blocks.out("encoder", 0)),
            module_rule(f"{LAYER}.ffn", f"{FEED}.up"),
            module_rule(f"{LAYER}.ffn_output", f"{FEED}.down"),
            module_rule(f"{LAYER}.full_layer_layer_norm", blocks.out("encoder", 1)),
        ),
        variants=(
            blocks.mask_filling(
                ("AlbertForMaskedLM", "AlbertForPreTraining"), _lm_head, "predictions", unused=(*POOLER, ORDER)
            ),
            blocks.sequence_classification("Albert", bert.TANH_HEAD, "albert.pooler", "classifier"),
            *blocks.token_tasks("Albert", POOLER),
        ),
        fixed=(*bert.FIXED, Fixed("inner_group_num", (1,), "groups of several layers are not supported")),
        inert=("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
        prefix="albert.",
        table="embeddings.word_embeddings.weight",
        ignored=bert.IGNORED,
    ),
)
