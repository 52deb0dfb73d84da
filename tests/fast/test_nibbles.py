"""4-bit matrices: their scales and their layout, compared with the rule of llama.cpp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.fast.native.load import function
from clearhead.fast.nibbles import GROUP, quantize_groups, widen_groups
from clearhead.fast.stored import INT4


def round_as_q4_0(weight: Tensor) -> Tensor:
    """Return a matrix rounded like llama.cpp's Q4_0: the scale is the number with the largest magnitude / -8."""
    groups = weight.reshape(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (largest / -8).half().float()
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    integers = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (integers * scale).view(weight.shape)


def squared_errors(rounded: Tensor, weight: Tensor) -> Tensor:
    """Return the squared error of each group."""
    return (rounded - weight).view(-1, GROUP).square().sum(1)


@pytest.mark.parametrize("tail", [float("inf"), 3.0])
def test_no_scale_has_a_smaller_squared_error(tail: float) -> None:
    """Compare with 3,000 scales for each group; tail: degrees of freedom of the distribution of the weights."""
    torch.manual_seed(1)
    weight = torch.randn(64, 96) if tail == float("inf") else torch.distributions.StudentT(tail).sample((64, 96))
    groups = weight.view(-1, GROUP)
    errors = squared_errors(widen_groups(*quantize_groups(weight)), weight)
    best = torch.full_like(errors, torch.inf)
    for divisor in torch.linspace(4.0, 16.0, 1500):
        for sign in (-1, 1):
            scale = (sign * groups.abs().amax(1, keepdim=True) / divisor).half().float()
            integers = (groups / scale).round().clamp(-8, 7)
            best = torch.minimum(best, (integers * scale - groups).square().sum(1))
    assert (errors <= 1.005 * best).all()
    assert errors.sum() <= 1.0002 * best.sum()
    assert errors.sum() <= 0.95 * squared_errors(round_as_q4_0(weight), weight).sum()


def test_groups_lie_as_in_blocks_of_q4_0() -> None:
    """Low nibbles are the first 16 weights of a group, high nibbles its last 16; the offset is 8."""
    integers = torch.randint(-8, 8, (5, 3, GROUP)).float()
    integers[..., 0], integers[..., 1] = -8.0, 7.0  # no other scale is as good
    scale = torch.rand(5, 3, 1).add(0.5).half().float()
    nibbles, scales = quantize_groups((integers * scale).view(5, -1))
    assert nibbles.dtype == torch.uint8 and scales.dtype == torch.float16
    assert torch.equal(scales.float(), scale[..., 0])
    blocks, shifted = nibbles.view(5, 3, 16), (integers + 8).byte()
    assert torch.equal(blocks & 15, shifted[..., :16])
    assert torch.equal(blocks >> 4, shifted[..., 16:])
    assert torch.equal(widen_groups(nibbles, scales), (integers * scale).view(5, -1))


def test_zeros_stay_and_what_is_no_number_does_not_become_one() -> None:
    weight = torch.randn(4, 2 * GROUP)
    weight[0] = 0.0
    weight[1, 3] = torch.nan
    weight[2, 40] = torch.inf
    wide = widen_groups(*quantize_groups(weight))
    assert torch.equal(wide[0], torch.zeros(2 * GROUP))
    assert not wide[1, :GROUP].isfinite().any() and wide[1, GROUP:].isfinite().all()
    assert not wide[2, GROUP:].isfinite().any() and wide[2, :GROUP].isfinite().all()


def test_rows_are_whole_groups_and_scales_fit_into_16_bits() -> None:
    assert INT4.holds(torch.Size((3, 64)))
    assert not INT4.holds(torch.Size((3, 65))) and not INT4.holds(torch.Size((2, 3, 64)))
    with pytest.raises(InputError, match="too large for 4 bits, whose scales are fp16: use int8"):
        quantize_groups(torch.full((3, 64), 1e7))


@pytest.mark.parametrize("groups", [1, 15, 16, 17, 4096, 5003])
def test_the_kernels_and_the_plain_form_give_equal_bits(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(groups)
    weight = torch.distributions.StudentT(3.0).sample((groups, GROUP)) * torch.rand(groups, 1).pow(8)
    weight[0] = 0.0
    if groups > 1:
        weight[1] = 1e-30 * weight[1]
        weight[2, 3], weight[3, 4], weight[4, 5] = torch.nan, torch.inf, -torch.inf
    weights = (weight, weight.bfloat16(), torch.randint(-9, 9, (groups, GROUP)).float())
    assert function("find_group_scales", pointers=3, numbers=3) is not None, "the compiled kernels are missing"
    compiled = [quantize_groups(weight) for weight in weights]
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    for fast, plain in zip(compiled, map(quantize_groups, weights), strict=True):
        assert torch.equal(fast[0], plain[0])
        assert torch.equal(fast[1].view(torch.int16), plain[1].view(torch.int16))
