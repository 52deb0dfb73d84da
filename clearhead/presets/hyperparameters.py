"""From a few sizes to a whole spec: the regular models, in which all layers are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead import spec
from clearhead.errors import InputError


@dataclass(frozen=True)
class Recipe:
    """The sizes and choices from which a regular model follows.

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
        prefix: whether everything in a decoder may attend to the prefix that a call names.
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
    prefix: bool = False
    qk_norm: bool = False
    bias: bool = True
    attention_scale: float | None = None
    embedding_scale: float | None = None
    output_scale: float = 1.0
    output_bias: bool = False
    output_transform: bool = False
    tie: Literal["all", "decoder", "none"] = "all"
    initialization: Literal["xavier", "normal"] = "xavier"


def resolve(recipe: Recipe, *, source_vocab: int, target_vocab: int, head: spec.Head | None = None) -> spec.Model:
    """Write out the spec of a recipe.

    Args:
        recipe: sizes and choices.
        source_vocab: rows of the table of the first stack.
        target_vocab: rows of the table of the decoder; the same as source_vocab where tables are tied.
        head: what turns states into outputs; None: scores of the vocabulary.

    Raises:
        InputError: sizes that do not fit together, every fault in one report.
    """
    faults = _faults(recipe, source_vocab, target_vocab)
    if faults:
        raise InputError.from_faults(faults, subject="the model")
    encoder = decoder = None
    if recipe.family != "decoder":
        encoder = _stack(recipe, "encoder", spec.Table(rows=source_vocab))
    if recipe.family != "encoder":
        shared = encoder is not None and recipe.tie == "all"
        table = spec.Reference(path="encoder.embedding.table") if shared else spec.Table(rows=target_vocab)
        decoder = _stack(recipe, "decoder", table)
    owner = "decoder" if decoder and isinstance(decoder.embedding.table, spec.Table) else "encoder"
    model = spec.Model(
        encoder=encoder,
        decoder=decoder,
        head=head or _vocabulary_head(recipe, target_vocab if decoder else source_vocab, f"{owner}.embedding.table"),
        initialization=spec.Normal() if recipe.initialization == "normal" else spec.Xavier(),
    )
    return spec.validate(model)


def _faults(recipe: Recipe, source_vocab: int, target_vocab: int) -> list[str]:
    faults = []
    if recipe.head_size is None and recipe.width % recipe.heads:
        faults.append(f"width {recipe.width} is not a multiple of heads {recipe.heads}; change one, or give head_size")
    if recipe.kv_heads is not None and recipe.heads % recipe.kv_heads:
        faults.append(f"heads {recipe.heads} is not a multiple of kv_heads {recipe.kv_heads}")
    if recipe.positions == "sinusoidal" and recipe.width % 2:
        faults.append(f"sinusoidal positions need an even width, got {recipe.width}")
    if recipe.prefix and (recipe.window is not None or recipe.family != "decoder"):
        faults.append("a prefix that all may attend to needs a model with only a decoder, and no window")
    if recipe.family == "encoder-decoder" and recipe.tie == "all" and source_vocab != target_vocab:
        faults.append(
            f"tie = 'all' needs one vocabulary, but the source has {source_vocab} entries and the target "
            f"{target_vocab}; use a joint tokenizer or tie = 'decoder'"
        )
    return faults


def _norm(recipe: Recipe) -> spec.LayerNorm | spec.RMSNorm:
    if recipe.norm == "rms":
        return spec.RMSNorm(eps=recipe.norm_eps or 1e-6)
    return spec.LayerNorm(eps=recipe.norm_eps or 1e-5, bias=recipe.bias)


def _stack(recipe: Recipe, side: Literal["encoder", "decoder"], table: spec.Table | spec.Reference) -> spec.Stack:
    layers = (recipe.encoder_layers if side == "encoder" else recipe.decoder_layers) or recipe.layers
    functions: list[spec.Attention | spec.FeedForward] = [_attention(recipe, side, "self")]
    if side == "decoder" and recipe.family == "encoder-decoder":
        functions.append(_attention(recipe, side, "memory"))
    functions.append(_feed_forward(recipe))
    steps = tuple(_step(recipe, function) for function in functions)
    ends_in_norm = recipe.norm_place == "pre" if recipe.final_norm is None else recipe.final_norm
    return spec.Stack(
        width=recipe.width,
        embedding=_embedding(recipe, table),
        layers=(spec.Layer(steps=steps),) * layers,
        final_norm=_norm(recipe) if ends_in_norm else None,
        score_table=_buckets(recipe, side) if recipe.positions == "buckets" else None,
    )


def _step(recipe: Recipe, function: spec.Attention | spec.FeedForward) -> spec.Step:
    inside = _norm(recipe) if recipe.norm_place == "pre" else None
    after = _norm(recipe) if recipe.norm_place == "post" else None
    return spec.Step(branches=(spec.Branch(function=function, pre=inside, dropout=recipe.dropout),), out=after)


def _attention(
    recipe: Recipe, side: Literal["encoder", "decoder"], source: Literal["self", "memory"]
) -> spec.Attention:
    rotary = alibi = buckets = None
    if source == "self":
        rotary = spec.Rotary() if recipe.positions == "rotary" else None
        alibi = spec.Alibi() if recipe.positions == "alibi" else None
        buckets = spec.Reference(path=f"{side}.score_table") if recipe.positions == "buckets" else None
    bias = recipe.bias
    return spec.Attention(
        source=source,
        num_heads=recipe.heads,
        num_kv_heads=recipe.kv_heads or recipe.heads,
        head_size=recipe.head_size or recipe.width // recipe.heads,
        mask=_mask(recipe, side) if source == "self" else spec.Full(),
        position=rotary,
        score_bias=alibi or buckets,
        scale=recipe.attention_scale,
        bias=spec.Biases(query=bias, key=bias, value=bias, out=bias),
        query_key_norm=spec.QueryKeyNorm(norm=spec.RMSNorm()) if recipe.qk_norm else None,
        dropout=recipe.attention_dropout,
    )


def _mask(recipe: Recipe, side: Literal["encoder", "decoder"]) -> spec.Full | spec.Causal | spec.Window | spec.Prefix:
    if recipe.window is not None:
        return spec.Window(before=recipe.window, after=recipe.window if side == "encoder" else 0)
    if side == "encoder":
        return spec.Full()
    return spec.Prefix() if recipe.prefix else spec.Causal()


def _feed_forward(recipe: Recipe) -> spec.FeedForward:
    return spec.FeedForward(
        size=recipe.feedforward or 4 * recipe.width,
        activation=recipe.activation,
        gated=recipe.gated,
        bias_in=recipe.bias,
        bias_out=recipe.bias,
        dropout=recipe.activation_dropout,
    )


def _embedding(recipe: Recipe, table: spec.Table | spec.Reference) -> spec.Embedding:
    position: spec.Sinusoidal | spec.Learned | None = None
    if recipe.positions == "sinusoidal":
        position = spec.Sinusoidal()
    elif recipe.positions == "learned":
        position = spec.Learned(rows=recipe.max_positions)
    scale = recipe.embedding_scale
    if scale is None:
        # Xavier draws tables with deviation 1/sqrt(width), so that they serve as output weights; undone on the way in.
        scale = recipe.width**0.5 if recipe.initialization == "xavier" else 1.0
    return spec.Embedding(
        table=table,
        scale=scale,
        num_segments=recipe.segments,
        position=position,
        norm=_norm(recipe) if recipe.embedding_norm else None,
        dropout=recipe.dropout,
    )


def _buckets(recipe: Recipe, side: str) -> spec.RelativeBuckets:
    return spec.RelativeBuckets(num_heads=recipe.heads, bidirectional=side == "encoder")


def _vocabulary_head(recipe: Recipe, outputs: int, table: str) -> spec.Head:
    weight = None if recipe.tie == "none" else spec.Reference(path=table)
    last = spec.Linear(size=outputs, bias=recipe.output_bias, weight=weight, scale=recipe.output_scale)
    if not recipe.output_transform:
        return spec.Head(layers=(last,))
    inner = (
        spec.Linear(size=recipe.width),
        spec.Activation(function=recipe.activation),
        _norm(recipe),
    )
    return spec.Head(layers=(*inner, last))
