"""BERT and similar families: post-norm layers, an embedding of three tables, and a transform before the output.

Source: arXiv 1810.04805, section 3; RoBERTa arXiv 1907.11692; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, attention_rules, module_rule

SELF, FEED = blocks.function("encoder", 0), blocks.function("encoder", 1)
TABLE = "encoder.embedding.table"


def layer(
    c: Values, *, score_bias: spec.ScoreBias | None = None, scale: float | None = None, network_dropout: bool = True
) -> spec.Layer:
    """Return BERT's post-norm layer of attention and a feed-forward network."""
    drop, norm = c["hidden_dropout_prob"], spec.LayerNorm(eps=c["layer_norm_eps"])
    width, heads, attention_dropout = c["hidden_size"], c["num_attention_heads"], c["attention_probs_dropout_prob"]
    attention = blocks.attention(width, heads, score_bias=score_bias, scale=scale, dropout=attention_dropout)
    network = spec.FeedForward(size=c["intermediate_size"], activation=c["hidden_act"])
    after = blocks.after(norm, network, drop if network_dropout else 0.0)
    return spec.Layer(steps=(blocks.after(norm, attention, drop), after))


def model(
    c: Values,
    layers: Sequence[spec.Layer] | None = None,
    *,
    offset: int = 0,
    width: int | None = None,
    projection: spec.Projection | None = None,
    has_positions: bool = True,
    score_table: spec.ScoreTable | None = None,
) -> spec.Model:
    """Return the spec of an encoder without a final norm.

    Args:
        c: the config values.
        layers: the layers. None means BERT's layers.
        offset: the offset of learned positions.
        width: the width of the token embedding, if a projection follows it. None means no projection.
        projection: the projection from `width` to the width of the layers. None means one after the norm, with a bias.
        has_positions: True if the embedding has a table of positions.
        score_table: the table of score biases that the layers share. None means no such table.
    """
    encoder_model = blocks.one_stack(
        "encoder",
        c["hidden_size"],
        c["vocab_size"],
        [layer(c)] * c["num_hidden_layers"] if layers is None else layers,
        width=width,
        projection=None if width is None else projection or spec.Projection(place="after_norm", bias=True),
        num_segments=c.get("type_vocab_size", 0),
        position=spec.Learned(rows=c["max_position_embeddings"], offset=offset) if has_positions else None,
        norm=spec.LayerNorm(eps=c["layer_norm_eps"]),
        dropout=c["hidden_dropout_prob"],
    )
    assert encoder_model.encoder is not None
    return encoder_model.model_copy(
        update={"encoder": encoder_model.encoder.model_copy(update={"score_table": score_table})}
    )


def _roberta_model(c: Values) -> spec.Model:
    """Return the spec of RoBERTa's encoder, in which the position of the first token is the padding id plus 1."""
    return model(c, offset=c["pad_token_id"] + 1)


def lm_head(c: Values, activation: str, *, size: str = "hidden_size", is_tied: bool | None = None) -> spec.Head:
    """Return the head for masked tokens: a linear layer, an activation, a norm, and scores of the vocabulary.

    Args:
        c: the config values.
        activation: the activation after the inner layer.
        size: the config key with the width of the inner layer.
        is_tied: True if the last layer is tied to the token embedding. None means that the config decides.
    """
    inner = (
        spec.Linear(size=c[size]),
        spec.Activation.model_validate({"function": activation}),
        spec.LayerNorm(eps=c["layer_norm_eps"]),
    )
    if is_tied is None:
        is_tied = c["tie_word_embeddings"]
    weight = spec.Reference(path=TABLE) if is_tied else None
    return spec.Head(layers=(*inner, spec.Linear(size=c["vocab_size"], weight=weight)))


TANH_HEAD = blocks.mlp_head("first", "hidden_size", "tanh")


def _bert_lm_head(c: Values) -> spec.Head:
    """Return BERT's head, which has the activation of the layers."""
    return lm_head(c, c["hidden_act"])


def roberta_lm_head(c: Values) -> spec.Head:
    """Return RoBERTa's head, which has exact GELU whatever the activation of the layers."""
    return lm_head(c, "gelu")


KEYS = (
    Key("vocab_size", 30522, f"{TABLE}.rows"),
    Key("hidden_size", 768, "encoder.width"),
    Key("num_hidden_layers", 12, blocks.count_layers("encoder")),
    Key("num_attention_heads", 12, f"{SELF}.num_heads"),
    Key("intermediate_size", 3072, f"{FEED}.size"),
    Key("hidden_act", "gelu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("hidden_dropout_prob", 0.1, "encoder.embedding.dropout"),
    Key("attention_probs_dropout_prob", 0.1, f"{SELF}.dropout"),
    Key("max_position_embeddings", 512, "encoder.embedding.position.rows"),
    Key("type_vocab_size", 2, "encoder.embedding.num_segments"),
    Key("layer_norm_eps", 1e-12, "encoder.embedding.norm.eps"),
    blocks.tying(True),
)


def _padding_id(model: spec.Model) -> int | None:
    position = model.encoder.embedding.position if model.encoder else None
    return position.offset - 1 if isinstance(position, spec.Sinusoidal | spec.Learned) else None


PADDING_ID = Key("pad_token_id", 1, _padding_id)

RULES: tuple[Rule, ...] = (
    module_rule("embeddings.word_embeddings", TABLE),
    module_rule("embeddings.position_embeddings", "encoder.embedding.position"),
    module_rule("embeddings.token_type_embeddings", "encoder.embedding.segments"),
    module_rule("embeddings.LayerNorm", "encoder.embedding.norm"),
    *attention_rules("encoder.layer.{layer}.attention", SELF, "self.query self.key self.value output.dense"),
    module_rule("encoder.layer.{layer}.attention.output.LayerNorm", blocks.out("encoder", 0)),
    module_rule("encoder.layer.{layer}.intermediate.dense", f"{FEED}.up"),
    module_rule("encoder.layer.{layer}.output.dense", f"{FEED}.down"),
    module_rule("encoder.layer.{layer}.output.LayerNorm", blocks.out("encoder", 1)),
)
FIXED = (
    Fixed("position_embedding_type", ("absolute", None), "relative position embeddings are not supported"),
    Fixed("is_causal", (False,), "an encoder with causal attention is not supported"),
)
INERT = ("classifier_dropout", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
         "pooler_size_per_head", "pooler_type", "output_past", "type_vocab")  # fmt: skip
IGNORED = (r"embeddings\.position_ids",)
POOLER = (r"(bert\.|roberta\.)?pooler\.dense\.(weight|bias)",)
NEXT_SENTENCE = r"cls\.seq_relationship\.(weight|bias)"


def roberta_variants(name: str, unused: tuple[str, ...]) -> tuple[Variant, ...]:
    """Return the records of RoBERTa's classes, or of the classes of another family with the same heads."""
    return (
        blocks.mask_filling((f"{name}ForMaskedLM",), roberta_lm_head, "lm_head", norm="layer_norm", unused=unused),
        blocks.sequence_classification(name, TANH_HEAD, unused=unused),
        *blocks.token_tasks(name, unused),
    )


def _roberta(model_type: str, name: str, vocabulary: int) -> Family:
    return Family(
        model_type=model_type,
        keys=blocks.derive(KEYS, {"vocab_size": vocabulary}, PADDING_ID),
        model=_roberta_model,
        rules=RULES,
        variants=roberta_variants(name, POOLER),
        fixed=FIXED,
        inert=INERT,
        prefix="roberta.",
        table="embeddings.word_embeddings.weight",
        ignored=IGNORED,
    )


FAMILIES = (
    Family(
        model_type="bert",
        keys=KEYS,
        model=model,
        rules=RULES,
        variants=(
            blocks.mask_filling(
                ("BertForMaskedLM", "BertForPreTraining"),
                _bert_lm_head,
                "cls.predictions",
                dense="transform.dense",
                norm="transform.LayerNorm",
                unused=(*POOLER, NEXT_SENTENCE),
            ),
            blocks.sequence_classification("Bert", TANH_HEAD, "bert.pooler.dense", "classifier"),
            blocks.token_classification("Bert", unused=(*POOLER, NEXT_SENTENCE)),
            blocks.question_answering("Bert", unused=(*POOLER, NEXT_SENTENCE)),
            blocks.base_model("BertModel", unused=POOLER),
        ),
        fixed=FIXED,
        inert=INERT,
        prefix="bert.",
        table="embeddings.word_embeddings.weight",
        ignored=IGNORED,
    ),
    _roberta("roberta", "Roberta", 50265),
    _roberta("xlm-roberta", "XLMRoberta", 30522),
    _roberta("camembert", "Camembert", 30522),
)
