"""DistilBERT: BERT's layers without segments, under names of its own.

Source: arXiv 1910.01108, section 3; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.families import bert
from clearhead.checkpoints.hf.families.bert import FEED, SELF, TABLE
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule

NORM = spec.LayerNorm(eps=1e-12)


def _model(c: Values) -> spec.Model:
    drop = c["dropout"]
    attention = blocks.attention(c["dim"], c["n_heads"], dropout=c["attention_dropout"])
    network = spec.FeedForward(size=c["hidden_dim"], activation=c["activation"])
    layer = spec.Layer(steps=(blocks.after(NORM, attention), blocks.after(NORM, network, drop)))
    position = spec.Learned(rows=c["max_position_embeddings"])
    layers = [layer] * c["n_layers"]
    return blocks.one_stack("encoder", c["dim"], c["vocab_size"], layers, position=position, norm=NORM, dropout=drop)


def _lm_head(c: Values) -> spec.Head:
    return bert.lm_head(c.with_values(layer_norm_eps=NORM.eps), c["activation"], size="dim")


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
            *attention_rules(f"{LAYER}.attention", SELF, "q_lin k_lin v_lin out_lin"),
            module_rule(f"{LAYER}.sa_layer_norm", blocks.out("encoder", 0)),
            module_rule(f"{LAYER}.ffn.lin1", f"{FEED}.up"),
            module_rule(f"{LAYER}.ffn.lin2", f"{FEED}.down"),
            module_rule(f"{LAYER}.output_layer_norm", blocks.out("encoder", 1)),
        ),
        variants=(
            Variant(
                ("DistilBertForMaskedLM",),
                "fill",
                _lm_head,
                (
                    module_rule("vocab_transform", "head.layers.0"),
                    module_rule("vocab_layer_norm", "head.layers.2"),
                    module_rule("vocab_projector", "head.layers.3"),
                ),
                output="vocab_projector.weight",
            ),
            blocks.sequence_classification(
                "DistilBert", blocks.mlp_head("first", "dim", "relu"), "pre_classifier", "classifier"
            ),
            *blocks.token_tasks("DistilBert"),
        ),
        # The table of positions is in the file, however it was initialized.
        inert=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
        prefix="distilbert.",
        table="embeddings.word_embeddings.weight",
        ignored=bert.IGNORED,
    ),
)
