"""DeBERTa from its second version on: BERT's layers, scores of content with distance beside those with content.

Source: arXiv 2006.03654, section 3.1; the later layout is that of the published files (arXiv 2111.09543).
"""

from __future__ import annotations

from typing import Any, Literal

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.families import bert
from clearhead.hf.families.bert import SELF
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.config import value_at
from clearhead.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule, tensor_rule

TERMS: dict[str, Literal["content_to_position", "position_to_content"]] = {
    "c2p": "content_to_position",
    "p2c": "position_to_content",
}


def _types(c: Values) -> list[str]:
    """The terms that the config names, in our order."""
    said = c["pos_att_type"] or []
    names = [one.strip() for one in said.lower().split("|")] if isinstance(said, str) else said
    unknown = sorted({str(name) for name in names} - TERMS.keys()) if isinstance(names, list) else [str(said)]
    if unknown:
        raise InputError(f"config.json: pos_att_type {', '.join(unknown)} is not supported; only c2p and p2c are")
    return [name for name in TERMS if name in names]


def _table(c: Values) -> spec.DistanceTable:
    longest = c["max_relative_positions"] if c["max_relative_positions"] > 0 else c["max_position_embeddings"]
    buckets = c["position_buckets"] if c["position_buckets"] > 0 else None
    norms = [one.strip() for one in c["norm_rel_ebd"].lower().split("|")]
    if set(norms) - {"none", "layer_norm"}:
        raise InputError(f"config.json: norm_rel_ebd = {c['norm_rel_ebd']} is not supported")
    return spec.DistanceTable(
        span=buckets or longest,
        buckets=buckets,
        max_distance=longest if buckets else None,
        norm=spec.LayerNorm(eps=c["layer_norm_eps"]) if "layer_norm" in norms else None,
    )


def _check(c: Values, names: list[str]) -> None:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if c["attention_head_size"] not in (None, width // heads):
        raise InputError("config.json: attention_head_size must be hidden_size / num_attention_heads")
    if c["pooler_hidden_size"] not in (None, width):
        raise InputError("config.json: pooler_hidden_size must be hidden_size")
    if c["relative_attention"] and not names:
        raise InputError("config.json: relative_attention without a pos_att_type has a table that nothing reads")


def _model(c: Values) -> spec.Model:
    names = _types(c)
    _check(c, names)
    width, own = c["hidden_size"], c["embedding_size"] or c["hidden_size"]
    scores = None
    if c["relative_attention"]:
        scores = spec.Disentangled(
            table=spec.Reference(path="encoder.score_table"),
            terms=tuple(TERMS[name] for name in names),
            shared_projections=c["share_att_key"],
        )
    # The terms that are named count in the scale, whether or not there are distances.
    scale = (width // c["num_attention_heads"] * (1 + len(names))) ** -0.5
    embedding = spec.Embedding(
        table=spec.Table(rows=c["vocab_size"]),
        width=None if own == width else own,
        projection=None if own == width else spec.Projection(place="before_norm", bias=False),
        num_segments=c["type_vocab_size"],
        position=spec.Learned(rows=c["max_position_embeddings"]) if c["position_biased_input"] else None,
        norm=spec.LayerNorm(eps=c["layer_norm_eps"]),
        dropout=c["hidden_dropout_prob"],
    )
    layer = bert.layer(c, score_bias=scores, scale=scale)
    table = _table(c) if c["relative_attention"] else None
    return bert.model(c, embedding, [layer] * c["num_hidden_layers"], table)


def _early(c: Values) -> spec.Head:
    return bert.transformed(c.replaced(width=c["embedding_size"] or c["hidden_size"]), c["hidden_act"], size="width")


def _later(c: Values) -> spec.Head:
    """The later form maps to the width of the layers and always uses the word table."""
    return bert.transformed(c, c["hidden_act"], tied=True)


def _sequence(c: Values) -> spec.Head:
    return bert.sequence(spec.Activation(function=c["pooler_hidden_act"]))(c)


# --- what goes back to a config -------------------------------------------------------------------------------


def _scores(model: spec.Model) -> spec.Disentangled | None:
    found = value_at(model, f"{SELF}.score_bias")
    return found if isinstance(found, spec.Disentangled) else None


def _named(model: spec.Model) -> list[str]:
    scores, attention = _scores(model), value_at(model, SELF)
    if scores is not None:
        return [name for name, term in TERMS.items() if term in scores.terms]
    scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
    return list(TERMS)[: round(scale**-2 / attention.head_size) - 1]


def _distances(model: spec.Model) -> spec.DistanceTable | None:
    found = model.encoder.score_table if model.encoder else None
    return found if isinstance(found, spec.DistanceTable) else None


def _longest(model: spec.Model) -> int:
    table = _distances(model)
    return -1 if table is None else table.max_distance or table.span


def _buckets(model: spec.Model) -> int:
    table = _distances(model)
    return -1 if table is None or table.buckets is None else table.buckets


def _table_norm(model: spec.Model) -> str:
    table = _distances(model)
    return "none" if table is None or table.norm is None else "layer_norm"


def _is_shared(model: spec.Model) -> bool:
    scores = _scores(model)
    return scores is not None and scores.shared_projections


def _has_positions(model: spec.Model) -> bool:
    return model.encoder is not None and model.encoder.embedding.position is not None


def _pooled_activation(model: spec.Model) -> Any:
    layers = model.head.layers if model.head else ()
    is_pooled = any(isinstance(one, spec.Pool) for one in layers)
    return next((one.function for one in layers if is_pooled and isinstance(one, spec.Activation)), None)


DEFAULTS = {
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
LAYER, OWN = "encoder.layer.{layer}", f"{SELF}.score_bias"
NAMES = {"query": "query_proj", "key": "key_proj", "value": "value_proj"}
POSITIONS = r"(deberta\.)?embeddings\.position_embeddings\..*"
OTHERS = (POSITIONS, r"(deberta\.)?encoder\.LayerNorm\.(weight|bias)", r"mask_predictions\..*")
HEADS = (r"lm_predictions\..*", r"cls\.predictions\..*")
FIRST = "cls.predictions"
LATER = "lm_predictions.lm_head"

FAMILIES = (
    Family(
        model_type="deberta-v2",
        keys=(
            *blocks.defaults(bert.KEYS, DEFAULTS),
            Key("embedding_size", None, "encoder.table_width", kind=int),
            Key("attention_head_size", None, kind=int),
            Key("relative_attention", False, lambda model: _distances(model) is not None),
            Key("pos_att_type", None, _named, kind=object),
            Key("max_relative_positions", -1, _longest),
            Key("position_buckets", -1, _buckets),
            Key("norm_rel_ebd", "none", _table_norm),
            Key("share_att_key", False, _is_shared),
            Key("position_biased_input", True, _has_positions),
            Key("pooler_hidden_size", None, kind=int),
            Key("pooler_hidden_act", "gelu", _pooled_activation, names=blocks.ACTIVATIONS),
        ),
        model=_model,
        rules=(
            *(rule for rule in bert.RULES if ".attention.self." not in rule.theirs[0]),
            *(module_rule(f"{LAYER}.attention.self.{theirs}", f"{SELF}.{ours}") for ours, theirs in NAMES.items()),
            module_rule("embeddings.embed_proj", "encoder.embedding.projection"),
            module_rule(f"{LAYER}.attention.self.pos_key_proj", f"{OWN}.position_key"),
            module_rule(f"{LAYER}.attention.self.pos_query_proj", f"{OWN}.position_query"),
            module_rule("encoder.rel_embeddings", "encoder.score_table"),
            module_rule("encoder.LayerNorm", "encoder.score_table.norm"),
        ),
        variants=(
            Variant(
                ("DebertaV2ForMaskedLM",),
                "fill",
                _early,
                (
                    module_rule(f"{FIRST}.transform.dense", "head.layers.0"),
                    module_rule(f"{FIRST}.transform.LayerNorm", "head.layers.2"),
                    tensor_rule(f"{FIRST}.decoder.weight", "head.layers.3.weight"),
                    tensor_rule((f"{FIRST}.bias", f"{FIRST}.decoder.bias"), "head.layers.3.bias"),
                ),
                output=f"{FIRST}.decoder.weight",
                spare=OTHERS,
            ),
            Variant(
                ("DebertaV2ForMaskedLM",),
                "fill",
                _later,
                (
                    module_rule(f"{LATER}.dense", "head.layers.0"),
                    module_rule(f"{LATER}.LayerNorm", "head.layers.2"),
                    tensor_rule(f"{LATER}.bias", "head.layers.3.bias"),
                ),
                spare=OTHERS,
            ),
            Variant(
                ("DebertaV2ForSequenceClassification",),
                "classify",
                _sequence,
                (module_rule("pooler.dense", "head.layers.1"), module_rule("classifier", "head.layers.3")),
                spare=(*OTHERS, *HEADS),
            ),
            blocks.tagging("DebertaV2ForTokenClassification", spare=(*OTHERS, *HEADS)),
            blocks.answering("DebertaV2ForQuestionAnswering", spare=(*OTHERS, *HEADS)),
            blocks.bare("DebertaV2Model", spare=(*OTHERS, *HEADS)),
        ),
        only=(
            *bert.ONLY,
            Fixed("conv_kernel_size", (0,), "a convolution would stand beside the first layer"),
            Fixed("talking_head", (False,), "heads would be mixed"),
        ),
        # Which form the head over words has is told by its tensors, not by "legacy", which published files lack.
        inert=(*bert.INERT, "legacy", "pooler_dropout", "cls_dropout", "conv_act", "conv_groups"),
        prefix="deberta.",
        table="embeddings.word_embeddings.weight",
        ignored=(r"embeddings\.position_ids",),
    ),
)
