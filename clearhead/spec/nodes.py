"""The nodes of a spec: immutable types that describe one module each."""

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
    """Mask in which every position may attend to every position that is not padding."""

    kind: Literal["full"] = "full"


class Causal(Node):
    """Mask in which a position may attend to itself and to the positions before it."""

    kind: Literal["causal"] = "causal"


class Window(Node):
    """Mask in which a position attends to itself, `before` positions before it, and `after` positions after it."""

    kind: Literal["window"] = "window"
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)]


Mask = Annotated[Full | Causal | Window, Field(discriminator="kind")]

# --- the functions of a residual branch -----------------------------------------------------------------------


class Biases(Node):
    """Switches for the biases of the four projections of an attention."""

    query: bool = True
    key: bool = True
    value: bool = True
    out: bool = True


class QueryKeyNorm(Node):
    """Normalization of query and key, over each head or over all heads at once. Source: arXiv 2302.05442, section 2."""

    norm: PlainNorm
    over: Literal["head", "width"] = "head"
    per_head: bool = False  # a separate weight for each head
    after_rotation: bool = False


class Attention(Node):
    """Multi-head self-attention, or attention to the encoder's output. Source: arXiv 1706.03762, section 3.2.

    A `soft_cap` of c turns a scaled score s into c * tanh(s / c), and `clip` bounds the projected queries, keys and
    values. A sink is a learned score per head that takes part in the softmax and has no value. Two fields hold custom
    modules: `score_step` changes the scores before masking, `weight_step` computes the weights in place of the softmax.
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
    """Gated activation (up + 1) * gate * sigmoid(alpha * gate).

    `limit` clamps the gate from above, and up from both sides.

    Source: arXiv 2508.10925, section 2.2.
    """

    kind: Literal["clamped_gate"] = "clamped_gate"
    alpha: Positive
    limit: Positive


def _form(value: Any) -> str:
    return "clamped_gate" if isinstance(value, dict | Node) else PLAIN_NAME


class FeedForward(Node):
    """Feed-forward network with one inner layer. Source: arXiv 1706.03762, section 3.3; gates: arXiv 2002.05202."""

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
    """Router of a mixture of experts: sends each token to the experts with the largest softmax scores."""

    bias: bool = False
    normalize: bool = True  # the weights of the chosen experts are divided by their sum


class MixtureOfExperts(Node):
    """Mixture of feed-forward networks (experts); each token passes through the `top_k` that its router selects.

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
    """Branch of a residual step, one term of its sum: scale * dropout(post(function(pre(x))))."""

    function: Function
    pre: Norm | None = None
    post: Norm | None = None
    scale: Positive = 1.0
    dropout: Rate = 0.0


class Step(Node):
    """Residual step: x <- out(x + sum of the branches of pre(x)); the norms `pre` and `out` are optional."""

    branches: Annotated[tuple[Branch, ...], Field(min_length=1)]
    pre: Norm | None = None
    out: Norm | None = None


class Layer(Node):
    """Layer of a stack: a sequence of residual steps."""

    steps: Annotated[tuple[Step, ...], Field(min_length=1)]


# --- embedding, head, stack, model ----------------------------------------------------------------------------


class Table(Node):
    """Trained embedding table with one row per vocabulary entry."""

    kind: Literal["table"] = "table"
    rows: Count


class Projection(Node):
    """Projection from the width of an embedding to the width of its stack, before or after the embedding's norm."""

    place: Literal["before_norm", "after_norm"]
    bias: bool


class Embedding(Node):
    """Embedding of token ids: word_norm(table * scale), plus segments and position, then norm, then dropout.

    If `width` differs from the width of the stack, `projection` maps one to the other. With scale_rounding "weights"
    the scale is rounded to the dtype of the weights.
    """

    table: Annotated[Table | Reference, Field(discriminator="kind")]
    width: Count | None = None  # width of the table; None: the width of the stack
    projection: Projection | None = None
    scale: Positive = 1.0
    scale_rounding: Literal["none", "weights"] = "none"
    word_norm: Norm | None = None
    num_segments: Annotated[int, Field(ge=0)] = 0
    position: EmbeddingPosition | None = None
    norm: Norm | None = None
    dropout: Rate = 0.0


class Linear(Node):
    """Linear layer of a head; `weight` ties its weight to a table, None means a separate weight."""

    kind: Literal["linear"] = "linear"
    size: Count
    bias: bool = True
    weight: Reference | None = None
    scale: Positive = 1.0  # multiplies the input


class Activation(Node):
    """Activation function in a head."""

    kind: Literal["activation"] = "activation"
    function: ActivationName


class SoftCap(Node):
    """Soft bound on the outputs of a head: value * tanh(output / value). Source: arXiv 2408.00118, section 2."""

    kind: Literal["soft_cap"] = "soft_cap"
    value: Positive


PoolMode = Literal["first", "mean", "last", "max", "root", "weighted"]


class Pool(Node):
    """Pooling over a sequence without its padding: the first or last state, the mean, or the maximum.

    "root" is the sum divided by the square root of the number of tokens. "weighted" is the mean with the weights 1, 2,
    3 and so on. With several modes, their vectors are concatenated.
    """

    kind: Literal["pool"] = "pool"
    by: PoolMode | Annotated[tuple[PoolMode, ...], Field(min_length=2)]

    @property
    def modes(self) -> tuple[PoolMode, ...]:
        """The pooling modes, in the order in which their vectors are concatenated."""
        return (self.by,) if isinstance(self.by, str) else self.by


class L2Normalize(Node):
    """Scaling of a vector to length 1, so that dot products are cosines."""

    kind: Literal["l2_normalize"] = "l2_normalize"


HeadLayer = Annotated[
    Linear | Activation | LayerNorm | RMSNorm | Pool | SoftCap | L2Normalize, Field(discriminator="kind")
]


class Head(Node):
    """Head: the layers from hidden states to outputs; with a pool, each sequence has one output vector."""

    layers: Annotated[tuple[HeadLayer, ...], Field(min_length=1)]

    def output_width(self, width: int, count: int | None = None) -> int:
        """Return the output width of the first `count` layers, or of all, for hidden states of width `width`."""
        for layer in self.layers[:count]:
            width = len(layer.modes) * width if isinstance(layer, Pool) else getattr(layer, "size", width)
        return width


class Stack(Node):
    """Stack: an embedding, the layers after it, and an optional final norm.

    If layers share weights, `layers` holds each layer once, and `sharing` lists the index of the layer at each depth.
    """

    width: Count
    embedding: Embedding
    layers: Annotated[tuple[Layer, ...], Field(max_length=MAX_LAYERS)]
    sharing: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_LAYERS)] | None = None
    final_norm: Norm | None = None
    score_table: ScoreTable | None = None

    @property
    def depths(self) -> tuple[Layer, ...]:
        """The layers in the order of execution; a layer that runs several times occurs several times."""
        return self.layers if self.sharing is None else tuple(self.layers[index] for index in self.sharing)

    @property
    def table_width(self) -> int:
        """The width of the embedding table."""
        return self.width if self.embedding.width is None else self.embedding.width


class Xavier(Node):
    """Initialization with Glorot-uniform matrices and N(0, 1/width) tables, as in the code of arXiv 1706.03762."""

    kind: Literal["xavier"] = "xavier"


class Normal(Node):
    """Initialization with N(0, std^2).

    `scale_branches` divides the output projection of each branch by the square root of the number of branches.
    """

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    scale_branches: bool = True
