"""ELECTRA: BERT's layers above an embedding of another width, as a generator of tokens or a discriminator.

Source: arXiv 2003.10555, section 3; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.families import bert
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import module_rule


def _model(c: Values) -> spec.Model:
    # Where the two widths are the same, the classes have no projection.
    return bert.model(c, width=None if c["embedding_size"] == c["hidden_size"] else c["embedding_size"])


def _generator_head(c: Values) -> spec.Head:
    """The inner activation of this head is exact GELU, whatever that of the layers."""
    return bert.lm_head(c, "gelu", size="embedding_size")


def _discriminator_head(c: Values) -> spec.Head:
    """One score for each token: whether another model has replaced it."""
    activation = spec.Activation(function=c["hidden_act"])
    return spec.Head(layers=(spec.Linear(size=c["hidden_size"]), activation, spec.Linear(size=1)))


DEFAULTS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}

FAMILIES = (
    Family(
        model_type="electra",
        keys=blocks.derive(bert.KEYS, DEFAULTS, Key("embedding_size", 128, "encoder.table_width")),
        model=_model,
        rules=(*bert.RULES, module_rule("embeddings_project", "encoder.embedding.projection")),
        variants=(
            Variant(
                ("ElectraForMaskedLM",),
                "fill",
                _generator_head,
                (
                    module_rule("generator_predictions.dense", "head.layers.0"),
                    module_rule("generator_predictions.LayerNorm", "head.layers.2"),
                    module_rule("generator_lm_head", "head.layers.3"),
                ),
                output="generator_lm_head.weight",
            ),
            Variant(
                ("ElectraForPreTraining",),
                "tag",
                _discriminator_head,
                (
                    module_rule("discriminator_predictions.dense", "head.layers.0"),
                    module_rule("discriminator_predictions.dense_prediction", "head.layers.2"),
                ),
            ),
            blocks.sequence_classification("Electra", blocks.mlp_head("first", "hidden_size", "gelu")),
            *blocks.token_tasks("Electra"),
        ),
        fixed=bert.FIXED,
        inert=(*bert.INERT, "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),
        prefix="electra.",
        table="embeddings.word_embeddings.weight",
        ignored=bert.IGNORED,
    ),
)
