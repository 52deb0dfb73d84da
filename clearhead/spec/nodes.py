"""The nodes of a spec: frozen sum types, each the description of one module."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from clearhead.spec.base import MAX_LAYERS, Count, LayerNorm, Node, PlainNorm, Positive, Rate, Reference, RMSNorm
from clearhead.spec.positions import EmbeddingPosition, Rotary, ScoreBias, ScoreTable
from clearhead.spec.pydantic_errors import PLAIN_NAME
from clearhead.spec.registry import AcceptsParts, Part

Norm = Annotated[LayerNorm | RMSNorm | Part, AcceptsParts("norm")]

# --- masks ----------------------------------------------------------------------------------------------------


class Full(Node):
    """Every position may attend to every real position."""

    kind: Literal["full"] = "full"


class Causal(Node):
    """A position may attend to itself and to the positions before it."""

    kind: Literal["causal"] = "causal"


class Window(Node):
    """A position may attend to at most `before` positions before it and `after` positions after it, and to itself."""

    kind: Literal["window"] = "window"
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)]


Mask = Annotated[Full | Causal | Window, Field(discriminator="kind")]

# --- the functions of a residual branch -----------------------------------------------------------------------


class Biases(Node):
    """Which of the four projections of attention have a bias."""

    query: bool = True
    key: bool = True
    value: bool = True
    out: bool = True


class QueryKeyNorm(Node):
    """Normalization of query and key, over each head or over all heads at once. Source: arXiv 2302.05442, section 2."""

    norm: PlainNorm
    over: Literal["head", "width"] = "head"
    per_head: bool = False  # each head has a weight of its own
    after_rotation: bool = False


class Attention(Node):
    """Multi-head self-attention, or attention to the memory. Source: arXiv 1706.03762, section 3.2.

    soft_cap c turns a scaled score s into c * tanh(s / c); clip bounds the projected queries, keys and values; a sink
    is a learned score for each head that takes part in the softmax and has no value. An own step changes the scores
    before the mask hides any, or makes the weights in place of the softmax.
    """

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
    query_key_norm: QueryKeyNorm | None = None
    soft_cap: Positive | None = None
    clip: Positive | None = None
    sink: bool = False
    score_step: Annotated[Part, AcceptsParts("scores")] | None = None
    weight_step: Annotated[Part, AcceptsParts("weights")] | None = None
    dropout: Rate = 0.0


ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "quick_gelu", "tanh"]


class ClampedGate(Node):
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides by the limit.

    Source: arXiv 2508.10925, section 2.2.
    """

    kind: Literal["clamped_gate"] = "clamped_gate"
    alpha: Positive
    limit: Positive


def _form(value: Any) -> str:
    return "clamped_gate" if isinstance(value, dict | Node) else PLAIN_NAME


class FeedForward(Node):
    """A position-wise network with one inner layer. Source: arXiv 1706.03762, section 3.3; gates: arXiv 2002.05202."""

    kind: Literal["feed_forward"] = "feed_forward"
    size: Count
    activation: Annotated[
        Annotated[ActivationName, Tag(PLAIN_NAME)] | Annotated[ClampedGate, Tag("clamped_gate")], Discriminator(_form)
    ] = "relu"
    gated: bool = False
    bias_in: bool = True
    bias_out: bool = True
    dropout: Rate = 0.0


class Router(Node):
    """The router of a mixture: a token goes to the experts with the largest softmax scores."""

    bias: bool = False
    normalize: bool = True  # the weights of the chosen experts are divided by their sum


class MixtureOfExperts(Node):
    """Several feed-forward networks, of which each token passes through the top k of its router.

    Source: arXiv 1701.06538, section 2; arXiv 2401.04088, section 2.1.
    """

    kind: Literal["mixture_of_experts"] = "mixture_of_experts"
    count: Count
    top_k: Count
    expert: FeedForward
    router: Router = Router()


Function = Annotated[Attention | FeedForward | MixtureOfExperts | Part, AcceptsParts("function")]

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


class Projection(Node):
    """The projection from the width of an embedding to that of its stack, before or after the norm of the sum."""

    place: Literal["before_norm", "after_norm"]
    bias: bool


class Embedding(Node):
    """Ids to vectors: word_norm(table * scale), plus segments and position, then norm, then dropout.

    An embedding with a width of its own is projected to the width of the stack. With scale_rounding "weights" the scale
    is rounded to the dtype of the weights.
    """

    table: Annotated[Table | Reference, Field(discriminator="kind")]
    width: Count | None = None  # of the table; None: that of the stack
    projection: Projection | None = None
    scale: Positive = 1.0
    scale_rounding: Literal["none", "weights"] = "none"
    word_norm: Norm | None = None
    num_segments: Annotated[int, Field(ge=0)] = 0
    position: EmbeddingPosition | None = None
    norm: Norm | None = None
    dropout: Rate = 0.0


class Linear(Node):
    """A linear layer of a head; its weight is its own or tied to a table."""

    kind: Literal["linear"] = "linear"
    size: Count
    bias: bool = True
    weight: Reference | None = None
    scale: Positive = 1.0  # multiplies the input


class Activation(Node):
    """An activation function of a head."""

    kind: Literal["activation"] = "activation"
    function: ActivationName


class SoftCap(Node):
    """Bound outputs: value * tanh(output / value). Source: arXiv 2408.00118, section 2."""

    kind: Literal["soft_cap"] = "soft_cap"
    value: Positive


PoolMode = Literal["first", "mean", "last", "max", "root", "weighted"]


class Pool(Node):
    """Pooling over the real tokens of a sequence: the state of the first or last, the mean, or the maximum.

    "root": the sum divided by the square root of the number of tokens. "weighted": the mean with the weights 1, 2, 3
    and so on. Several: their vectors one after the other.
    """

    kind: Literal["pool"] = "pool"
    by: PoolMode | Annotated[tuple[PoolMode, ...], Field(min_length=2)]

    @property
    def modes(self) -> tuple[PoolMode, ...]:
        """The kinds of pooling, in the order of their vectors."""
        return (self.by,) if isinstance(self.by, str) else self.by


class L2Normalize(Node):
    """Scale a state to length 1, so that dot products are cosines."""

    kind: Literal["l2_normalize"] = "l2_normalize"


HeadLayer = Annotated[
    Linear | Activation | LayerNorm | RMSNorm | Pool | SoftCap | L2Normalize, Field(discriminator="kind")
]


class Head(Node):
    """The layers from hidden states to outputs; with a pool among them, a sequence has one output."""

    layers: Annotated[tuple[HeadLayer, ...], Field(min_length=1)]

    def output_width(self, width: int, count: int | None = None) -> int:
        """Return the width of the outputs of the first `count` layers, or of all, for hidden states of a width."""
        for layer in self.layers[:count]:
            width = len(layer.modes) * width if isinstance(layer, Pool) else getattr(layer, "size", width)
        return width


class Stack(Node):
    """An embedding and the layers above it.

    If layers share weights, `layers` holds each layer once, and `sharing` is the index of the layer at each depth.
    """

    width: Count
    embedding: Embedding
    layers: Annotated[tuple[Layer, ...], Field(max_length=MAX_LAYERS)]
    sharing: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_LAYERS)] | None = None
    final_norm: Norm | None = None
    score_table: ScoreTable | None = None

    @property
    def depths(self) -> tuple[Layer, ...]:
        """The layers in the order in which they run, shared layers once for each run."""
        return self.layers if self.sharing is None else tuple(self.layers[index] for index in self.sharing)

    @property
    def table_width(self) -> int:
        """The width of the table that ids are looked up in."""
        return self.width if self.embedding.width is None else self.embedding.width


class Xavier(Node):
    """Glorot-uniform matrices and N(0, 1/width) tables, as in the original implementation of arXiv 1706.03762."""

    kind: Literal["xavier"] = "xavier"


class Normal(Node):
    """N(0, std^2); the output projections of branches are divided by the square root of the number of branches."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    scale_branches: bool = True
