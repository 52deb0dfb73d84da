"""The parts of a spec: frozen sum types, each the description of one module."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clearhead.errors import InputError
from clearhead.spec.wording import sentences

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Node(BaseModel):
    """A part of a spec: immutable, comparable, hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError.from_faults(sentences(error, type(self)), subject=type(self).__name__) from None

    # Marks the constructor as pydantic's own, so that nested nodes are validated in one pass and report together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


AnyNode = TypeVar("AnyNode", bound=Node)


class Reference(Node):
    """A tensor or table owned by another module, named by that module's path."""

    kind: Literal["reference"] = "reference"
    path: str


# --- norms ----------------------------------------------------------------------------------------------------


class LayerNorm(Node):
    """Layer normalisation. Source: arXiv 1607.06450, eq. 3."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True


class RMSNorm(Node):
    """Root-mean-square normalisation. Source: arXiv 1910.07467, eq. 4."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]

# --- positions: at the embedding, on query and key, on the scores ---------------------------------------------


class Sinusoidal(Node):
    """Fixed sines and cosines added to the embedding. Source: arXiv 1706.03762, section 3.5."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves"] = "interleaved"
    theta: Positive = 10000.0
    offset: Annotated[int, Field(ge=0)] = 0


class Learned(Node):
    """A trained table added to the embedding; the row of a token is its position plus the offset."""

    kind: Literal["learned"] = "learned"
    rows: Count
    offset: Annotated[int, Field(ge=0)] = 0


class Rotary(Node):
    """Rotation of query and key by position, first half paired with second half. Source: arXiv 2104.09864."""

    kind: Literal["rotary"] = "rotary"
    theta: Positive = 10000.0
    size: Count | None = None  # rotated dimensions of a head, from the first; None: all of them


class Alibi(Node):
    """A penalty on the scores linear in distance. Source: arXiv 2108.12409, section 3."""

    kind: Literal["alibi"] = "alibi"


class RelativeBuckets(Node):
    """A trained score bias for each bucket of relative distance. Source: arXiv 1910.10683, section 2.1."""

    kind: Literal["relative_buckets"] = "relative_buckets"
    num_heads: Count
    count: Annotated[int, Field(ge=4)] = 32
    max_distance: Count = 128
    bidirectional: bool


EmbeddingPosition = Annotated[Sinusoidal | Learned, Field(discriminator="kind")]
ScoreBias = Annotated[Alibi | RelativeBuckets | Reference, Field(discriminator="kind")]

# --- masks ----------------------------------------------------------------------------------------------------


class Full(Node):
    """Every position may attend to every real position."""

    kind: Literal["full"] = "full"


class Causal(Node):
    """A position may attend to itself and to what is before it."""

    kind: Literal["causal"] = "causal"


class Window(Node):
    """A position may attend to at most `before` positions before it and `after` positions after it, and to itself."""

    kind: Literal["window"] = "window"
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)]


class Prefix(Node):
    """Causal, but everything may attend to the prefix that a call names. Source: arXiv 1910.10683, section 3.2.1."""

    kind: Literal["prefix"] = "prefix"


Mask = Annotated[Full | Causal | Window | Prefix, Field(discriminator="kind")]

# --- the functions of a residual branch -----------------------------------------------------------------------


class Biases(Node):
    """Which of the four projections of attention have a bias."""

    query: bool = True
    key: bool = True
    value: bool = True
    out: bool = True


class Attention(Node):
    """Multi-head attention over the stream itself or over the memory. Source: arXiv 1706.03762, section 3.2."""

    kind: Literal["attention"] = "attention"
    source: Literal["self", "memory"] = "self"
    num_heads: Count
    num_kv_heads: Count
    head_size: Count
    mask: Mask = Full()
    position: Rotary | None = None
    score_bias: ScoreBias | None = None
    scale: Positive | None = None  # None: head_size ** -0.5
    bias: Biases = Biases()
    query_key_norm: Norm | None = None  # over each head, before any rotation
    dropout: Rate = 0.0


class FeedForward(Node):
    """A position-wise network with one inner layer. Source: arXiv 1706.03762, section 3.3; gates: arXiv 2002.05202."""

    kind: Literal["feed_forward"] = "feed_forward"
    size: Count
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False
    bias_in: bool = True
    bias_out: bool = True
    dropout: Rate = 0.0


Function = Annotated[Attention | FeedForward, Field(discriminator="kind")]

# --- the residual equation ------------------------------------------------------------------------------------


class Branch(Node):
    """One term of the residual sum: scale * dropout(post(function(pre(x))))."""

    function: Function
    pre: Norm | None = None
    post: Norm | None = None
    scale: Positive = 1.0
    dropout: Rate = 0.0


class Step(Node):
    """One residual step: x <- out(x + sum of the branches of pre(x))."""

    branches: Annotated[tuple[Branch, ...], Field(min_length=1)]
    pre: Norm | None = None
    out: Norm | None = None


class Layer(Node):
    """The residual steps that repeat through a stack."""

    steps: Annotated[tuple[Step, ...], Field(min_length=1)]


# --- embedding, head, stack, model ----------------------------------------------------------------------------


class Table(Node):
    """A trained table with a row for each vocabulary entry."""

    kind: Literal["table"] = "table"
    rows: Count


class Embedding(Node):
    """Ids to vectors: table * scale, plus segments and position, then norm, then dropout."""

    table: Annotated[Table | Reference, Field(discriminator="kind")]
    scale: Positive = 1.0
    num_segments: Annotated[int, Field(ge=0)] = 0
    position: EmbeddingPosition | None = None
    norm: Norm | None = None
    dropout: Rate = 0.0


class Linear(Node):
    """An affine map of a head; its weight is its own or a table it is tied to."""

    kind: Literal["linear"] = "linear"
    size: Count
    bias: bool = True
    weight: Reference | None = None
    scale: Positive = 1.0  # multiplies the states that enter


class Activation(Node):
    """A pointwise function of a head."""

    kind: Literal["activation"] = "activation"
    function: Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


class Pool(Node):
    """One state for a sequence: its first or last real token's, or the mean over its real tokens."""

    kind: Literal["pool"] = "pool"
    by: Literal["first", "mean", "last"]


class Unit(Node):
    """Scale a state to length 1, so that products of two are cosines."""

    kind: Literal["unit"] = "unit"


HeadLayer = Annotated[Linear | Activation | LayerNorm | RMSNorm | Pool | Unit, Field(discriminator="kind")]


class Head(Node):
    """What turns states into outputs: layers in order; with a pool among them, outputs are of whole sequences."""

    layers: Annotated[tuple[HeadLayer, ...], Field(min_length=1)]


class Stack(Node):
    """An embedding and the layers above it."""

    width: Count
    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None
    score_table: RelativeBuckets | None = None


class Xavier(Node):
    """Glorot-uniform matrices and N(0, 1/width) tables, as in the original implementation of arXiv 1706.03762."""

    kind: Literal["xavier"] = "xavier"


class Normal(Node):
    """N(0, std^2) everywhere; the maps that end a branch are divided by the square root of the number of branches."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    scale_branches: bool = True
