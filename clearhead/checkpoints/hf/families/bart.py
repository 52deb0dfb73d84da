"""BART and similar families: two stacks of one width, one token embedding, biases everywhere.

The families differ in the places of their norms and in the kind of positions.

Source: arXiv 1910.13461, section 2.1; mBART arXiv 2001.08210; Pegasus arXiv 1912.08777; Marian arXiv 1804.00344;
M2M-100 arXiv 2010.11125; Blenderbot arXiv 2004.13637.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Constant, Family, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import OneRow, Rule, attention_rules, module_rule, tensor_rule
from clearhead.core.kernels.positions import sinusoidal_table
from clearhead.spec.tasks.record import Repeats

Side = Literal["encoder", "decoder"]
SIDES: tuple[Side, ...] = ("encoder", "decoder")
TABLE, OWN_TABLE = "encoder.embedding.table", "decoder.embedding.table"
SELF = blocks.function("encoder", 0)


@dataclass(frozen=True)
class StackDesign:
    """Choices in which the families differ: places of norms and kind of positions.

    Args:
        norm: place of the norm, after the residual sum ("out") or before attention or the feed-forward network ("pre").
        final_norm, embedding_norm: True if each stack has a norm after its last layer, or after its embedding.
        position: function from config values to the positions of the embedding.
    """

    norm: Literal["out", "pre"]
    final_norm: bool
    embedding_norm: bool
    position: Callable[[Values], spec.Learned | spec.Sinusoidal]

    def model(self, c: Values) -> spec.Model:
        """Return the spec of encoder and decoder, without a head."""
        encoder, decoder = (self._stack(c, side) for side in SIDES)
        return spec.Model(encoder=encoder, decoder=decoder, initialization=blocks.INITIALIZATION)

    def _stack(self, c: Values, side: Side) -> spec.Stack:
        norm, drop = spec.LayerNorm(), c["dropout"]
        sources: tuple[Literal["self", "memory"], ...] = ("self",) if side == "encoder" else ("self", "memory")
        network = spec.FeedForward(
            size=c[f"{side}_ffn_dim"], activation=c["activation_function"], dropout=c["activation_dropout"]
        )
        nodes: list[blocks.AnyFunction] = [*(_attention(c, side, source) for source in sources), network]
        step = blocks.after if self.norm == "out" else blocks.pre
        layer = spec.Layer(steps=tuple(step(norm, node, drop) for node in nodes))
        return spec.Stack(
            width=c["d_model"],
            embedding=self._embedding(c, side),
            layers=(layer,) * c[f"{side}_layers"],
            final_norm=norm if self.final_norm else None,
        )

    def _embedding(self, c: Values, side: Side) -> spec.Embedding:
        table: spec.Table | spec.Reference = spec.Reference(path=TABLE)
        if side == "encoder" or _has_two_tables(c):
            table = spec.Table(rows=_rows(c, side))
        return spec.Embedding(
            table=table,
            scale=c["d_model"] ** 0.5 if c["scale_embedding"] else 1.0,
            position=self.position(c),
            norm=spec.LayerNorm() if self.embedding_norm else None,
            dropout=c["dropout"],
        )


def _has_two_tables(c: Values) -> bool:
    """Return whether encoder and decoder have separate token embeddings."""
    return not c.get("share_encoder_decoder_embeddings", True)


def _rows(c: Values, side: Side) -> int:
    rows: int = c["vocab_size"]
    return c["decoder_vocab_size"] or rows if side == "decoder" and _has_two_tables(c) else rows


def _lm_head(bias: bool) -> blocks.MakeHead:
    """Return a function that makes the LM head of the decoder."""

    def head(c: Values) -> spec.Head:
        path = OWN_TABLE if _has_two_tables(c) else TABLE
        return blocks.lm_head(path, bias=bias)(c.with_values(vocab_size=_rows(c, "decoder")))

    return head


def _attention(c: Values, side: Side, source: Literal["self", "memory"]) -> spec.Attention:
    mask = spec.Causal() if (side, source) == ("decoder", "self") else spec.Full()
    heads, drop = c[f"{side}_attention_heads"], c["attention_dropout"]
    return blocks.attention(c["d_model"], heads, source=source, mask=mask, dropout=drop)


def _make_learned_positions(offset: int) -> Callable[[Values], spec.Learned]:
    return lambda c: spec.Learned(rows=c["max_position_embeddings"] + offset, offset=offset)


def _sinusoidal_positions(c: Values) -> spec.Sinusoidal:
    return spec.Sinusoidal(layout="halves")


def _positions_after_padding(c: Values) -> spec.Sinusoidal:
    """Return sinusoidal position embeddings whose first position is the padding id plus 1."""
    return spec.Sinusoidal(layout="fairseq", offset=c["pad_token_id"] + 1)


def _num_positions(model: spec.Model) -> int | None:
    """Return the number of learned positions; with sinusoidal positions, the declared length of the model."""
    position = model.encoder.embedding.position if model.encoder else None
    return position.rows - position.offset if isinstance(position, spec.Learned) else model.declared_length


def _is_scaled(model: spec.Model) -> bool:
    return model.encoder is not None and model.encoder.embedding.scale != 1.0


def _keys() -> tuple[Key, ...]:
    sides: list[Key] = []
    for side in SIDES:
        network = blocks.function(side, 1 if side == "encoder" else 2)
        short = side == "encoder"
        sides += [
            Key(f"{side}_layers", 12, blocks.count_layers(side), aliases=("num_hidden_layers",) if short else ()),
            Key(f"{side}_ffn_dim", 4096, f"{network}.size"),
            Key(f"{side}_attention_heads", 16, f"{blocks.function(side, 0)}.num_heads",
                aliases=("num_attention_heads",) if short else ()),
        ]  # fmt: skip
    return (
        Key("vocab_size", 50265, f"{TABLE}.rows"),
        Key("d_model", 1024, "encoder.width", aliases=("hidden_size",)),
        Key("max_position_embeddings", 1024, _num_positions),
        *sides,
        Key("activation_function", "gelu", f"{blocks.function('encoder', 1)}.activation", names=blocks.ACTIVATIONS),
        Key("dropout", 0.1, "encoder.embedding.dropout"),
        Key("attention_dropout", 0.0, f"{SELF}.dropout"),
        Key("activation_dropout", 0.0, f"{blocks.function('encoder', 1)}.dropout"),
        Key("scale_embedding", False, _is_scaled),
        blocks.tying(True),
    )


def _side_rules(side: Side) -> tuple[Rule, ...]:
    last, layer = 1 if side == "encoder" else 2, f"{side}.layers.{{layer}}"
    names = {"self_attn": 0} | ({"encoder_attn": 1} if side == "decoder" else {})
    attentions = [
        rule
        for name, step in names.items()
        for rule in (
            *attention_rules(f"{layer}.{name}", blocks.function(side, step), "q_proj k_proj v_proj out_proj"),
            *blocks.step_norm_rules(f"{layer}.{name}_layer_norm", side, step),
        )
    ]
    return (
        module_rule(f"{side}.embed_positions", f"{side}.embedding.position"),
        module_rule(f"{side}.layernorm_embedding", f"{side}.embedding.norm"),
        *attentions,
        module_rule(f"{layer}.fc1", f"{blocks.function(side, last)}.up"),
        module_rule(f"{layer}.fc2", f"{blocks.function(side, last)}.down"),
        *blocks.step_norm_rules(f"{layer}.final_layer_norm", side, last),
        module_rule(f"{side}.layer_norm", f"{side}.final_norm"),
    )


# Keys for separate token embeddings, and for the rows of the decoder's table.
TWO_TABLES = (
    Key("share_encoder_decoder_embeddings", True, lambda model: _own_rows(model) is None),
    Key("decoder_vocab_size", None, lambda model: _own_rows(model), kind=int),
)
RULES = (
    module_rule("encoder.embed_tokens", TABLE, requires=f"{OWN_TABLE}.weight"),
    module_rule("decoder.embed_tokens", OWN_TABLE),
    module_rule("shared", TABLE),
    *_side_rules("encoder"),
    *_side_rules("decoder"),
)
OUTPUT_BIAS = tensor_rule("final_logits_bias", "head.layers.0.bias", OneRow(), zeros=True)


def _sinusoids(model: spec.Model, rows: int) -> Tensor:
    assert model.encoder is not None
    return sinusoidal_table(rows, model.encoder.width, spec.Sinusoidal(layout="halves"))


def _family(
    model_type: str,
    name: str,
    design: StackDesign,
    keys: tuple[Key, ...],
    *,
    lm_class: str = "ForConditionalGeneration",
    task: str = "denoise",
    bias: bool = True,
    writes_tables: bool | None = None,
    padding: Mapping[str, int | None] | None = None,
    repeats: Repeats | None = None,
) -> Family:
    head = [tensor_rule("lm_head.weight", "head.layers.0.weight")]
    if bias:
        head.append(OUTPUT_BIAS)
    # The classes do not read the first five keys, which come from the original port. They must agree with the family.
    fixed = (
        Fixed("normalize_before", (design.norm == "pre",), "norms in other places are not supported"),
        Fixed("normalize_embedding", (design.embedding_norm,), "norms in other places are not supported"),
        Fixed("add_final_layer_norm", (design.final_norm,), "norms in other places are not supported"),
        Fixed("static_position_embeddings", (writes_tables is not None,), "other positions are not supported"),
        Fixed("add_bias_logits", (False,), "a second bias of the output is not supported"),
        Fixed(TWO_TABLES[0].name, (True,), "two token embeddings are not supported"),
        Fixed("is_causal", (False,), "an encoder with causal attention is not supported"),
    )
    repeating = (
        (blocks.seq2seq_classification(name, repeats), blocks.question_answering(name, repeats=repeats))
        if repeats
        else ()
    )
    constants: tuple[Constant, ...] = ()
    if writes_tables is not None:
        constants = tuple(Constant(f"{side}.embed_positions.weight", _sinusoids, writes_tables) for side in SIDES)
    return Family(
        model_type=model_type,
        keys=keys,
        model=design.model,
        rules=RULES,
        variants=(
            Variant((f"{name}{lm_class}",), task, _lm_head(bias), tuple(head), output="lm_head.weight"),
            *repeating,
            blocks.base_model(f"{name}Model"),
        ),
        fixed=tuple(setting for setting in fixed if setting.name not in {key.name for key in keys}),
        inert=(
            "classif_dropout", "classifier_dropout", "decoder_layerdrop", "encoder_layerdrop", "extra_pos_embeddings",
            "force_bos_token_to_be_generated", "init_std", "save_step",
            *(() if TWO_TABLES[1] in keys else (TWO_TABLES[1].name,)),
        ),
        prefix="model.",
        table="shared.weight",
        table_copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ignored=(r"(encoder|decoder)\.version", r"(encoder|decoder)\.embed_positions\.(_float_tensor|weights)"),
        constants=constants,
        written_keys=padding or {},
    )  # fmt: skip


def _padding_id(model: spec.Model) -> int | None:
    """Return the padding id if the first sinusoidal position is this id plus 1, else None."""
    position = model.encoder.embedding.position if model.encoder else None
    return position.offset - 1 if isinstance(position, spec.Sinusoidal) and position.offset else None


def _own_rows(model: spec.Model) -> int | None:
    table = model.decoder.embedding.table if model.decoder else None
    return table.rows if isinstance(table, spec.Table) else None


KEYS = _keys()
PADDING_ID = Key("pad_token_id", 1, _padding_id)
M2M100_DEFAULTS = {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
BLENDERBOT_DEFAULTS = {
    "vocab_size": 8008,
    "encoder_layers": 2,
    "decoder_layers": 24,
    "encoder_ffn_dim": 10240,
    "decoder_ffn_dim": 10240,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "d_model": 2560,
    "max_position_embeddings": 128,
}

FAMILIES = (
    _family("bart", "Bart", StackDesign("out", False, True, _make_learned_positions(2)), KEYS, repeats="start"),
    # A source text ends with its language code, and the decoder begins with this token.
    _family(
        "mbart",
        "MBart",
        StackDesign("pre", True, True, _make_learned_positions(2)),
        KEYS,
        task="translate",
        repeats="last",
    ),
    _family(
        "blenderbot",
        "Blenderbot",
        StackDesign("pre", True, False, _make_learned_positions(0)),
        blocks.derive(KEYS, BLENDERBOT_DEFAULTS),
    ),
    _family("pegasus", "Pegasus", StackDesign("pre", True, False, _sinusoidal_positions), KEYS, writes_tables=True),
    _family(
        "marian",
        "Marian",
        StackDesign("out", False, False, _sinusoidal_positions),
        blocks.derive(KEYS, {"vocab_size": 58101}, *TWO_TABLES),
        task="translate",
        lm_class="MTModel",
        writes_tables=False,
        padding={"pad_token_id": None, "decoder_start_token_id": 0},
    ),
    _family(
        "m2m_100",
        "M2M100",
        StackDesign("pre", True, False, _positions_after_padding),
        blocks.derive(KEYS, M2M100_DEFAULTS, PADDING_ID),
        task="translate",
        bias=False,
    ),
)
