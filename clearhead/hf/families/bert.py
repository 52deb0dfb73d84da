"""BERT and its kin: a norm on the stream after each sum, three tables at the embedding, a transform before the words.

Source: arXiv 1810.04805, section 3; RoBERTa arXiv 1907.11692; the layout is that of the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clearhead import spec
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import Rule, module_rule, tensor_rule

SELF, FEED = blocks.function("encoder", 0), blocks.function("encoder", 1)
TABLE = "encoder.embedding.table"


def layer(
    c: Values,
    *,
    score_bias: spec.ScoreBias | None = None,
    scale: float | None = None,
    network_dropout: bool = True,
) -> spec.Layer:
    """Attention and a network, a norm on the stream after each."""
    width, heads, drop = c["hidden_size"], c["num_attention_heads"], c["hidden_dropout_prob"]
    norm = spec.LayerNorm(eps=c["layer_norm_eps"])
    attention = spec.Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        score_bias=score_bias,
        scale=scale,
        dropout=c["attention_probs_dropout_prob"],
    )
    network = spec.FeedForward(size=c["intermediate_size"], activation=c["hidden_act"])
    after = blocks.after(norm, network, drop if network_dropout else 0.0)
    return spec.Layer(steps=(blocks.after(norm, attention, drop), after))


def embedding(c: Values, *, offset: int = 0, width: int | None = None) -> spec.Embedding:
    """Words, segments where there are any, and positions, then a norm; with a width of its own, a map follows."""
    return spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        width=width,
        projection=None if width is None else spec.Projection(place="after_norm", bias=True),
        num_segments=c.get("type_vocab_size", 0),
        position=spec.Learned(rows=c["max_position_embeddings"], offset=offset),
        norm=spec.LayerNorm(eps=c["layer_norm_eps"]),
        dropout=c["hidden_dropout_prob"],
    )


def model(
    c: Values, entry: spec.Embedding, layers: Sequence[spec.Layer], score_table: spec.ScoreTable | None = None
) -> spec.Model:
    """An encoder that ends with its last layer."""
    encoder = spec.Stack(width=c["hidden_size"], embedding=entry, layers=tuple(layers), score_table=score_table)
    return spec.Model(encoder=encoder, initialization=blocks.INITIALIZATION)


def _bert(c: Values) -> spec.Model:
    return model(c, embedding(c), [layer(c)] * c["num_hidden_layers"])


def _counting(c: Values) -> spec.Model:
    """Positions begin after the padding's id, whose row and those before it no token reads."""
    return model(c, embedding(c, offset=c["pad_token_id"] + 1), [layer(c)] * c["num_hidden_layers"])


def transformed(c: Values, activation: str, *, size: str = "hidden_size", tied: bool | None = None) -> spec.Head:
    """Scores of the vocabulary after one more map, an activation and a norm.

    Args:
        c: the values.
        activation: of the inner map.
        size: the key that tells how wide the inner map's outputs are.
        tied: whether the last map is the word table; None: as the config says.
    """
    is_tied = c["tie_word_embeddings"] if tied is None else tied
    inner = (
        spec.Linear(size=c[size]),
        spec.Activation.model_validate({"function": activation}),
        spec.LayerNorm(eps=c["layer_norm_eps"]),
    )
    weight = spec.Reference(path=TABLE) if is_tied else None
    return spec.Head(layers=(*inner, spec.Linear(size=c["vocab_size"], weight=weight)))


def sequence(activation: spec.Activation) -> Callable[[Values], spec.Head]:
    """Scores of labels from the first state, after one more map."""

    def head(c: Values) -> spec.Head:
        inner = (spec.Linear(size=c["hidden_size"]), activation)
        return spec.Head(layers=(spec.Pool(by="first"), *inner, spec.Linear(size=c.num_labels)))

    return head


TANH = sequence(spec.Activation(function="tanh"))


def masked(c: Values) -> spec.Head:
    """The inner activation of this head is that of the layers."""
    return transformed(c, c["hidden_act"])


def masked_exact(c: Values) -> spec.Head:
    """The inner activation of this head is exact GELU, whatever the layers have."""
    return transformed(c, "gelu")


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


def _pad(model: spec.Model) -> int | None:
    position = model.encoder.embedding.position if model.encoder else None
    return position.offset - 1 if position else None


PAD = Key("pad_token_id", 1, _pad)

RULES: tuple[Rule, ...] = (
    module_rule("embeddings.word_embeddings", TABLE),
    module_rule("embeddings.position_embeddings", "encoder.embedding.position"),
    module_rule("embeddings.token_type_embeddings", "encoder.embedding.segments"),
    module_rule("embeddings.LayerNorm", "encoder.embedding.norm"),
    module_rule("encoder.layer.{layer}.attention.self.query", f"{SELF}.query"),
    module_rule("encoder.layer.{layer}.attention.self.key", f"{SELF}.key"),
    module_rule("encoder.layer.{layer}.attention.self.value", f"{SELF}.value"),
    module_rule("encoder.layer.{layer}.attention.output.dense", f"{SELF}.out"),
    module_rule("encoder.layer.{layer}.attention.output.LayerNorm", blocks.out("encoder", 0)),
    module_rule("encoder.layer.{layer}.intermediate.dense", f"{FEED}.up"),
    module_rule("encoder.layer.{layer}.output.dense", f"{FEED}.down"),
    module_rule("encoder.layer.{layer}.output.LayerNorm", blocks.out("encoder", 1)),
)
ONLY = (
    Fixed("position_embedding_type", ("absolute", None), "distances would enter the scores"),
    Fixed("is_causal", (False,), "tokens would see what is before them alone"),
)
INERT = ("classifier_dropout", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
         "pooler_size_per_head", "pooler_type", "output_past", "type_vocab")  # fmt: skip
POOLER = r"(bert\.|roberta\.)?pooler\.dense\.(weight|bias)"
NEXT_SENTENCE = r"cls\.seq_relationship\.(weight|bias)"


def _bert_variants() -> tuple[Variant, ...]:
    words = (
        module_rule("cls.predictions.transform.dense", "head.layers.0"),
        module_rule("cls.predictions.transform.LayerNorm", "head.layers.2"),
        tensor_rule("cls.predictions.decoder.weight", "head.layers.3.weight"),
        tensor_rule(("cls.predictions.bias", "cls.predictions.decoder.bias"), "head.layers.3.bias"),
    )
    labels = (module_rule("bert.pooler.dense", "head.layers.1"), module_rule("classifier", "head.layers.3"))
    spare = (POOLER, NEXT_SENTENCE)
    output = "cls.predictions.decoder.weight"
    return (
        Variant(("BertForMaskedLM", "BertForPreTraining"), "fill", masked, words, output=output, spare=spare),
        Variant(("BertForSequenceClassification",), "classify", TANH, labels),
        blocks.tagging("BertForTokenClassification", spare=spare),
        blocks.answering("BertForQuestionAnswering", spare=spare),
        blocks.bare("BertModel", spare=(POOLER,)),
    )  # fmt: skip


def _roberta_variants(name: str) -> tuple[Variant, ...]:
    words = (
        module_rule("lm_head.dense", "head.layers.0"),
        module_rule("lm_head.layer_norm", "head.layers.2"),
        tensor_rule("lm_head.decoder.weight", "head.layers.3.weight"),
        tensor_rule(("lm_head.bias", "lm_head.decoder.bias"), "head.layers.3.bias"),
    )
    labels = (module_rule("classifier.dense", "head.layers.1"), module_rule("classifier.out_proj", "head.layers.3"))
    spare = (POOLER,)
    return (
        Variant((f"{name}ForMaskedLM",), "fill", masked_exact, words, output="lm_head.decoder.weight", spare=spare),
        Variant((f"{name}ForSequenceClassification",), "classify", TANH, labels, spare=spare),
        blocks.tagging(f"{name}ForTokenClassification", spare=spare),
        blocks.answering(f"{name}ForQuestionAnswering", spare=spare),
        blocks.bare(f"{name}Model", spare=spare),
    )  # fmt: skip


def _roberta(model_type: str, name: str, vocabulary: int) -> Family:
    return Family(
        model_type=model_type,
        keys=(*blocks.defaults(KEYS, {"vocab_size": vocabulary}), PAD),
        model=_counting,
        rules=RULES,
        variants=_roberta_variants(name),
        only=ONLY,
        inert=INERT,
        prefix="roberta.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    )


FAMILIES = (
    Family(
        model_type="bert",
        keys=KEYS,
        model=_bert,
        rules=RULES,
        variants=_bert_variants(),
        only=ONLY,
        inert=INERT,
        prefix="bert.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
    _roberta("roberta", "Roberta", 50265),
    _roberta("xlm-roberta", "XLMRoberta", 30522),
    _roberta("camembert", "Camembert", 30522),
)
