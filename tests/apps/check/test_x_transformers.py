"""Modules of x-transformers are right, or cannot be compared with the reason; none is called wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch

x_transformers = pytest.importorskip("x_transformers.x_transformers")
RIGHT: tuple[dict[str, object], ...] = ({}, {"causal": True}, {"one_kv_head": True})
VARIANTS: tuple[dict[str, object], ...] = ({"qk_norm": True}, {"sparse_topk": 3}, {"num_mem_kv": 2})


@pytest.mark.parametrize("options", [*RIGHT, *VARIANTS], ids=str)
def test_its_attention_is_never_called_wrong(options: dict[str, object]) -> None:
    candidate = x_transformers.Attention(12, heads=3, dim_head=4, **options)
    if options in RIGHT:
        report = ch.check.attention(candidate, width=12, heads=3)
        assert report.ok, report
    else:
        report = ch.check.attention(candidate, width=12, heads=3, mask="attend", causal=False)
        assert report.verdict == "cannot compare" and report.reason, report


def test_its_norms_are_never_called_wrong() -> None:
    for name in ("LayerNorm", "RMSNorm", "SimpleRMSNorm", "ScaleNorm"):
        report = ch.check.norm(getattr(x_transformers, name)(8), width=8)
        assert report.verdict != "wrong", f"{name}: {report}"


def test_a_module_of_a_user_is_not_spared() -> None:
    """A user's subclass of a library class, and library modules that a user arranged, do not count as a library's."""

    class Own(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.square().sum(-1, keepdim=True).sqrt() * self.weight

    assert ch.check.norm(Own(8), width=8, kind="rms").verdict == "wrong"
    assert ch.check.norm(nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8)), width=8).verdict != "right"
