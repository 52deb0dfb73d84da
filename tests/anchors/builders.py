"""Small specs in the sizes of the source tutorials."""

from __future__ import annotations

from torch import nn

from clearhead import spec
from clearhead.core import MultiHeadAttention


def attention(
    width: int,
    num_heads: int,
    *,
    source: str = "self",
    causal: bool = False,
    bias: bool = True,
    out_bias: bool | None = None,
    dropout: float = 0.0,
) -> spec.Attention:
    """Attention whose heads share the width evenly, as in all four tutorials."""
    return spec.Attention.model_validate(
        {
            "source": source,
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_size": width // num_heads,
            "mask": spec.Causal() if causal else spec.Full(),
            "bias": spec.Biases(query=bias, key=bias, value=bias, out=bias if out_bias is None else out_bias),
            "dropout": dropout,
        }
    )


def multi_head(width: int, num_heads: int, *, bias: bool = True, scale: float | None = None) -> MultiHeadAttention:
    """Standalone multi-head attention with nonzero biases and, optionally, another scale."""
    attention = MultiHeadAttention(width, num_heads, bias=bias)
    if scale is not None:
        attention.attention.scale = scale
    for projection in (attention.query, attention.key, attention.value, attention.out):
        if projection.bias is not None:
            nn.init.uniform_(projection.bias, -1.0, 1.0)
    return attention


def step(function: spec.Attention | spec.FeedForward, *, dropout: float = 0.0, pre: bool = False) -> spec.Step:
    """One residual step, post-norm or pre-norm."""
    norm = spec.LayerNorm()
    if pre:
        return spec.Step(branches=(spec.Branch(function=function, pre=norm, dropout=dropout),))
    return spec.Step(branches=(spec.Branch(function=function, dropout=dropout),), out=norm)


def stack(
    width: int,
    num_heads: int,
    *,
    vocabulary: int,
    inner: int,
    layers: int = 1,
    causal: bool = False,
    memory: bool = False,
    dropout: float = 0.0,
    position: spec.Sinusoidal | spec.Learned | None = None,
    pre: bool = False,
) -> spec.Stack:
    """An embedding scaled by the root of the width, sinusoidal positions, and equal layers."""
    functions: list[spec.Attention | spec.FeedForward] = [attention(width, num_heads, causal=causal, dropout=dropout)]
    if memory:
        functions.append(attention(width, num_heads, source="memory", dropout=dropout))
    functions.append(spec.FeedForward(size=inner, dropout=dropout))
    layer = spec.Layer(steps=tuple(step(function, dropout=dropout, pre=pre) for function in functions))
    return spec.Stack(
        width=width,
        embedding=spec.Embedding(
            table=spec.Table(rows=vocabulary),
            scale=width**0.5,
            position=position or spec.Sinusoidal(),
            dropout=dropout,
        ),
        layers=(layer,) * layers,
        final_norm=spec.LayerNorm() if pre else None,
    )


def transformer(
    width: int = 6,
    num_heads: int = 2,
    *,
    inner: int = 12,
    layers: int = 1,
    source_vocabulary: int = 17,
    target_vocabulary: int = 19,
    dropout: float = 0.0,
    pre: bool = False,
) -> spec.Model:
    """The original encoder-decoder with separate tables and an untied output layer with a bias."""
    shared = {"inner": inner, "layers": layers, "dropout": dropout, "pre": pre}
    return spec.Model(
        encoder=stack(width, num_heads, vocabulary=source_vocabulary, **shared),  # type: ignore[arg-type]
        decoder=stack(width, num_heads, vocabulary=target_vocabulary, causal=True, memory=True, **shared),  # type: ignore[arg-type]
        head=spec.Head(layers=(spec.Linear(size=target_vocabulary),)),
    )
