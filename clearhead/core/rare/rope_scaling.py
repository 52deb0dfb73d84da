"""Rotation frequencies, and their scaling beyond the training length. Legend: B batch, S tokens, P pairs.

float32 throughout, by the expressions that checkpoints were trained with: other forms round far positions differently.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import spec
from clearhead.errors import InputError


def depends_on_length(rotary: spec.Rotary | None) -> bool:
    """Return whether a rotation depends on the sequence length, not on the position alone."""
    return rotary is not None and isinstance(rotary.scaling, spec.DynamicScaling | spec.LongRopeScaling)


def sequence_lengths(
    position_BS: Int[Tensor, "batch tokens"], documents_BS: Int[Tensor, "batch tokens"] | None
) -> Int[Tensor, "batch tokens"]:
    """Count the tokens of the sequence that each token belongs to: one more than its last position."""
    if documents_BS is None:
        return position_BS.amax(dim=1, keepdim=True).expand_as(position_BS) + 1
    starts_BS = torch.ones_like(documents_BS)
    starts_BS[:, 1:] = (documents_BS[:, 1:] != documents_BS[:, :-1]).long()
    number_BS = starts_BS.cumsum(dim=1) - 1
    last_BS = torch.zeros_like(position_BS).scatter_reduce(1, number_BS, position_BS, "amax")
    return last_BS.gather(1, number_BS) + 1


def total_lengths(
    rotary: spec.Rotary,
    position_BS: Int[Tensor, "#batch tokens"],
    documents_BS: Int[Tensor, "batch tokens"] | None,
    total_length: int | Int[Tensor, " batch"] | None,
    is_cached: bool,
) -> Int[Tensor, "batch tokens"]:
    """Return the total length of the sequence of each token.

    Raises:
        InputError: a cached sequence is longer than the original length, so that cached keys are rotated for another
            length; or a sequence is longer than its total length.
    """
    assert isinstance(rotary.scaling, spec.DynamicScaling | spec.LongRopeScaling)
    length_BS = sequence_lengths(position_BS, documents_BS)
    longest, original = int(length_BS.max()) if length_BS.numel() else 0, rotary.scaling.original_length
    if total_length is None:
        if is_cached and longest > original:
            raise InputError(
                f"a cached sequence of {longest} tokens is longer than the {original} tokens beyond which RoPE scaling "
                "depends on the total length; pass Cache(total_length=...)"
            )
        return length_BS
    total_B1 = torch.as_tensor(total_length, device=length_BS.device).reshape(-1, 1)
    if bool((length_BS > total_B1).any()):
        raise InputError(f"a sequence of {longest} tokens is longer than its total length")
    return total_B1.expand(max(len(total_B1), len(length_BS)), length_BS.shape[1])


def rotary_frequencies(
    rotary: spec.Rotary, size: int, length_BS: Int[Tensor, "batch #tokens"] | None, device: torch.device
) -> tuple[Float[Tensor, "*batch_and_tokens pairs"], float]:
    """Return the angle of each pair between neighbouring positions, and the factor of cosines and sines.

    Args:
        rotary: theta and its scaling.
        size: how many dimensions are rotated, two in each pair.
        length_BS: the total length of the sequence of each token; None if the scaling does not depend on it.

    Source: arXiv 2104.09864, section 3.2.2; for the scalings see the nodes of the spec.
    """
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
            kept_P = 1 - _ramp(rotary.theta, size, scaling).to(device)
            divided_P = 1.0 / (scaling.factor * period_P)
            return divided_P * (1 - kept_P) + 1.0 / period_P * kept_P, scaling.magnitude
        case spec.LongRopeScaling() as scaling:
            assert length_BS is not None
            is_long_BS1 = (length_BS > scaling.original_length)[..., None]
            long_P = torch.tensor(scaling.long_factor, dtype=torch.float32, device=device)
            short_P = torch.tensor(scaling.short_factor, dtype=torch.float32, device=device)
            return 1.0 / (torch.where(is_long_BS1, long_P, short_P) * period_P), scaling.magnitude
        case spec.DynamicScaling(factor=factor, original_length=original):
            assert length_BS is not None
            stretch_BS = factor * length_BS.clamp(min=original) / original - (factor - 1)
            theta_BS1 = (rotary.theta * stretch_BS ** (size / (size - 2)))[..., None]
            is_long_BS1 = (length_BS > original)[..., None]
            return torch.where(is_long_BS1, 1.0 / theta_BS1**exponent_P, 1.0 / period_P), 1.0


def _by_band(frequency_P: Float[Tensor, " pairs"], scaling: spec.BandScaling) -> Float[Tensor, " pairs"]:
    wavelength_P = 2 * math.pi / frequency_P
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    is_low_P: Bool[Tensor, " pairs"] = wavelength_P > scaling.original_length / low
    is_high_P: Bool[Tensor, " pairs"] = wavelength_P < scaling.original_length / high
    kept_P = (scaling.original_length / wavelength_P - low) / (high - low)
    between_P = (1 - kept_P) * frequency_P / scaling.factor + kept_P * frequency_P
    return torch.where(is_low_P, frequency_P / scaling.factor, torch.where(is_high_P, frequency_P, between_P))


def _ramp(theta: float, size: int, scaling: spec.YarnScaling) -> Float[Tensor, " pairs"]:
    """Return the share of each pair that is divided by the factor: 0 for high frequencies, 1 for low ones."""
    rotations = scaling.original_length / (2 * math.pi)
    first, last = (
        size * math.log(rotations / beta) / (2 * math.log(theta)) for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last  # a ramp of no length would divide by zero
    return ((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
