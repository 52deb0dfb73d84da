"""Hyperparameters of a regular model, in which all layers are alike, and the spec they expand to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead import spec
from clearhead.base.errors import InputError


@dataclass(frozen=True)
class Hyperparameters:
    """The sizes and choices that define a regular model.

    Args:
        family: which stacks there are.
        layers: of each stack; encoder_layers and decoder_layers, where given, differ from it.
        width, heads, kv_heads, head_size, feedforward: sizes; absent ones follow from the others.
        activation, gated: of the feed-forward networks.
        norm, norm_place: kind of norm, and whether it stands on the stream after a branch or inside before it.
        norm_eps: added to the variance; None: the usual value for the kind of norm.
        final_norm: whether a norm ends each stack; None: where norms stand before the branches.
        embedding_norm: whether a norm ends the embedding.
        positions: what tells tokens apart by place; max_positions counts the rows of learned ones.
        segments: rows of the segment table; 0: none.
        dropout: at the end of every branch and of the embedding.
        attention_dropout, activation_dropout: on attention weights, on the inner layer of feed-forward networks.
        window: how many tokens back, and in an encoder ahead, self-attention sees; None: all there are.
        qk_norm: whether queries and keys are normed.
        bias: whether linear maps and layer norms have one.
        attention_scale: multiplies the scores; None: head_size ** -0.5.
        embedding_scale: multiplies the rows of the table; None: sqrt(width) if tied to the output, else 1.
        output_scale: multiplies the states that enter the last map.
        output_bias: whether the last map has a bias.
        output_transform: whether the head has an inner layer with activation and norm.
        tie: which tables are one: all of them, those of the decoder and the output, or none.
        initialization: how fresh weights are drawn.
    """

    family: Literal["encoder", "decoder", "encoder-decoder"] = "encoder-decoder"
    layers: int = 6
    encoder_layers: int | None = None
    decoder_layers: int | None = None
    width: int = 512
    heads: int = 8
    kv_heads: int | None = None
    head_size: int | None = None
    feedforward: int | None = None
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_place: Literal["post", "pre"] = "post"
    norm_eps: float | None = None
    final_norm: bool | None = None
    embedding_norm: bool = False
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "buckets"] = "sinusoidal"
    max_positions: int = 1024
    segments: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    window: int | None = None
    qk_norm: bool = False
    bias: bool = True
    attention_scale: float | None = None
    embedding_scale: float | None = None
    output_scale: float = 1.0
    output_bias: bool = False
    output_transform: bool = False
    tie: Literal["all", "decoder", "none"] = "all"
    initialization: Literal["xavier", "normal"] = "xavier"


def build_spec(
    hparams: Hyperparameters, *, source_vocab: int, target_vocab: int, head: spec.Head | None = None
) -> spec.Model:
    """Expand hyperparameters to the spec of a model.

    Args:
        hparams: sizes and choices.
        source_vocab: rows of the table of the first stack.
        target_vocab: rows of the table of the decoder; the same as source_vocab where tables are tied.
        head: what turns states into outputs; None: scores of the vocabulary.

    Raises:
        InputError: sizes that do not fit together, every fault in one report.
    """
    faults = _faults(hparams, source_vocab, target_vocab)
    if faults:
        raise InputError.from_faults(faults, subject="the model")
    encoder = decoder = None
    if hparams.family != "decoder":
        encoder = _stack(hparams, "encoder", spec.Table(rows=source_vocab))
    if hparams.family != "encoder":
        shared = encoder is not None and hparams.tie == "all"
        table = spec.Reference(path="encoder.embedding.table") if shared else spec.Table(rows=target_vocab)
        decoder = _stack(hparams, "decoder", table)
    owner = "decoder" if decoder and isinstance(decoder.embedding.table, spec.Table) else "encoder"
    model = spec.Model(
        encoder=encoder,
        decoder=decoder,
        head=head or _vocabulary_head(hparams, target_vocab if decoder else source_vocab, f"{owner}.embedding.table"),
        initialization=spec.Normal() if hparams.initialization == "normal" else spec.Xavier(),
    )
    return spec.validate(model)


def _faults(hparams: Hyperparameters, source_vocab: int, target_vocab: int) -> list[str]:
    faults = []
    if hparams.head_size is None and hparams.width % hparams.heads:
        faults.append(
            f"width {hparams.width} is not a multiple of heads {hparams.heads}; change one, or give head_size"
        )
    if hparams.kv_heads is not None and hparams.heads % hparams.kv_heads:
        faults.append(f"heads {hparams.heads} is not a multiple of kv_heads {hparams.kv_heads}")
    if hparams.positions == "sinusoidal" and hparams.width % 2:
        faults.append(f"sinusoidal positions need an even width, got {hparams.width}")
    if hparams.family == "encoder-decoder" and hparams.tie == "all" and source_vocab != target_vocab:
        faults.append(
            f"tie = 'all' needs one vocabulary, but the source has {source_vocab} entries and the target "
            f"{target_vocab}; use a joint tokenizer or tie = 'decoder'"
        )
    return faults


def _norm(hparams: Hyperparameters) -> spec.LayerNorm | spec.RMSNorm:
    if hparams.norm == "rms":
        return spec.RMSNorm(eps=hparams.norm_eps or 1e-6)
    return spec.LayerNorm(eps=hparams.norm_eps or 1e-5, bias=hparams.bias)


def _stack(
    hparams: Hyperparameters, side: Literal["encoder", "decoder"], table: spec.Table | spec.Reference
) -> spec.Stack:
    layers = (hparams.encoder_layers if side == "encoder" else hparams.decoder_layers) or hparams.layers
    functions: list[spec.Attention | spec.FeedForward] = [_attention(hparams, side, "self")]
    if side == "decoder" and hparams.family == "encoder-decoder":
        functions.append(_attention(hparams, side, "memory"))
    functions.append(_feed_forward(hparams))
    steps = tuple(_step(hparams, function) for function in functions)
    ends_in_norm = hparams.norm_place == "pre" if hparams.final_norm is None else hparams.final_norm
    return spec.Stack(
        width=hparams.width,
        embedding=_embedding(hparams, table),
        layers=(spec.Layer(steps=steps),) * layers,
        final_norm=_norm(hparams) if ends_in_norm else None,
        score_table=_buckets(hparams, side) if hparams.positions == "buckets" else None,
    )


def _step(hparams: Hyperparameters, function: spec.Attention | spec.FeedForward) -> spec.Step:
    inside = _norm(hparams) if hparams.norm_place == "pre" else None
    after = _norm(hparams) if hparams.norm_place == "post" else None
    return spec.Step(branches=(spec.Branch(function=function, pre=inside, dropout=hparams.dropout),), out=after)


def _attention(
    hparams: Hyperparameters, side: Literal["encoder", "decoder"], source: Literal["self", "memory"]
) -> spec.Attention:
    rotary = alibi = buckets = None
    if source == "self":
        rotary = spec.Rotary() if hparams.positions == "rotary" else None
        alibi = spec.Alibi() if hparams.positions == "alibi" else None
        buckets = spec.Reference(path=f"{side}.score_table") if hparams.positions == "buckets" else None
    bias = hparams.bias
    return spec.Attention(
        source=source,
        num_heads=hparams.heads,
        num_kv_heads=hparams.kv_heads or hparams.heads,
        head_size=hparams.head_size or hparams.width // hparams.heads,
        mask=_mask(hparams, side) if source == "self" else spec.Full(),
        position=rotary,
        score_bias=alibi or buckets,
        scale=hparams.attention_scale,
        bias=spec.Biases(query=bias, key=bias, value=bias, out=bias),
        query_key_norm=spec.QueryKeyNorm(norm=spec.RMSNorm()) if hparams.qk_norm else None,
        dropout=hparams.attention_dropout,
    )


def _mask(hparams: Hyperparameters, side: Literal["encoder", "decoder"]) -> spec.Full | spec.Causal | spec.Window:
    if hparams.window is not None:
        return spec.Window(before=hparams.window, after=hparams.window if side == "encoder" else 0)
    return spec.Full() if side == "encoder" else spec.Causal()


def _feed_forward(hparams: Hyperparameters) -> spec.FeedForward:
    return spec.FeedForward(
        size=hparams.feedforward or 4 * hparams.width,
        activation=hparams.activation,
        gated=hparams.gated,
        bias_in=hparams.bias,
        bias_out=hparams.bias,
        dropout=hparams.activation_dropout,
    )


def _embedding(hparams: Hyperparameters, table: spec.Table | spec.Reference) -> spec.Embedding:
    position: spec.Sinusoidal | spec.Learned | None = None
    if hparams.positions == "sinusoidal":
        position = spec.Sinusoidal()
    elif hparams.positions == "learned":
        position = spec.Learned(rows=hparams.max_positions)
    scale = hparams.embedding_scale
    if scale is None:
        # Xavier draws tables with deviation 1/sqrt(width), so that they serve as output weights; undone on the way in.
        scale = hparams.width**0.5 if hparams.initialization == "xavier" else 1.0
    return spec.Embedding(
        table=table,
        scale=scale,
        num_segments=hparams.segments,
        position=position,
        norm=_norm(hparams) if hparams.embedding_norm else None,
        dropout=hparams.dropout,
    )


def _buckets(hparams: Hyperparameters, side: str) -> spec.RelativeBuckets:
    return spec.RelativeBuckets(num_heads=hparams.heads, bidirectional=side == "encoder")


def _vocabulary_head(hparams: Hyperparameters, outputs: int, table: str) -> spec.Head:
    weight = None if hparams.tie == "none" else spec.Reference(path=table)
    last = spec.Linear(size=outputs, bias=hparams.output_bias, weight=weight, scale=hparams.output_scale)
    if not hparams.output_transform:
        return spec.Head(layers=(last,))
    inner = (
        spec.Linear(size=hparams.width),
        spec.Activation(function=hparams.activation),
        _norm(hparams),
    )
    return spec.Head(layers=(*inner, last))
