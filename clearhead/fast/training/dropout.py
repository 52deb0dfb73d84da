"""Inverted dropout, drawn from random words so that it costs a small part of a matrix product on a CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

# Each element gets 16 random bits, so a drop probability is a whole number of this many parts.
_PARTS = 1 << 16


class _Mask(torch.autograd.Function):
    """Multiply values by a mask of zeros and ones and a scale; one byte per element is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # A product of float and integer runs in a scalar loop on a CPU, thirty times slower than converting first.
        return mask.to(values.dtype).mul_(values).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        # The map is linear and its own adjoint, so derivatives of every order are right.
        return _apply_mask(gradients[0], mask, ctx.scale), None, None


def _apply_mask(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    product: Tensor = _Mask.apply(values, mask, scale)  # type: ignore[no-untyped-call]
    return product


def _draw_mask(shape: torch.Size, dropped_parts: int) -> Int8[Tensor, "..."]:
    """Compare 16 random bits per element, from torch's default CPU generator, with dropped_parts: 0 below, else 1."""
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64)
    # Without the bounds random_ never sets the sign bit, and every fourth element would be drawn from half the range.
    words.random_(torch.iinfo(torch.int64).min, None)
    noise = words.view(torch.int16)[:count].view(shape)
    return torch.ge(noise, dropped_parts - _PARTS // 2, out=torch.empty(shape, dtype=torch.int8))


def dropout(values: Float[Tensor, "..."], p: float) -> Float[Tensor, "..."]:
    """Zero each element with probability p and scale the others so that the mean stays; p = 0 returns values itself.

    On a CPU p is rounded to a multiple of 2**-16, and the scale belongs to the rounded p, so the mean is exact.
    Source: Srivastava et al. 2014, section 10 (scaling in training, not in use).
    """
    if p == 0.0:
        return values
    if p == 1.0 or values.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(values, p, training=True)
    dropped_parts = min(max(round(p * _PARTS), 1), _PARTS - 1)
    scale = _PARTS / (_PARTS - dropped_parts)
    return _apply_mask(values, _draw_mask(values.shape, dropped_parts), scale)


_WORDS: Final = 1 << 32


@dataclass(frozen=True)
class SeededDropout:
    """Dropout by a kernel that computes whether an element is dropped from its position and a seed.

    The kernel stores no mask: its backward pass computes the same one.

    Attributes:
        dropped: share of the elements that are dropped, in parts of 2**32.
        kept_scale: factor of the other elements.
        seed: two words of 32 bits; zeros if nothing is dropped.
    """

    dropped: int = 0
    kept_scale: float = 1.0
    seed: tuple[int, ...] = (0, 0)

    @classmethod
    def draw(cls, p: float, scale: float = 1.0) -> SeededDropout:
        """Return a dropout with a seed from torch's default CPU generator.

        Args:
            p: probability that an element is dropped, below 1.
            scale: mean factor of all elements.
        """
        dropped = min(round(p * _WORDS), _WORDS - 1)
        seed = tuple(torch.randint(_WORDS, (2,)).tolist()) if dropped else (0, 0)
        return cls(dropped, scale * _WORDS / (_WORDS - dropped), seed)

    def fill(self, call: ctypes.Structure) -> None:
        """Write the dropout into the arguments of a kernel."""
        call.dropped, call.kept_scale = self.dropped, self.kept_scale
        call.seed[:] = self.seed


class RandomBitDropout(nn.Dropout):
    """Dropout of a training tree on a CPU: 16 random bits for each element in place of PyTorch's random floats."""

    def forward(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Drop elements in training; return the values in evaluation."""
        return dropout(values, self.p) if self.training else values
