"""Each planted position table, norm, loss and rotation differs from PyTorch's computation, or is correct and agrees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.apps.check.planted import small_parts as planted


def agree(out: Tensor, wanted: Tensor, cause: str | None) -> None:
    same = out.shape == wanted.shape and torch.allclose(out, wanted, rtol=1e-5, atol=1e-5)
    assert same == (cause is None), (out - wanted).abs().max() if out.shape == wanted.shape else out.shape


@pytest.mark.parametrize("entry", planted.POSITIONS, ids=lambda e: e[0])
def test_positions(entry) -> None:
    angles = torch.arange(7)[:, None] * torch.pow(10000.0, -torch.arange(0, 10, 2) / 10)
    wanted = torch.zeros(7, 10)
    wanted[:, 0::2], wanted[:, 1::2] = angles.sin(), angles.cos()
    agree(entry[1](7, 10), wanted, entry[2])


@pytest.mark.parametrize("entry", [*planted.NORM, *planted.RMS_NORM], ids=lambda e: e[0])
def test_norm(entry) -> None:
    torch.manual_seed(0)
    candidate, x = entry[1](8), torch.randn(2, 5, 8)
    x[0] *= 0.01
    if entry in planted.NORM:
        wanted = F.layer_norm(x, (8,), candidate.gamma, candidate.beta, candidate.eps)
    else:
        wanted = F.rms_norm(x, (8,), candidate.gamma, candidate.eps)
    agree(candidate(x), wanted, entry[2])


@pytest.mark.parametrize("entry", planted.LOSS, ids=lambda e: e[0])
def test_loss(entry) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 6, 9), torch.randint(1, 9, (2, 6))
    ids[0, 4:] = 0
    keep = ids[:, 1:] != 0
    wanted = F.nll_loss(logits[:, :-1][keep].log_softmax(-1), ids[:, 1:][keep])
    agree(entry[1](logits, ids, 0), wanted, entry[2])


@pytest.mark.parametrize("entry", planted.ROPE, ids=lambda e: e[0])
def test_rope(entry) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8)
    wanted = x.clone()
    for t in range(5):
        for i in range(0, 8, 2):
            a = torch.tensor(t * 10000 ** (-i / 8))
            turn = torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])])
            wanted[:, :, t, i : i + 2] = x[:, :, t, i : i + 2] @ turn.T
    agree(entry[1](x), wanted, entry[2])
