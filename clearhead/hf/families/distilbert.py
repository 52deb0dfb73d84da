"""DistilBERT: BERT's layers without segments, under names of its own.

Source: arXiv 1910.01108, section 3; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.families.bert import FEED, SELF, TABLE
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule

NORM = spec.LayerNorm(eps=1e-12)


def _model(c: Values) -> spec.Model:
    width, heads, drop = c["dim"], c["n_heads"], c["dropout"]
    attention = spec.Attention(
        num_heads=heads, num_kv_heads=heads, head_size=width // heads, dropout=c["attention_dropout"]
    )
    network = spec.FeedForward(size=c["hidden_dim"], activation=c["activation"])
    layer = spec.Layer(steps=(blocks.after(NORM, attention), blocks.after(NORM, network, drop)))
    embedding = spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        position=spec.Learned(rows=c["max_position_embeddings"]),
        norm=NORM,
        dropout=drop,
    )
    encoder = spec.Stack(width=width, embedding=embedding, layers=(layer,) * c["n_layers"])
    return spec.Model(encoder=encoder, initialization=blocks.INITIALIZATION)


def _masked(c: Values) -> spec.Head:
    weight = spec.Reference(path=TABLE) if c["tie_word_embeddings"] else None
    inner = (spec.Linear(size=c["dim"]), spec.Activation(function=c["activation"]), NORM)
    return spec.Head(layers=(*inner, spec.Linear(size=c["vocab_size"], weight=weight)))


def _sequence(c: Values) -> spec.Head:
    inner = (spec.Linear(size=c["dim"]), spec.Activation(function="relu"))
    return spec.Head(layers=(spec.Pool(by="first"), *inner, spec.Linear(size=c.num_labels)))


LAYER = "transformer.layer.{layer}"

FAMILIES = (
    Family(
        model_type="distilbert",
        keys=(
            Key("vocab_size", 30522, f"{TABLE}.rows"),
            Key("dim", 768, "encoder.width", aliases=("hidden_size",)),
            Key("n_layers", 6, blocks.count_layers("encoder"), aliases=("num_hidden_layers",)),
            Key("n_heads", 12, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
            Key("hidden_dim", 3072, f"{FEED}.size"),
            Key("activation", "gelu", f"{FEED}.activation", names=blocks.ACTIVATIONS),
            Key("dropout", 0.1, "encoder.embedding.dropout"),
            Key("attention_dropout", 0.1, f"{SELF}.dropout"),
            Key("max_position_embeddings", 512, "encoder.embedding.position.rows"),
            blocks.tying(True),
        ),
        model=_model,
        rules=(
            module_rule("embeddings.word_embeddings", TABLE),
            module_rule("embeddings.position_embeddings", "encoder.embedding.position"),
            module_rule("embeddings.LayerNorm", "encoder.embedding.norm"),
            module_rule(f"{LAYER}.attention.q_lin", f"{SELF}.query"),
            module_rule(f"{LAYER}.attention.k_lin", f"{SELF}.key"),
            module_rule(f"{LAYER}.attention.v_lin", f"{SELF}.value"),
            module_rule(f"{LAYER}.attention.out_lin", f"{SELF}.out"),
            module_rule(f"{LAYER}.sa_layer_norm", blocks.out("encoder", 0)),
            module_rule(f"{LAYER}.ffn.lin1", f"{FEED}.up"),
            module_rule(f"{LAYER}.ffn.lin2", f"{FEED}.down"),
            module_rule(f"{LAYER}.output_layer_norm", blocks.out("encoder", 1)),
        ),
        variants=(
            Variant(
                ("DistilBertForMaskedLM",),
                "fill",
                _masked,
                (
                    module_rule("vocab_transform", "head.layers.0"),
                    module_rule("vocab_layer_norm", "head.layers.2"),
                    module_rule("vocab_projector", "head.layers.3"),
                ),
                output="vocab_projector.weight",
            ),
            Variant(
                ("DistilBertForSequenceClassification",),
                "classify",
                _sequence,
                (module_rule("pre_classifier", "head.layers.1"), module_rule("classifier", "head.layers.3")),
            ),
            blocks.tagging("DistilBertForTokenClassification"),
            blocks.answering("DistilBertForQuestionAnswering"),
            blocks.bare("DistilBertModel"),
        ),
        # The table of positions is in the file, however it was first made.
        inert=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
        prefix="distilbert.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
)
