"""Positions at the embedding, and as rotations of query and key; those on the scores are in `rare.score_bias`.

Legend: B batch, T queries, D width, H heads, E head size.
A position is the number of real tokens before a token, so padding on either side changes nothing.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.rare.rope_scaling import depends_on_length, rotary_frequencies, sequence_lengths
from clearhead.errors import InputError


def sinusoidal_table(rows: int, width: int, position: spec.Sinusoidal) -> Float[Tensor, "{rows} {width}"]:
    """Tabulate sin(p / theta^(2i/width)) and cos of the same angle, for the positions p = 0 .. rows - 1.

    Args:
        rows: how many positions.
        width: an even number of columns.
        position: theta, and the layout: sines and cosines interleaved, or all sines before all cosines; "fairseq" has
            them in halves too, with frequencies from 1 to 1 / theta, both included.

    Raises:
        InputError: the width is odd, so that a sine would lack its cosine.

    Source: arXiv 1706.03762, section 3.5 (interleaved).
    """
    if width % 2:
        raise InputError(f"sinusoidal positions pair sines with cosines, so the width must be even; got {width}")
    if position.layout == "fairseq":
        # float32 in every step, as in the library of that name, whose tables are never stored.
        half = width // 2
        rate = torch.exp(torch.arange(half).float() * -(math.log(position.theta) / (half - 1)))
        angle = torch.arange(rows).float()[:, None] * rate
        return torch.cat([angle.sin(), angle.cos()], dim=1)
    # float64, for a float32 angle is off by 1e-4 a thousand positions away from the start.
    frequency = position.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    join = torch.stack if position.layout == "interleaved" else torch.cat
    return join([angle.sin(), angle.cos()], dim=-1).reshape(rows, width).float()


class SinusoidalPosition(nn.Module):
    """A table of sinusoids, looked up by position; it grows to the longest sequence seen."""

    def __init__(self, width: int, position: spec.Sinusoidal) -> None:
        super().__init__()
        self.width, self.position = width, position
        self.table = torch.zeros(0, width, device="cpu")  # computed, never loaded: no part of the state

    def forward(self, position_BT: Int[Tensor, "batch queries"], limit: int) -> Float[Tensor, "batch queries width"]:
        needed = limit + self.position.offset
        if self.table.shape[0] < needed or self.table.device != position_BT.device:
            rows = max(needed, 2 * self.table.shape[0])
            self.table = sinusoidal_table(rows, self.width, self.position).to(position_BT.device)
        return F.embedding(position_BT + self.position.offset, self.table)


class LearnedPosition(nn.Module):
    """A trained table, looked up by position."""

    def __init__(self, width: int, position: spec.Learned) -> None:
        super().__init__()
        self.offset, self.rows = position.offset, position.rows
        self.weight = nn.Parameter(torch.empty(position.rows, width))

    def forward(self, position_BT: Int[Tensor, "batch queries"], limit: int) -> Float[Tensor, "batch queries width"]:
        # The limit counts padding too, so the exact maximum is computed only if this cheap bound does not hold.
        if limit + self.offset > self.rows and int(position_BT.max()) + self.offset >= self.rows:
            raise InputError(
                f"a sequence of {int(position_BT.max()) + 1} tokens is longer than the model's "
                f"{self.rows - self.offset} positions; shorten or split it"
            )
        return F.embedding(position_BT + self.offset, self.weight)


def build_embedding_position(width: int, position: spec.Sinusoidal | spec.Learned | None) -> nn.Module | None:
    """Build the position embedding of a spec, or None."""
    match position:
        case spec.Sinusoidal():
            return SinusoidalPosition(width, position)
        case spec.Learned():
            return LearnedPosition(width, position)
        case None:
            return None


def rotary_angles(
    position_BT: Int[Tensor, "#batch queries"],
    rotary: spec.Rotary,
    head_size: int,
    length_BT: Int[Tensor, "#batch #queries"] | None = None,
) -> tuple[Float[Tensor, "batch 1 queries half"], Float[Tensor, "batch 1 queries half"]]:
    """Return the cosine and sine of the angle of each pair of dimensions at each position.

    Args:
        position_BT: positions of the rotated tokens.
        rotary: theta, its scaling, and how many dimensions of a head are rotated.
        head_size: how many dimensions a head has.
        length_BT: total length of the sequence of each token; None: counted from the positions.

    Source: arXiv 2104.09864, section 3.2.2.
    """
    if length_BT is None and depends_on_length(rotary):
        length_BT = sequence_lengths(position_BT, None)
    frequency, magnitude = rotary_frequencies(rotary, rotary.size or head_size, length_BT, position_BT.device)
    angle_BTE = position_BT[..., None].float() * frequency
    cos, sin = angle_BTE.cos()[:, None], angle_BTE.sin()[:, None]
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotate(
    x_BHTE: Float[Tensor, "batch heads queries head_size"],
    cos: Float[Tensor, "batch_or_1 1 queries half"],
    sin: Float[Tensor, "batch_or_1 1 queries half"],
) -> Float[Tensor, "batch heads queries head_size"]:
    """Rotate the first dimensions of each head; dimension i is paired with i + half, the rest is unchanged."""
    half = cos.shape[-1]
    first, second, rest = x_BHTE.split([half, half, x_BHTE.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.to(x_BHTE.dtype), sin.to(x_BHTE.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
