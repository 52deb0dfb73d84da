"""Each planted layer and module differs from PyTorch's, or is correct and agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.apps.check.planted.whole_parts import DECODER, LAYER, MODULE, CausalModel, DecoderLayer, EncoderLayer


@pytest.mark.parametrize("cause", LAYER)
@torch.no_grad()
def test_layer(cause) -> None:
    torch.manual_seed(0)
    candidate, x = EncoderLayer(8, 2, cause).eval(), torch.randn(2, 5, 8)
    nn.init.normal_(candidate.norm2.weight)
    blocked = torch.zeros(2, 5, dtype=torch.bool)
    blocked[0, 3:] = True
    y = candidate.norm1(x + candidate.attn(x, x, x, key_padding_mask=blocked)[0])
    wanted = candidate.norm2(y + candidate.fc2(candidate.fc1(y).relu()))
    assert torch.allclose(candidate(x, blocked), wanted, atol=1e-5) == (cause is None)


@pytest.mark.parametrize("cause", MODULE)
@torch.no_grad()
def test_module(cause) -> None:
    torch.manual_seed(0)
    right, candidate = CausalModel(8, 2).eval(), CausalModel(8, 2, cause).eval()
    candidate.load_state_dict(right.state_dict())
    ids = torch.randint(1, 11, (2, 6))
    if cause == "mask_one_short":
        with pytest.raises(RuntimeError):
            candidate(ids)
    else:
        assert torch.allclose(candidate(ids), right(ids), atol=1e-5) == (cause is None)


@pytest.mark.parametrize("cause", DECODER)
@torch.no_grad()
def test_decoder(cause) -> None:
    torch.manual_seed(0)
    candidate, y, memory = DecoderLayer(8, 2, cause).eval(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    blocked = torch.arange(5).expand(2, 5) > 3
    y1 = candidate.norm1(y + candidate.self_attn(y, y, y, attn_mask=torch.ones(5, 5).triu(1).bool())[0])
    wanted = candidate.norm2(y1 + candidate.cross(y1, memory, memory, key_padding_mask=blocked)[0])
    assert torch.allclose(candidate(y, memory, blocked), wanted, atol=1e-5) == (cause is None)
