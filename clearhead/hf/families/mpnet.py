"""MPNet: BERT's layers without segments, positions from two on, and scores biased by bucketed distance.

Source: arXiv 2004.09297, section 2; the layout is that of the published files.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.hf.families import bert
from clearhead.hf.families.bert import SELF
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Family, Fixed, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule, tensor_rule


def _model(c: Values) -> spec.Model:
    scores = spec.RelativeBuckets(num_heads=c["num_attention_heads"], count=32, max_distance=128, bidirectional=True)
    layer = bert.layer(c, score_bias=spec.Reference(path="encoder.score_table"))
    # Positions count from 2, whatever the padding's id is.
    return bert.model(c, bert.embedding(c, offset=2), [layer] * c["num_hidden_layers"], scores)


LAYER = "encoder.layer.{layer}"
POOLER = r"(mpnet\.)?pooler\.dense\.(weight|bias)"

FAMILIES = (
    Family(
        model_type="mpnet",
        keys=tuple(key for key in blocks.defaults(bert.KEYS, {"vocab_size": 30527}) if key.name != "type_vocab_size"),
        model=_model,
        rules=(
            *(
                rule
                for rule in bert.RULES
                if "token_type" not in rule.theirs[0] and ".attention." not in rule.theirs[0]
            ),
            module_rule("encoder.relative_attention_bias", "encoder.score_table"),
            module_rule(f"{LAYER}.attention.attn.q", f"{SELF}.query"),
            module_rule(f"{LAYER}.attention.attn.k", f"{SELF}.key"),
            module_rule(f"{LAYER}.attention.attn.v", f"{SELF}.value"),
            module_rule(f"{LAYER}.attention.attn.o", f"{SELF}.out"),
            module_rule(f"{LAYER}.attention.LayerNorm", blocks.out("encoder", 0)),
        ),
        variants=(
            Variant(
                ("MPNetForMaskedLM",),
                "fill",
                bert.masked_exact,
                (
                    module_rule("lm_head.dense", "head.layers.0"),
                    module_rule("lm_head.layer_norm", "head.layers.2"),
                    tensor_rule("lm_head.decoder.weight", "head.layers.3.weight"),
                    tensor_rule(("lm_head.bias", "lm_head.decoder.bias"), "head.layers.3.bias"),
                ),
                output="lm_head.decoder.weight",
                spare=(POOLER,),
            ),
            Variant(
                ("MPNetForSequenceClassification",),
                "classify",
                bert.TANH,
                (module_rule("classifier.dense", "head.layers.1"), module_rule("classifier.out_proj", "head.layers.3")),
                spare=(POOLER,),
            ),
            blocks.tagging("MPNetForTokenClassification", spare=(POOLER,)),
            blocks.answering("MPNetForQuestionAnswering", spare=(POOLER,)),
            blocks.bare("MPNetModel", spare=(POOLER,)),
        ),
        only=(
            *bert.ONLY,
            # The classes take the buckets of 32 and 128, however many rows the table has.
            Fixed("relative_attention_num_buckets", (32,), "some rows of the table would never be read"),
        ),
        inert=bert.INERT,
        prefix="mpnet.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
)
