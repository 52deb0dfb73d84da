"""Sequence lengths for those RoPE scalings that depend on the sequence length. Legend: B batch, S tokens."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.context import Context
from clearhead.core.kernels.positions import sequence_lengths


def total_lengths(rotary: spec.Rotary, context: Context) -> Int[Tensor, "batch queries"] | None:
    """Return the total length of each token's sequence; None if the RoPE scaling does not depend on the length.

    Raises:
        InputError: a sequence exceeds its total length, or the original length in a cache without `total_length`.
    """
    if not isinstance(rotary.scaling, spec.DynamicScaling | spec.LongRopeScaling):
        return None
    length_BS = sequence_lengths(context.key_position, context.masking.documents)
    is_limited = length_BS.numel() > 0 and (context.cache or context.total_length) is not None
    longest, original = int(length_BS.max()) if is_limited else 0, rotary.scaling.original_length
    if context.total_length is not None:
        total_B1 = torch.as_tensor(context.total_length, device=length_BS.device).reshape(-1, 1)
        if bool((length_BS > total_B1).any()):
            raise InputError(f"a sequence of {longest} tokens is longer than its total length: raise total_length")
        length_BS = total_B1.expand(max(len(total_B1), len(length_BS)), length_BS.shape[1])
    elif context.cache is not None and longest > original:
        raise InputError(
            f"a cached sequence of {longest} tokens is longer than the {original} tokens beyond which RoPE scaling "
            "depends on the total length; pass Cache(total_length=...)"
        )
    return length_BS[:, -context.masking.num_queries :]
