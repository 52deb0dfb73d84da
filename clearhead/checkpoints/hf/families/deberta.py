"""DeBERTa versions 2 and 3: BERT's layers with disentangled attention.

Source: arXiv 2006.03654, section 3.1; the later layout is that of released checkpoints (arXiv 2111.09543).
"""

from __future__ import annotations

from typing import Literal

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.families import bert
from clearhead.checkpoints.hf.families.bert import SELF
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import attention_rules, module_rule, tensor_rule

TERMS: dict[str, Literal["content_to_position", "position_to_content"]] = {
    "c2p": "content_to_position",
    "p2c": "position_to_content",
}


def _terms(c: Values) -> list[str]:
    """Return the terms of disentangled attention that `pos_att_type` names, in the order of `TERMS`."""
    setting = c["pos_att_type"] or []
    names = [name.strip() for name in setting.lower().split("|")] if isinstance(setting, str) else setting
    unknown = sorted(set(names) - TERMS.keys())
    if unknown:
        raise InputError(f"config.json: pos_att_type {', '.join(unknown)} is not supported; expected c2p or p2c")
    return [name for name in TERMS if name in names]


def _table(c: Values) -> spec.DistanceTable:
    longest = c["max_relative_positions"] if c["max_relative_positions"] > 0 else c["max_position_embeddings"]
    buckets = c["position_buckets"] if c["position_buckets"] > 0 else None
    norms = [name.strip() for name in c["norm_rel_ebd"].lower().split("|")]
    if set(norms) - {"none", "layer_norm"}:
        raise InputError(
            f"config.json: norm_rel_ebd = {c['norm_rel_ebd']} is not supported; expected none or layer_norm"
        )
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
        raise InputError("config.json: relative_attention = true needs a pos_att_type, c2p or p2c")


def _model(c: Values) -> spec.Model:
    names = _terms(c)
    _check(c, names)
    width, table_width = c["hidden_size"], c["embedding_size"] or c["hidden_size"]
    scores = None
    if c["relative_attention"]:
        scores = spec.Disentangled(
            table=spec.Reference(path="encoder.score_table"),
            terms=tuple(TERMS[name] for name in names),
            shared_projections=c["share_att_key"],
        )
    # The terms that the config names change the scale even without relative positions.
    scale = (width // c["num_attention_heads"] * (1 + len(names))) ** -0.5
    return bert.model(
        c,
        [bert.layer(c, score_bias=scores, scale=scale)] * c["num_hidden_layers"],
        width=None if table_width == width else table_width,
        projection=spec.Projection(place="before_norm", bias=False),
        has_positions=c["position_biased_input"],
        score_table=_table(c) if c["relative_attention"] else None,
    )


def _early_lm_head(c: Values) -> spec.Head:
    return bert.lm_head(c.with_values(width=c["embedding_size"] or c["hidden_size"]), c["hidden_act"], size="width")


def _late_lm_head(c: Values) -> spec.Head:
    """Return the newer form of the LM head: as wide as the layers, and always tied to the token embedding."""
    return bert.lm_head(c, c["hidden_act"], is_tied=True)


def _sequence_head(c: Values) -> spec.Head:
    return blocks.mlp_head("first", "hidden_size", c["pooler_hidden_act"])(c)


# --- from a spec to a config ----------------------------------------------------------------------------------


def _scores(model: spec.Model) -> spec.Disentangled | None:
    score_bias = value_at(model, f"{SELF}.score_bias")
    return score_bias if isinstance(score_bias, spec.Disentangled) else None


def _score_terms(model: spec.Model) -> list[str]:
    scores, attention = _scores(model), value_at(model, SELF)
    if scores is not None:
        return [name for name, term in TERMS.items() if term in scores.terms]
    scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
    return list(TERMS)[: round(scale**-2 / attention.head_size) - 1]


def _distances(model: spec.Model) -> spec.DistanceTable | None:
    table = model.encoder.score_table if model.encoder else None
    return table if isinstance(table, spec.DistanceTable) else None


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


def _pooler_activation(model: spec.Model) -> str | None:
    is_pooled = value_at(model, blocks.in_head(spec.Pool, "by")) is not None
    activation: str | None = value_at(model, blocks.in_head(spec.Activation, "function")) if is_pooled else None
    return activation


DEFAULTS = {
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
ATTENTION, SCORE_BIAS = "encoder.layer.{layer}.attention", f"{SELF}.score_bias"
POSITIONS = r"(deberta\.)?embeddings\.position_embeddings\..*"
UNUSED_BY_LM = (POSITIONS, r"(deberta\.)?encoder\.LayerNorm\.(weight|bias)", r"mask_predictions\..*")
UNUSED = (*UNUSED_BY_LM, r"lm_predictions\..*", r"cls\.predictions\..*")
LATE_LM_HEAD = "lm_predictions.lm_head"

FAMILIES = (
    Family(
        model_type="deberta-v2",
        keys=blocks.derive(
            bert.KEYS,
            DEFAULTS,
            Key("embedding_size", None, "encoder.table_width", kind=int),
            Key("attention_head_size", None, kind=int),
            Key("relative_attention", False, lambda model: _distances(model) is not None),
            Key("pos_att_type", None, _score_terms, kind=str | list[str]),
            Key("max_relative_positions", -1, _longest),
            Key("position_buckets", -1, _buckets),
            Key("norm_rel_ebd", "none", _table_norm),
            Key("share_att_key", False, _is_shared),
            Key("position_biased_input", True, _has_positions),
            Key("pooler_hidden_size", None, kind=int),
            Key("pooler_hidden_act", "gelu", _pooler_activation, names=blocks.ACTIVATIONS),
        ),
        model=_model,
        rules=(
            *(rule for rule in bert.RULES if f"{ATTENTION}.self." not in rule.theirs[0]),
            *attention_rules(f"{ATTENTION}.self", SELF, "query_proj key_proj value_proj out_proj")[:3],
            module_rule("embeddings.embed_proj", "encoder.embedding.projection"),
            module_rule(f"{ATTENTION}.self.pos_key_proj", f"{SCORE_BIAS}.position_key"),
            module_rule(f"{ATTENTION}.self.pos_query_proj", f"{SCORE_BIAS}.position_query"),
            module_rule("encoder.rel_embeddings", "encoder.score_table"),
            module_rule("encoder.LayerNorm", "encoder.score_table.norm"),
        ),
        variants=(
            blocks.mask_filling(
                ("DebertaV2ForMaskedLM",),
                _early_lm_head,
                "cls.predictions",
                dense="transform.dense",
                norm="transform.LayerNorm",
                unused=UNUSED_BY_LM,
            ),
            Variant(
                ("DebertaV2ForMaskedLM",),
                "fill",
                _late_lm_head,
                (
                    module_rule(f"{LATE_LM_HEAD}.dense", "head.layers.0"),
                    module_rule(f"{LATE_LM_HEAD}.LayerNorm", "head.layers.2"),
                    tensor_rule(f"{LATE_LM_HEAD}.bias", "head.layers.3.bias"),
                ),
                unused=UNUSED_BY_LM,
            ),
            blocks.sequence_classification("DebertaV2", _sequence_head, "pooler.dense", "classifier", unused=UNUSED),
            *blocks.token_tasks("DebertaV2", UNUSED),
        ),
        fixed=(
            *bert.FIXED,
            Fixed("conv_kernel_size", (0,), "a convolution next to the first layer is not supported"),
            Fixed("talking_head", (False,), "talking-heads attention is not supported"),
        ),
        # The tensors decide the form of the LM head. Released checkpoints lack the key "legacy".
        inert=(*bert.INERT, "legacy", "pooler_dropout", "cls_dropout", "conv_act", "conv_groups"),
        prefix="deberta.",
        table="embeddings.word_embeddings.weight",
        ignored=bert.IGNORED,
    ),
)
