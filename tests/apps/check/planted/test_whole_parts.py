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
    part, x = EncoderLayer(8, 2, cause).eval(), torch.randn(2, 5, 8)
    nn.init.normal_(part.norm2.weight)
    blocked = torch.zeros(2, 5, dtype=torch.bool)
    blocked[0, 3:] = True
    y = part.norm1(x + part.attn(x, x, x, key_padding_mask=blocked)[0])
    wanted = part.norm2(y + part.fc2(part.fc1(y).relu()))
    assert torch.allclose(part(x, blocked), wanted, atol=1e-5) == (cause is None)


@pytest.mark.parametrize("cause", MODULE)
@torch.no_grad()
def test_module(cause) -> None:
    torch.manual_seed(0)
    right, part = CausalModel(8, 2).eval(), CausalModel(8, 2, cause).eval()
    part.load_state_dict(right.state_dict())
    ids = torch.randint(1, 11, (2, 6))
    if cause == "mask_one_short":
        with pytest.raises(RuntimeError):
            part(ids)
    else:
        assert torch.allclose(part(ids), right(ids), atol=1e-5) == (cause is None)


@pytest.mark.parametrize("cause", DECODER)
@torch.no_grad()
def test_decoder(cause) -> None:
    torch.manual_seed(0)
    part, y, memory = DecoderLayer(8, 2, cause).eval(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    blocked = torch.arange(5).expand(2, 5) > 3
    y1 = part.norm1(y + part.self_attn(y, y, y, attn_mask=torch.ones(5, 5).triu(1).bool())[0])
    wanted = part.norm2(y1 + part.cross(y1, memory, memory, key_padding_mask=blocked)[0])
    assert torch.allclose(part(y, memory, blocked), wanted, atol=1e-5) == (cause is None)
