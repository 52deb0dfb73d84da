"""Norms against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead import spec
from clearhead.core.norm import build_norm


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norms_follow_their_formulas(eps: float) -> None:
    x = torch.randn(3, 7, 11) * 2 + 1
    layer, rms = build_norm(11, spec.LayerNorm(eps=eps)), build_norm(11, spec.RMSNorm(eps=eps))
    for module in (layer, rms):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    torch.testing.assert_close(layer(x), (x - mean) / (variance + eps).sqrt() * layer.weight + layer.bias)
    torch.testing.assert_close(rms(x), x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * rms.weight)


def test_new_norms_have_ones_and_zeros_and_no_unused_parameters() -> None:
    layer = build_norm(5, spec.LayerNorm())
    assert torch.equal(layer.weight, torch.ones(5)) and torch.equal(layer.bias, torch.zeros(5))
    assert [name for name, _ in build_norm(5, spec.LayerNorm(bias=False)).named_parameters()] == ["weight"]
    assert [name for name, _ in build_norm(5, spec.RMSNorm()).named_parameters()] == ["weight"]
    x = torch.randn(5)
    assert build_norm(5, None)(x) is x


def test_norms_without_weights_with_an_offset_and_by_head() -> None:
    x = torch.randn(2, 7, 3, 5) * 2 + 1
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    standard, scaled = (x - mean) / (variance + 1e-5).sqrt(), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(build_norm(5, spec.LayerNorm(weight=False, bias=False))(x), standard)
    torch.testing.assert_close(build_norm(5, spec.RMSNorm(weight=False))(x), scaled)
    only_bias = build_norm(5, spec.LayerNorm(weight=False))
    assert [name for name, _ in only_bias.named_parameters()] == ["bias"]
    for shape in (5, (3, 5)):
        layer, rms = (
            build_norm(shape, spec.LayerNorm(unit_offset=True)),
            build_norm(shape, spec.RMSNorm(unit_offset=True)),
        )
        torch.testing.assert_close(rms(x), scaled, msg="a fresh offset is zero")
        for parameter in (*layer.parameters(), *rms.parameters()):
            assert not parameter.any() and parameter.shape == ((5,) if shape == 5 else shape)
            nn.init.normal_(parameter)
        torch.testing.assert_close(layer(x), standard * (1 + layer.weight) + layer.bias)
        torch.testing.assert_close(rms(x), scaled * (1 + rms.weight))
