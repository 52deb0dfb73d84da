"""Hyperparameters of a regular model, in which all layers are alike, and the spec they expand to."""

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
    """The sizes and choices that define a regular model; those of `PRESET_ONLY` are no keys of a run file."""

    #: Which stacks there are; a task allows some of them.
    family: Literal["encoder", "decoder", "encoder-decoder"] = "encoder-decoder"
    #: Layers of each stack.
    layers: Layers = 6
    #: Layers of the encoder of a model with two stacks, where they differ from `layers`.
    encoder_layers: Layers | None = None
    #: Layers of the decoder of a model with two stacks, where they differ from `layers`.
    decoder_layers: Layers | None = None
    #: Size of the residual stream: numbers for each token between the layers.
    width: Count = 512
    #: Heads of each attention; they divide the width unless `head_size` is given.
    heads: Count = 8
    #: Heads of keys and values, each shared by several query heads (grouped-query attention); without it as many as
    #: `heads`.
    kv_heads: Count | None = None
    #: Numbers of one head; without it width / heads.
    head_size: Count | None = None
    #: Size of the inner layer of a feed-forward network; without it 4 times the width.
    feedforward: Count | None = None
    #: The function in the feed-forward networks.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    #: Whether a feed-forward network has a gate, a third matrix (GLU).
    gated: bool = False
    #: LayerNorm, or RMSNorm, which does not subtract the mean.
    norm: Literal["layer", "rms"] = "layer"
    #: Whether a norm stands on the stream behind each branch (post) or inside the branch, in front of its function
    #: (pre).
    norm_place: Literal["post", "pre"] = "post"
    #: Added to the variance; None: the usual value for the kind of norm.
    norm_eps: float | None = None
    #: Whether a norm ends each stack; None: where norms stand before the branches.
    final_norm: bool | None = None
    #: Whether a norm ends the embedding.
    embedding_norm: bool = False
    #: How the model knows the order of the tokens: added to the embedding (sinusoidal, learned), turned into queries
    #: and keys (rotary), or added to the scores (alibi, buckets).
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "buckets"] = "sinusoidal"
    #: Rows of learned positions, and so the longest text in tokens.
    max_positions: Count = 1024
    #: Rows of the segment table; 0: none.
    segments: int = 0
    #: Share of numbers that are set to 0 in training, at the end of every branch and of the embedding.
    dropout: Rate = 0.1
    #: The same for attention weights; without it, `dropout` replaces the attention dropout of a preset that has one.
    attention_dropout: Rate = 0.0
    #: The same for the inner layer of feed-forward networks; `dropout` replaces it in the same cases.
    activation_dropout: Rate = 0.0
    #: How many tokens back, and in an encoder ahead, self-attention sees; without it all that its mask allows.
    window: Count | None = None
    #: Whether queries and keys are normed before their product.
    qk_norm: bool = False
    #: Whether linear maps and layer norms have a bias.
    bias: bool = True
    #: Factor of the scores; None: head_size ** -0.5.
    attention_scale: float | None = None
    #: Factor of the rows of the table; None: sqrt(width) if tied to the output, else 1.
    embedding_scale: float | None = None
    #: Factor of the states that enter the last map.
    output_scale: float = 1.0
    #: Whether the last map has a bias.
    output_bias: bool = False
    #: Whether the head has an inner layer with activation and norm.
    output_transform: bool = False
    #: Which tables are one: those of both embeddings and the output (all), those of the decoder and the output, or
    #: none.
    tie: Literal["all", "decoder", "none"] = "all"
    #: How fresh weights are drawn.
    initialization: Literal["xavier", "normal"] = "xavier"


PRESET_ONLY: Final = frozenset(
    """
    norm_eps final_norm embedding_norm segments prefix attention_scale embedding_scale output_scale output_bias
    output_transform
    """.split()
)
"""Hyperparameters that named presets set, and the [model] table of a run file does not."""


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
