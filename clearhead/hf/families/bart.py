"""BART and its kin: two stacks of one width, one word table, biases everywhere, and a bias on the scores of words.

They differ in where norms stand and in how positions are told. Source: arXiv 1910.13461, section 2.1; mBART arXiv
2001.08210; Pegasus arXiv 1912.08777; Marian arXiv 1804.00344; M2M-100 arXiv 2010.11125; Blenderbot arXiv 2004.13637.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from clearhead import spec
from clearhead.core.position import sinusoidal_table
from clearhead.hf.mapping import blocks
from clearhead.hf.mapping.family import Constant, Family, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import OneRow, Rule, module_rule, tensor_rule
from clearhead.task import Repeats, TaskKind

Side = Literal["encoder", "decoder"]
TABLE, OWN_TABLE = "encoder.embedding.table", "decoder.embedding.table"
SELF = blocks.function("encoder", 0)


@dataclass(frozen=True)
class Kind:
    """What tells the families apart.

    Args:
        norm: on the stream after each step, or inside before each branch.
        final_norm, embedding_norm: whether each stack has one.
        position: what the embedding adds, made from the config.
    """

    norm: Literal["out", "pre"]
    final_norm: bool
    embedding_norm: bool
    position: Callable[[Values], spec.Learned | spec.Sinusoidal]

    def model(self, c: Values) -> spec.Model:
        """Return the two stacks."""
        encoder, decoder = self._stack(c, "encoder"), self._stack(c, "decoder")
        return spec.Model(encoder=encoder, decoder=decoder, initialization=blocks.INITIALIZATION)

    def _stack(self, c: Values, side: Side) -> spec.Stack:
        norm, drop = spec.LayerNorm(), c["dropout"]
        sources: tuple[Literal["self", "memory"], ...] = ("self",) if side == "encoder" else ("self", "memory")
        functions: list[blocks.AnyFunction] = [_attention(c, side, source) for source in sources]
        functions.append(
            spec.FeedForward(
                size=c[f"{side}_ffn_dim"], activation=c["activation_function"], dropout=c["activation_dropout"]
            )
        )
        step = blocks.after if self.norm == "out" else blocks.pre
        embedding = spec.Embedding(
            table=spec.Table(rows=_rows(c, side)) if side == "encoder" or _is_apart(c) else spec.Reference(path=TABLE),
            scale=c["d_model"] ** 0.5 if c["scale_embedding"] else 1.0,
            position=self.position(c),
            norm=norm if self.embedding_norm else None,
            dropout=drop,
        )
        layer = spec.Layer(steps=tuple(step(norm, function, drop) for function in functions))
        return spec.Stack(
            width=c["d_model"],
            embedding=embedding,
            layers=(layer,) * c[f"{side}_layers"],
            final_norm=norm if self.final_norm else None,
        )


def _is_apart(c: Values) -> bool:
    """Whether each stack has a table of its own."""
    return not c.get("share_encoder_decoder_embeddings", True)


def _rows(c: Values, side: Side) -> int:
    rows: int = c["vocab_size"]
    return c["decoder_vocab_size"] or rows if side == "decoder" and _is_apart(c) else rows


def _words(bias: bool) -> Callable[[Values], spec.Head]:
    """Scores of the decoder's vocabulary."""

    def head(c: Values) -> spec.Head:
        path = OWN_TABLE if _is_apart(c) else TABLE
        weight = spec.Reference(path=path) if c["tie_word_embeddings"] else None
        return spec.Head(layers=(spec.Linear(size=_rows(c, "decoder"), bias=bias, weight=weight),))

    return head


def _attention(c: Values, side: Side, source: Literal["self", "memory"]) -> spec.Attention:
    heads = c[f"{side}_attention_heads"]
    return spec.Attention(
        source=source,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=c["d_model"] // heads,
        mask=spec.Causal() if (side, source) == ("decoder", "self") else spec.Full(),
        dropout=c["attention_dropout"],
    )


def _learned(offset: int) -> Callable[[Values], spec.Learned]:
    return lambda c: spec.Learned(rows=c["max_position_embeddings"] + offset, offset=offset)


def _halves(c: Values) -> spec.Sinusoidal:
    return spec.Sinusoidal(layout="halves")


def _counting(c: Values) -> spec.Sinusoidal:
    """Positions begin after the padding's id."""
    return spec.Sinusoidal(layout="fairseq", offset=c["pad_token_id"] + 1)


def _positions(model: spec.Model) -> int | None:
    """How many positions there are; sines have no end."""
    position = model.encoder.embedding.position if model.encoder else None
    return position.rows - position.offset if isinstance(position, spec.Learned) else None


def _is_scaled(model: spec.Model) -> bool:
    return model.encoder is not None and model.encoder.embedding.scale != 1.0


def _keys() -> tuple[Key, ...]:
    sides: list[Key] = []
    for side in ("encoder", "decoder"):
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
        Key("max_position_embeddings", 1024, _positions),
        *sides,
        Key("activation_function", "gelu", f"{blocks.function('encoder', 1)}.activation", names=blocks.ACTIVATIONS),
        Key("dropout", 0.1, "encoder.embedding.dropout"),
        Key("attention_dropout", 0.0, f"{SELF}.dropout"),
        Key("activation_dropout", 0.0, f"{blocks.function('encoder', 1)}.dropout"),
        Key("scale_embedding", False, _is_scaled),
        blocks.tying(True),
    )


def _attention_rules(side: Side, step: int, name: str) -> tuple[Rule, ...]:
    theirs, ours = f"{side}.layers.{{layer}}.{name}", blocks.function(side, step)
    maps = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    return tuple(module_rule(f"{theirs}.{one}", f"{ours}.{address}") for one, address in maps.items())


def _norm_rules(side: Side, step: int, name: str) -> tuple[Rule, ...]:
    theirs = f"{side}.layers.{{layer}}.{name}"
    return module_rule(theirs, blocks.out(side, step)), module_rule(theirs, f"{blocks.branch(side, step)}.pre")


def _side_rules(side: Side) -> tuple[Rule, ...]:
    last = 1 if side == "encoder" else 2
    memory = (*_attention_rules(side, 1, "encoder_attn"), *_norm_rules(side, 1, "encoder_attn_layer_norm"))
    return (
        module_rule(f"{side}.embed_positions", f"{side}.embedding.position"),
        module_rule(f"{side}.layernorm_embedding", f"{side}.embedding.norm"),
        *_attention_rules(side, 0, "self_attn"),
        *_norm_rules(side, 0, "self_attn_layer_norm"),
        *(memory if side == "decoder" else ()),
        module_rule(f"{side}.layers.{{layer}}.fc1", f"{blocks.function(side, last)}.up"),
        module_rule(f"{side}.layers.{{layer}}.fc2", f"{blocks.function(side, last)}.down"),
        *_norm_rules(side, last, "final_layer_norm"),
        module_rule(f"{side}.layer_norm", f"{side}.final_norm"),
    )


# Where the stacks have tables of their own, and the rows of the decoder's.
APART = (
    Key("share_encoder_decoder_embeddings", True, lambda model: _own_rows(model) is None),
    Key("decoder_vocab_size", None, lambda model: _own_rows(model), kind=int),
)
RULES = (
    module_rule("encoder.embed_tokens", TABLE, beside=f"{OWN_TABLE}.weight"),
    module_rule("decoder.embed_tokens", OWN_TABLE),
    module_rule("shared", TABLE),
    *_side_rules("encoder"),
    *_side_rules("decoder"),
)
SCORES = tensor_rule("final_logits_bias", "head.layers.0.bias", OneRow(), zeros=True)


def _sinusoids(side: Side, *, is_written: bool, layout: Literal["halves", "fairseq"]) -> Constant:
    def compute(model: spec.Model, rows: int) -> Tensor:
        assert model.encoder is not None
        return sinusoidal_table(rows, model.encoder.width, spec.Sinusoidal(layout=layout))

    return Constant(f"{side}.embed_positions.weight", compute, is_written)


def _labels(c: Values) -> spec.Head:
    inner = (spec.Linear(size=c["d_model"]), spec.Activation(function="tanh"))
    return spec.Head(layers=(spec.Pool(by="last"), *inner, spec.Linear(size=c.num_labels)))


def _repeating(name: str, repeats: Repeats) -> tuple[Variant, ...]:
    """The classes whose decoder reads the encoder's text once more."""
    head = (
        module_rule("classification_head.dense", "head.layers.1"),
        module_rule("classification_head.out_proj", "head.layers.3"),
    )
    return (
        Variant((f"{name}ForSequenceClassification",), "classify", _labels, head, repeats=repeats),
        blocks.answering(f"{name}ForQuestionAnswering", repeats=repeats),
    )


def _record(
    model_type: str,
    name: str,
    kind: Kind,
    keys: tuple[Key, ...],
    *,
    words_class: str = "ForConditionalGeneration",
    task: TaskKind = "denoise",
    bias: bool = True,
    written: bool | None = None,
    padding: Mapping[str, int | None] | None = None,
    repeats: Repeats | None = None,
) -> Family:
    head = (tensor_rule("lm_head.weight", "head.layers.0.weight"), *((SCORES,) if bias else ()))
    sides: tuple[Side, ...] = ("encoder", "decoder")
    # Settings of the first port, which nothing reads; they must not say something else than the family does.
    only = (
        Fixed("normalize_before", (kind.norm == "pre",), "norms would stand elsewhere"),
        Fixed("normalize_embedding", (kind.embedding_norm,), "the embedding would end otherwise"),
        Fixed("add_final_layer_norm", (kind.final_norm,), "the stacks would end otherwise"),
        Fixed("static_position_embeddings", (written is not None,), "positions would be others"),
        Fixed("add_bias_logits", (False,), "the scores would have a second bias"),
        Fixed(APART[0].name, (True,), "the stacks would have tables of their own"),
        Fixed("is_causal", (False,), "tokens would see what is before them alone"),
    )
    return Family(
        model_type=model_type,
        keys=keys,
        model=kind.model,
        rules=RULES,
        variants=(
            Variant((f"{name}{words_class}",), task, _words(bias), head, output="lm_head.weight"),
            *(_repeating(name, repeats) if repeats else ()),
            blocks.bare(f"{name}Model"),
        ),
        only=tuple(one for one in only if one.name not in {key.name for key in keys}),
        inert=(
            "classif_dropout", "classifier_dropout", "decoder_layerdrop", "encoder_layerdrop", "extra_pos_embeddings",
            "force_bos_token_to_be_generated", "init_std", "save_step", *(() if APART[1] in keys else (APART[1].name,)),
        ),
        prefix="model.",
        table="shared.weight",
        twins=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ignored=(r"(encoder|decoder)\.version", r"(encoder|decoder)\.embed_positions\.(_float_tensor|weights)"),
        constants=tuple(_sinusoids(side, is_written=written, layout="halves") for side in sides)
        if written is not None
        else (),
        written=padding or {},
    )  # fmt: skip


def _before_first(model: spec.Model) -> int | None:
    """The padding's id, where it tells from which row positions count."""
    position = model.encoder.embedding.position if model.encoder else None
    return position.offset - 1 if isinstance(position, spec.Sinusoidal) and position.offset else None


def _own_rows(model: spec.Model) -> int | None:
    table = model.decoder.embedding.table if model.decoder else None
    return table.rows if isinstance(table, spec.Table) else None


KEYS = _keys()
PAD = Key("pad_token_id", 1, _before_first)
MANY = {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
BLENDERBOT = {
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
    _record("bart", "Bart", Kind("out", False, True, _learned(2)), KEYS, repeats="start"),
    # What ends a text is its language, with which the decoder begins.
    _record("mbart", "MBart", Kind("pre", True, True, _learned(2)), KEYS, task="translate", repeats="last"),
    _record("blenderbot", "Blenderbot", Kind("pre", True, False, _learned(0)), blocks.defaults(KEYS, BLENDERBOT)),
    _record("pegasus", "Pegasus", Kind("pre", True, False, _halves), KEYS, written=True),
    _record(
        "marian",
        "Marian",
        Kind("out", False, False, _halves),
        (*blocks.defaults(KEYS, {"vocab_size": 58101}), *APART),
        task="translate",
        words_class="MTModel",
        written=False,
        padding={"pad_token_id": None, "decoder_start_token_id": 0},
    ),
    _record(
        "m2m_100",
        "M2M100",
        Kind("pre", True, False, _counting),
        (*blocks.defaults(KEYS, MANY), PAD),
        task="translate",
        bias=False,
    ),
)
