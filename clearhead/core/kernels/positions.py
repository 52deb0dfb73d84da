"""Position functions: sinusoidal tables, rotations of queries and keys, score biases by distance.

Legend: B batch, T queries, S keys, P pairs of dimensions, H heads, E head size.
A position is the number of real tokens before a token, so padding on either side changes nothing.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.errors import InputError

QueryPosition = Int[Tensor, "#batch queries"]
KeyPosition = Int[Tensor, "#batch keys"]
Distances = Int[Tensor, "*axes"]
Frequencies = Float[Tensor, " pairs"]
Cosines = Float[Tensor, "#batch 1 queries half"]


_NUMBERS: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def device_numbers(numbers: tuple[float, ...], device: torch.device) -> Float[Tensor, " numbers"]:
    """Return numbers as a tensor of a device, which is copied there once, since each copy waits for a GPU."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    if (numbers, device) not in _NUMBERS:
        _NUMBERS[numbers, device] = torch.tensor(numbers, dtype=torch.float32, device=device)
    return _NUMBERS[numbers, device]


def token_positions(
    mask: Bool[Tensor, "batch keys"] | None, documents: KeyPosition | None, num_keys: int, device: torch.device
) -> KeyPosition:
    """Return the position of each token: the number of real tokens before it in its document; 0 for padding."""
    count = torch.arange(num_keys, device=device)[None] if mask is None else mask.cumsum(dim=1) - mask.long()
    if documents is not None:
        count = count.expand(documents.shape)
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        count = count - torch.where(starts, count, 0).cummax(dim=1).values
    return count if mask is None else count * mask


def sequence_lengths(position_BS: KeyPosition, documents_BS: KeyPosition | None) -> KeyPosition:
    """Return for each token the length of its sequence or document: the last position plus one."""
    if documents_BS is None:
        return position_BS.amax(dim=1, keepdim=True).expand_as(position_BS) + 1
    number_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0)).cumsum(dim=1)
    last_BS = torch.zeros_like(position_BS).scatter_reduce(1, number_BS, position_BS, "amax")
    return last_BS.gather(1, number_BS) + 1


def sinusoidal_table(rows: int, width: int, position: spec.Sinusoidal) -> Float[Tensor, "{rows} {width}"]:
    """Return the table of sin(p / theta^(2i/width)) and cos of the same angle, for positions p = 0 .. rows - 1.

    The layout interleaves sines and cosines, or puts all sines before all cosines. "fairseq" does the latter, with
    frequencies from 1 to 1 / theta, both included.

    Raises:
        InputError: the width is odd, so that a sine would lack its cosine.

    Source: arXiv 1706.03762, section 3.5 (interleaved).
    """
    if width % 2:
        raise InputError(f"the width must be even, since sinusoidal positions pair sines with cosines; got {width}")
    if position.layout == "fairseq":
        # float32 in every step, as in the library of that name, whose tables are never stored.
        half = width // 2
        rate = torch.exp(torch.arange(half).float() * -(math.log(position.theta) / (half - 1)))
        angle = torch.arange(rows).float()[:, None] * rate
        return torch.cat([angle.sin(), angle.cos()], dim=1)
    # float64, because a float32 angle is off by 1e-4 after a thousand positions.
    frequency = position.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
    join = torch.stack if position.layout == "interleaved" else torch.cat
    return join([angle.sin(), angle.cos()], dim=-1).reshape(rows, width).float()


def rotary_angles(
    position_BT: QueryPosition, rotary: spec.Rotary, head_size: int, length_BT: Int[Tensor, "#batch #queries"] | None
) -> tuple[Cosines, Cosines]:
    """Return cosine and sine of the RoPE angle of each pair of dimensions, at each position.

    A scaling that depends on the length needs the total length of the sequence of each token.
    Source: arXiv 2104.09864, section 3.2.2.
    """
    frequency, magnitude = rotary_frequencies(rotary, rotary.size or head_size, length_BT, position_BT.device)
    angle_BTE = position_BT[..., None].float() * frequency
    cos, sin = angle_BTE.cos()[:, None], angle_BTE.sin()[:, None]
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotary_frequencies(
    rotary: spec.Rotary, size: int, length_BT: Int[Tensor, "#batch #queries"] | None, device: torch.device
) -> tuple[Float[Tensor, "*batch_and_queries pairs"], float]:
    """Return the RoPE frequency (angle per position) of each pair of dimensions, and a factor on cosines and sines.

    Source: arXiv 2104.09864, section 3.2.2; for the scalings see the nodes of the spec.
    """
    # float32 throughout, by the expressions that checkpoints were trained with: others round far positions differently.
    exponent_P = torch.arange(0, size, 2, device=device).float() / size
    period_P = rotary.theta**exponent_P
    match rotary.scaling:
        case None:
            return 1.0 / period_P, 1.0
        case spec.LinearScaling(factor=factor):
            return 1.0 / period_P / factor, 1.0
        case spec.BandScaling() as scaling:
            return _by_band(1.0 / period_P, scaling), 1.0
        case spec.YarnScaling() as scaling:
            kept_P = 1 - _ramp(rotary.theta, size, scaling, device)
            divided_P = 1.0 / (scaling.factor * period_P)
            return divided_P * (1 - kept_P) + 1.0 / period_P * kept_P, scaling.magnitude
        case spec.LongRopeScaling() as scaling:
            assert length_BT is not None
            is_long_BT1 = (length_BT > scaling.original_length)[..., None]
            long_P, short_P = (device_numbers(x, device) for x in (scaling.long_factor, scaling.short_factor))
            return 1.0 / (torch.where(is_long_BT1, long_P, short_P) * period_P), scaling.magnitude
        case spec.DynamicScaling(factor=factor, original_length=original):
            assert length_BT is not None
            stretch_BT = factor * length_BT.clamp(min=original) / original - (factor - 1)
            theta_BT1 = (rotary.theta * stretch_BT ** (size / (size - 2)))[..., None]
            is_long_BT1 = (length_BT > original)[..., None]
            return torch.where(is_long_BT1, 1.0 / theta_BT1**exponent_P, 1.0 / period_P), 1.0


def _by_band(frequency_P: Frequencies, scaling: spec.BandScaling) -> Frequencies:
    """Scale RoPE frequencies by band: divide low ones by the factor, keep high ones, and interpolate between them."""
    periods_P = scaling.original_length / (2 * math.pi / frequency_P)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_P = ((periods_P - low) / (high - low)).clamp(0, 1)
    return (1 - kept_P) * frequency_P / scaling.factor + kept_P * frequency_P


def _ramp(theta: float, size: int, scaling: spec.YarnScaling, device: torch.device) -> Frequencies:
    """Return YaRN's interpolation weight of each pair: 0 keeps its frequency, 1 divides it by the factor."""
    rotations, betas = scaling.original_length / (2 * math.pi), (scaling.beta_fast, scaling.beta_slow)
    first, last = (size * math.log(rotations / beta) / (2 * math.log(theta)) for beta in betas)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last  # a ramp of no length would divide by zero
    return ((torch.arange(size // 2, dtype=torch.float32, device=device) - first) / (last - first)).clamp(0, 1)


def rotate(
    x_BHTE: Float[Tensor, "batch heads queries head_size"], cos: Cosines, sin: Cosines
) -> Float[Tensor, "batch heads queries head_size"]:
    """Rotate the first 2 * half dimensions of each head by RoPE; i is paired with i + half, others stay unchanged."""
    half = cos.shape[-1]
    first, second, rest = x_BHTE.split([half, half, x_BHTE.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.to(x_BHTE.dtype), sin.to(x_BHTE.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def alibi_bias(
    query_position: QueryPosition, key_position: KeyPosition, num_heads: int, alibi: spec.Alibi
) -> Float[Tensor, "batch {num_heads} queries keys"]:
    """Return the ALiBi bias on the scores: minus slope times the absolute distance of query and key.

    If `alibi.rounding` is "bfloat16", the bias is slope times key position, which gives causal attention the same
    softmax. Slope, position and product are then rounded to bfloat16, as in the training of such models.
    """
    slope = device_numbers(alibi.head_slopes(num_heads), key_position.device)
    if alibi.rounding == "bfloat16":
        bias = (slope.bfloat16()[:, None] * key_position[:, None, :].bfloat16()).float()
        return bias[:, :, None].expand(-1, -1, query_position.shape[1], -1)
    distance = (query_position[:, None, :, None] - key_position[:, None, None, :]).abs().float()
    return -distance * slope[:, None, None]


def relative_bucket(relative: Distances, count: int, max_distance: int, bidirectional: bool) -> Distances:
    """Return the bucket of key position minus query position: exact for near keys, logarithmic for far ones.

    Source: arXiv 1910.10683, section 2.1; the numbering is that of its released code.
    """
    if bidirectional:
        count //= 2
        start, distance = (relative > 0) * count, relative.abs()
    else:
        start, distance = torch.zeros_like(relative), (-relative).clamp(min=0)
    exact = count // 2
    # The maximum keeps the logarithm finite where the exact branch is taken.
    ratio = distance.clamp(min=exact).float() / exact
    far = exact + (ratio.log() / math.log(max_distance / exact) * (count - exact)).long()
    return start + torch.where(distance < exact, distance, far.clamp(max=count - 1))


def distance_row(distance: Distances, table: spec.DistanceTable) -> Distances:
    """Return the row of the distance table for query position minus key position; far distances share rows.

    Source: arXiv 2006.03654, eq. 3; the buckets are those of its released code.
    """
    if table.buckets is not None and table.max_distance is not None:
        middle = table.buckets // 2
        ratio = distance.abs().clamp(min=middle).float() / middle  # the bound keeps the logarithm of zero away
        far = torch.ceil(ratio.log() / math.log((table.max_distance - 1) / middle) * (middle - 1)).long() + middle
        distance = torch.where(distance.abs() <= middle, distance, distance.sign() * far)
    return (distance + table.span).clamp(0, 2 * table.span - 1)
