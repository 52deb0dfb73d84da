"""MPNet: BERT's layers without segments, with positions from 2 on and relative position buckets on the scores.

Source: arXiv 2004.09297, section 2; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.families import bert
from clearhead.checkpoints.hf.families.bert import SELF
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule


def _model(c: Values) -> spec.Model:
    buckets = spec.RelativeBuckets(num_heads=c["num_attention_heads"], count=32, max_distance=128, bidirectional=True)
    layer = bert.layer(c, score_bias=spec.Reference(path="encoder.score_table"))
    # Positions begin at 2 whatever the padding id.
    return bert.model(c, [layer] * c["num_hidden_layers"], offset=2, score_table=buckets)


LAYER = "encoder.layer.{layer}"
POOLER = (r"(mpnet\.)?pooler\.dense\.(weight|bias)",)

FAMILIES = (
    Family(
        model_type="mpnet",
        keys=blocks.derive(bert.KEYS, {"vocab_size": 30527}, without=("type_vocab_size",)),
        model=_model,
        rules=(
            *(
                rule
                for rule in bert.RULES
                if "token_type" not in rule.theirs[0] and ".attention." not in rule.theirs[0]
            ),
            module_rule("encoder.relative_attention_bias", "encoder.score_table"),
            *attention_rules(f"{LAYER}.attention.attn", SELF, "q k v o"),
            module_rule(f"{LAYER}.attention.LayerNorm", blocks.out("encoder", 0)),
        ),
        variants=bert.roberta_variants("MPNet", POOLER),
        fixed=(
            *bert.FIXED,
            # The classes use 32 buckets up to a distance of 128, whatever the rows of the table.
            Fixed("relative_attention_num_buckets", (32,), "another number of buckets is not supported"),
        ),
        inert=bert.INERT,
        prefix="mpnet.",
        table="embeddings.word_embeddings.weight",
        ignored=bert.IGNORED,
    ),
)
