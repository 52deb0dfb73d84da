"""T5, mT5 and umT5: no biases, pre-norm layers with RMSNorm, relative position buckets, unscaled scores.

Source: arXiv 1910.10683, section 2.1; gated networks without tied outputs arXiv 2002.05202; mT5 arXiv 2010.11934;
buckets of each layer arXiv 2304.09151.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, attention_rules, module_rule

SELF = blocks.function("encoder", 0)
STACKS = ("encoder", "decoder")
# "gated-gelu" means the tanh form, although "gelu" alone is exact.
NETWORKS = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gelu": ("gelu", False),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
    "silu": ("silu", False),
    "gelu_new": ("gelu_tanh", False),
}


def _stack(c: Values, side: Literal["encoder", "decoder"], layers: int, *, is_shared: bool) -> spec.Stack:
    norm, drop = spec.RMSNorm(eps=c["layer_norm_epsilon"]), c["dropout_rate"]
    activation, gated = c["feed_forward_proj"]
    if c["dense_act_fn"] not in (None, activation) or c["is_gated_act"] not in (None, gated):
        raise InputError("config.json: dense_act_fn and is_gated_act must agree with feed_forward_proj")

    buckets = spec.RelativeBuckets(
        num_heads=c["num_heads"],
        count=c["relative_attention_num_buckets"],
        max_distance=c["relative_attention_max_distance"],
        bidirectional=side == "encoder",
    )
    scores = spec.Reference(path=f"{side}.score_table") if is_shared else buckets

    def attention(source: Literal["self", "memory"]) -> spec.Attention:
        return spec.Attention(
            source=source,
            num_heads=c["num_heads"],
            num_kv_heads=c["num_heads"],
            head_size=c["d_kv"],
            mask=spec.Causal() if source == "self" and side == "decoder" else spec.Full(),
            score_bias=scores if source == "self" else None,
            scale=1.0,
            bias=blocks.biases(False),
            dropout=drop,
        )

    network = spec.FeedForward(
        size=c["d_ff"], activation=activation, gated=gated, bias_in=False, bias_out=False, dropout=drop
    )
    memory = (attention("memory"),) if side == "decoder" else ()
    layer = blocks.layer(norm, attention("self"), *memory, network, dropout=drop)
    token_table = spec.Table(rows=c["vocab_size"])
    table = token_table if side == "encoder" else spec.Reference(path="encoder.embedding.table")
    return spec.Stack(
        width=c["d_model"],
        embedding=spec.Embedding(table=table, dropout=drop),
        layers=(layer,) * layers,
        final_norm=norm,
        score_table=buckets if is_shared else None,
    )


def _model(c: Values, *, is_shared: bool = True) -> spec.Model:
    layers = c["num_layers"]
    decoder_layers = layers if c["num_decoder_layers"] is None else c["num_decoder_layers"]
    return spec.Model(
        encoder=_stack(c, "encoder", layers, is_shared=is_shared),
        decoder=_stack(c, "decoder", decoder_layers, is_shared=is_shared),
        initialization=blocks.INITIALIZATION,
    )


def _umt5_model(c: Values) -> spec.Model:
    """Every layer has a bucket table of its own."""
    return _model(c, is_shared=False)


def _output_scale(c: Values) -> float:
    """The first release scales the input of the output layer; a config of a later one only differs in its tying."""
    is_scaled = c.get("scale_decoder_outputs")
    if is_scaled is None:
        is_scaled = c.original["tie_word_embeddings"]
    return c["d_model"] ** -0.5 if is_scaled else 1.0


def _has_scale(model: spec.Model) -> bool | None:
    last = model.head.layers[-1] if model.head else None
    return last.scale != 1.0 if isinstance(last, spec.Linear) else None


def _network(model: spec.Model) -> tuple[object, bool]:
    network = value_at(model, "encoder.layers.0.steps.-1.branches.0.function")
    return network.activation, network.gated


def _buckets(model: spec.Model) -> spec.RelativeBuckets:
    score_bias = value_at(model, f"{SELF}.score_bias")
    buckets = score_bias if isinstance(score_bias, spec.RelativeBuckets) else value_at(model, "encoder.score_table")
    if not isinstance(buckets, spec.RelativeBuckets):
        raise LookupError("no bucket table")
    return buckets


KEYS = (
    Key("vocab_size", 32128, "encoder.embedding.table.rows"),
    Key("d_model", 512, "encoder.width", aliases=("hidden_size",)),
    Key("d_kv", 64, f"{SELF}.head_size", aliases=("head_dim",)),
    Key("d_ff", 2048, f"{blocks.function('encoder', 1)}.size"),
    Key("num_layers", 6, blocks.count_layers("encoder"), aliases=("num_hidden_layers",)),
    Key("num_decoder_layers", None, blocks.count_layers("decoder"), kind=int),
    Key("num_heads", 8, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("relative_attention_num_buckets", 32, lambda model: _buckets(model).count),
    Key("relative_attention_max_distance", 128, lambda model: _buckets(model).max_distance),
    Key("dropout_rate", 0.1, "encoder.embedding.dropout"),
    Key("layer_norm_epsilon", 1e-6, "encoder.final_norm.eps"),
    Key("feed_forward_proj", "relu", _network, names=NETWORKS),
    Key("dense_act_fn", None, kind=str, names=blocks.ACTIVATIONS),
    Key("is_gated_act", None, kind=bool),
    blocks.tying(True),
)
OUTPUT_SCALE_KEY = Key("scale_decoder_outputs", None, _has_scale, kind=bool)


def _attention(stack: str, step: int, name: str) -> tuple[Rule, ...]:
    theirs, ours = f"{stack}.block.{{layer}}.layer.{step}", blocks.branch(stack, step)
    norm = module_rule(f"{theirs}.layer_norm", f"{ours}.pre")
    return (norm, *attention_rules(f"{theirs}.{name}", f"{ours}.function", "q k v o"))


def _feed_forward(stack: str, step: int) -> tuple[Rule, ...]:
    theirs, ours = f"{stack}.block.{{layer}}.layer.{step}", blocks.branch(stack, step)
    network, gate = f"{theirs}.DenseReluDense", f"{ours}.function.gate"
    return (
        module_rule(f"{theirs}.layer_norm", f"{ours}.pre"),
        module_rule(f"{network}.wi_0", gate),
        module_rule(f"{network}.wi_1", f"{ours}.function.up", requires=f"{gate}.weight"),
        module_rule(f"{network}.wi", f"{ours}.function.up"),
        module_rule(f"{network}.wo", f"{ours}.function.down"),
    )


# The bucket table is stored in the first layer and used by all.
SCORES = "{0}.block.0.layer.0.SelfAttention.relative_attention_bias"
LAYER_SCORES = "{0}.block.{{layer}}.layer.0.SelfAttention.relative_attention_bias"
RULES = (
    module_rule("shared", "encoder.embedding.table"),
    *_attention("encoder", 0, "SelfAttention"),
    *_feed_forward("encoder", 1),
    *_attention("decoder", 0, "SelfAttention"),
    *_attention("decoder", 1, "EncDecAttention"),
    *_feed_forward("decoder", 2),
    *(module_rule(SCORES.format(stack), f"{stack}.score_table") for stack in STACKS),
    *(module_rule(LAYER_SCORES.format(stack), f"{blocks.function(stack, 0)}.score_bias") for stack in STACKS),
    *(module_rule(f"{stack}.final_layer_norm", f"{stack}.final_norm") for stack in STACKS),
)


def _family(
    model_type: str,
    name: str,
    scale: Callable[[Values], float],
    keys: tuple[Key, ...],
    model: Callable[[Values], spec.Model] = _model,
) -> Family:
    head = blocks.lm_head("encoder.embedding.table", scale=scale)
    lm_rules = (module_rule("lm_head", "head.layers.0"),)
    older, no_decoder = "transformer.", (r"transformer\.decoder\..*",)
    return Family(
        model_type=model_type,
        keys=keys,
        model=model,
        rules=RULES,
        variants=(
            Variant((f"{name}ForConditionalGeneration",), "denoise", head, lm_rules, output="lm_head.weight"),
            blocks.seq2seq_classification(name, "start", prefix=older),
            blocks.token_classification(name, prefix=older, unused=no_decoder, has_decoder=False),
            blocks.question_answering(name, repeats="start"),
            Variant((f"{name}Model",), "embed", blocks.no_head),
            Variant((f"{name}EncoderModel",), "embed", blocks.no_head, unused=(r"decoder\..*",), has_decoder=False),
        ),
        table="shared.weight",
        table_copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        # Cross-attention once had a table that nothing read.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        inert=("n_positions", "initializer_factor", "classifier_dropout"),
        is_tied_by_file=True,
    )


MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}

FAMILIES = (
    _family("t5", "T5", _output_scale, (*KEYS, OUTPUT_SCALE_KEY)),
    _family("mt5", "MT5", lambda c: 1.0, blocks.derive(KEYS, MT5)),
    # Whether the output layer's input is scaled follows from the config's tying, as in the first release of T5.
    _family("umt5", "UMT5", _output_scale, blocks.derive(KEYS, MT5), _umt5_model),
)
