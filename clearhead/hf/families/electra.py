"""ELECTRA: BERT's layers above an embedding of another width, as a generator of words or a judge of them.

Source: arXiv 2003.10555, section 3; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.families import bert
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule


def _model(c: Values) -> spec.Model:
    # Where the two widths are one, the classes have no map between them.
    width = None if c["embedding_size"] == c["hidden_size"] else c["embedding_size"]
    return bert.model(c, bert.embedding(c, width=width), [bert.layer(c)] * c["num_hidden_layers"])


def _masked(c: Values) -> spec.Head:
    """The inner activation of this head is exact GELU, whatever the layers have."""
    return bert.transformed(c, "gelu", size="embedding_size")


def _judged(c: Values) -> spec.Head:
    """One score for each token: how much it looks as if another model had put it there."""
    activation = spec.Activation(function=c["hidden_act"])
    return spec.Head(layers=(spec.Linear(size=c["hidden_size"]), activation, spec.Linear(size=1)))


DEFAULTS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}

FAMILIES = (
    Family(
        model_type="electra",
        keys=(*blocks.defaults(bert.KEYS, DEFAULTS), Key("embedding_size", 128, "encoder.table_width")),
        model=_model,
        rules=(*bert.RULES, module_rule("embeddings_project", "encoder.embedding.projection")),
        variants=(
            Variant(
                ("ElectraForMaskedLM",),
                "fill",
                _masked,
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
                _judged,
                (
                    module_rule("discriminator_predictions.dense", "head.layers.0"),
                    module_rule("discriminator_predictions.dense_prediction", "head.layers.2"),
                ),
            ),
            Variant(
                ("ElectraForSequenceClassification",),
                "classify",
                bert.sequence(spec.Activation(function="gelu")),
                (module_rule("classifier.dense", "head.layers.1"), module_rule("classifier.out_proj", "head.layers.3")),
            ),
            blocks.tagging("ElectraForTokenClassification"),
            blocks.answering("ElectraForQuestionAnswering"),
            blocks.bare("ElectraModel"),
        ),
        only=bert.ONLY,
        inert=(*bert.INERT, "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),
        prefix="electra.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
)
