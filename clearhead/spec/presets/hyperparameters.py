"""Hyperparameters of a regular model, in which all layers are alike, and their expansion to a spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.spec.base import MAX_LAYERS, Rate

Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes and options of a model with equal layers; all but those in `PRESET_ONLY` are keys of [model]."""

    #: The stacks of the model; each task allows some families.
    family: Literal["encoder", "decoder", "encoder-decoder"] = "encoder-decoder"
    #: Number of layers of each stack.
    layers: Layers = 6
    #: Number of encoder layers in a model with two stacks, if it differs from `layers`.
    encoder_layers: Layers | None = None
    #: Number of decoder layers in a model with two stacks, if it differs from `layers`.
    decoder_layers: Layers | None = None
    #: Size of the residual stream: numbers per token between the layers.
    width: Count = 512
    #: Number of attention heads; it must divide the width unless `head_size` is set.
    heads: Count = 8
    #: Number of key/value heads, each shared by several query heads (grouped-query attention); by default equal to
    #: `heads`.
    kv_heads: Count | None = None
    #: Size of one head; by default width / heads.
    head_size: Count | None = None
    #: Size of the inner layer of a feed-forward network; by default 4 times the width.
    feedforward: Count | None = None
    #: Activation function of the feed-forward networks.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    #: true gives each feed-forward network a gate, a third matrix (GLU).
    gated: bool = False
    #: Kind of norm: LayerNorm, or RMSNorm, which does not subtract the mean.
    norm: Literal["layer", "rms"] = "layer"
    #: Position of the norms: on the residual stream after each branch (post), or inside the branch before its function
    #: (pre).
    norm_place: Literal["post", "pre"] = "post"
    #: Number added to the variance; None: the default of the kind of norm.
    norm_eps: float | None = None
    #: true puts a norm at the end of each stack; None: only if norm_place is pre.
    final_norm: bool | None = None
    #: true puts a norm at the end of the embedding.
    embedding_norm: bool = False
    #: Positions: added to the embedding (sinusoidal, learned), applied to queries and keys as a rotation (rotary), or
    #: added to the scores (alibi, buckets).
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "buckets"] = "sinusoidal"
    #: Number of learned positions, which limits the length of a text in tokens.
    max_positions: Count = 1024
    #: Number of segments, such as 2 for pairs of texts; 0: no segment table.
    segments: int = 0
    #: Dropout rate in training, at the end of every branch and of the embedding.
    dropout: Rate = 0.1
    #: Dropout rate of attention weights. If it is not set, `dropout` replaces the attention dropout of a preset.
    attention_dropout: Rate = 0.0
    #: Dropout rate of the inner layer of feed-forward networks. If it is not set, `dropout` replaces that of a preset.
    activation_dropout: Rate = 0.0
    #: Number of tokens back, and in an encoder also ahead, that self-attention can attend to; by default no limit.
    window: Count | None = None
    #: true normalizes queries and keys before their product.
    qk_norm: bool = False
    #: true gives linear layers and layer norms a bias.
    bias: bool = True
    #: Factor of the attention scores; None: head_size ** -0.5.
    attention_scale: float | None = None
    #: Factor of the embedding table; None: sqrt(width) if initialization is xavier, else 1.
    embedding_scale: float | None = None
    #: Factor of the states that enter the last linear layer.
    output_scale: float = 1.0
    #: true gives the last linear layer a bias.
    output_bias: bool = False
    #: true gives the head an inner layer with activation and norm.
    output_transform: bool = False
    #: Weight tying: one table for both embeddings and the output (all), one for the decoder's embedding and the output
    #: (decoder), or separate tables (none).
    tie: Literal["all", "decoder", "none"] = "all"
    #: Distribution of the initial weights.
    initialization: Literal["xavier", "normal"] = "xavier"


PRESET_ONLY: Final = frozenset(
    """
    norm_eps final_norm embedding_norm segments prefix attention_scale embedding_scale output_scale output_bias
    output_transform
    """.split()
)
"""Hyperparameters that presets set, and that are no keys of [model] in a run file."""


def build_spec(
    hparams: Hyperparameters, *, source_vocab: int, target_vocab: int, head: spec.Head | None = None
) -> spec.Model:
    """Return the spec of the model that the hyperparameters describe.

    Args:
        hparams: the sizes and options of the model.
        source_vocab: the vocabulary size of the first stack.
        target_vocab: the vocabulary size of the decoder; equal to source_vocab if all tables are tied.
        head: the head of the model; None means a head that scores the vocabulary.

    Raises:
        InputError: sizes do not fit together; one report names all faults.
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
        # Xavier draws tables with deviation 1/sqrt(width), as output weights need; the scale undoes this at the input.
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
