"""Nodes for positions: added to the embedding, applied to query and key, or added to the scores."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from clearhead.spec.base import Count, Node, PlainNorm, Positive, Reference
from clearhead.spec.registry import AcceptsParts, Part

# --- at the embedding -----------------------------------------------------------------------------------------


class Sinusoidal(Node):
    """Fixed sines and cosines added to the embedding. Source: arXiv 1706.03762, section 3.5.

    The layout "fairseq", like "halves", puts all sines before all cosines. Its frequencies end at exactly 1/theta, and
    it is computed in float32.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "fairseq"] = "interleaved"
    theta: Positive = 10000.0
    offset: Annotated[int, Field(ge=0)] = 0


class Learned(Node):
    """Trained table added to the embedding; a token takes the row at its position plus `offset`."""

    kind: Literal["learned"] = "learned"
    rows: Count
    offset: Annotated[int, Field(ge=0)] = 0


EmbeddingPosition = Annotated[Sinusoidal | Learned | Part, AcceptsParts("position")]

# --- on query and key: rotation, and its scaling beyond the training length -----------------------------------


class LinearScaling(Node):
    """Rotary scaling that divides every frequency by the factor. Source: arXiv 2306.15595, eq. 4."""

    kind: Literal["linear_scaling"] = "linear_scaling"
    factor: Positive


class DynamicScaling(Node):
    """Rotary scaling with a theta that grows with the sequence beyond the original length.

    Source: arXiv 2309.00071, section 3.3 (dynamic scaling with the change of base of section 3.1).
    """

    kind: Literal["dynamic_scaling"] = "dynamic_scaling"
    factor: Positive
    original_length: Count


class BandScaling(Node):
    """Rotary scaling that divides low frequencies by the factor, keeps high ones, and interpolates between them.

    A frequency is low if fewer than `low_frequency_factor` of its periods fit into the original length. It is high if
    more than `high_frequency_factor` fit. Source: arXiv 2407.21783, section 3.4.2 and its released code.
    """

    kind: Literal["band_scaling"] = "band_scaling"
    factor: Positive
    low_frequency_factor: Positive
    high_frequency_factor: Positive
    original_length: Count


class YarnScaling(Node):
    """YaRN scaling: a ramp from unchanged to divided frequencies; sines and cosines are multiplied by `magnitude`.

    The ramp covers the dimensions with `beta_fast` to `beta_slow` periods in the original length. `truncate` rounds its
    ends to whole dimensions. Source: arXiv 2309.00071, sections 3.2 and 3.4.
    """

    kind: Literal["yarn_scaling"] = "yarn_scaling"
    factor: Positive
    original_length: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    magnitude: Positive = 1.0


class LongRopeScaling(Node):
    """LongRoPE scaling: a divisor per frequency, from one list up to the original length and another beyond it.

    Source: arXiv 2402.13753, section 3.
    """

    kind: Literal["long_rope_scaling"] = "long_rope_scaling"
    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    original_length: Count
    magnitude: Positive = 1.0


RotaryScaling = Annotated[
    LinearScaling | DynamicScaling | BandScaling | YarnScaling | LongRopeScaling, Field(discriminator="kind")
]


class Rotary(Node):
    """Rotary positions: rotate query and key, pairing dimension i with i + size / 2. Source: arXiv 2104.09864."""

    kind: Literal["rotary"] = "rotary"
    theta: Positive = 10000.0
    size: Count | None = None  # number of rotated dimensions of a head, from the first; None: all
    scaling: RotaryScaling | None = None

    def extended_length(self, length: int) -> int:
        """Return the sequence length in tokens to which rotary scaling extends the declared length of a model."""
        scaling = self.scaling
        if scaling is None or isinstance(scaling, LongRopeScaling):
            return length
        original = scaling.original_length if isinstance(scaling, BandScaling | YarnScaling) else length
        return max(length, int(scaling.factor * original))


# --- on the scores --------------------------------------------------------------------------------------------


class Alibi(Node):
    """ALiBi: a penalty on the scores that is linear in the distance. Source: arXiv 2108.12409, section 3."""

    kind: Literal["alibi"] = "alibi"
    scaled: bool = False  # the scale of the scores also multiplies the penalty
    rounding: Literal["none", "bfloat16"] = "none"  # rounds slopes and penalties, in any dtype
    slopes: tuple[Positive, ...] | None = None  # one per head; None: the default for the number of heads

    def head_slopes(self, num_heads: int) -> tuple[float, ...]:
        """Return the slope of each head: `slopes`, or the default geometric sequence.

        If the number of heads is no power of two, further slopes come from the sequence for twice the next lower power.

        Source: arXiv 2108.12409, section 3, and its reference code for head counts that are no power of two.
        """
        if self.slopes is not None:
            return self.slopes
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
        return (*slopes, *(2.0 ** (-4.0 * head / power) for head in range(1, 2 * (num_heads - power), 2)))


class RelativeBuckets(Node):
    """Table of trained score biases, one per head and distance bucket. Source: arXiv 1910.10683, section 2.1."""

    kind: Literal["relative_buckets"] = "relative_buckets"
    num_heads: Count
    count: Annotated[int, Field(ge=4)] = 32
    max_distance: Count = 128
    bidirectional: bool


class DistanceTable(Node):
    """Table of 2 * span trained vectors for relative distances, owned by a stack, with an optional norm.

    Distances are clamped to the span. With `buckets`, distances beyond half of them first go to logarithmic buckets up
    to `max_distance`. Source: arXiv 2006.03654, section 3.1; buckets: its released code.
    """

    kind: Literal["distance_table"] = "distance_table"
    span: Count
    buckets: Annotated[int, Field(ge=4)] | None = None
    max_distance: Count | None = None
    norm: PlainNorm | None = None


class Disentangled(Node):
    """Products of content and distance vectors, added to the unscaled scores. Source: arXiv 2006.03654, eq. 4.

    With `shared_projections`, the key and query projections of the attention also project the distances. Otherwise
    distances have separate projections.
    """

    kind: Literal["disentangled"] = "disentangled"
    table: Reference
    terms: Annotated[tuple[Literal["content_to_position", "position_to_content"], ...], Field(min_length=1)]
    shared_projections: bool = True


ScoreTable = Annotated[RelativeBuckets | DistanceTable, Field(discriminator="kind")]
ScoreBias = Annotated[Alibi | RelativeBuckets | Disentangled | Reference, Field(discriminator="kind")]
