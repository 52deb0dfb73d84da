"""The code of the guide to hand-written Transformers runs, and prints the output that the guide shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.house.source import ROOT

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class MyAttention(nn.Module):
    """Without the division by the root of the head size, as in the guide."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            projection(source).unflatten(-1, (6, 8)).transpose(1, 2)
            for projection, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/guides/your-own-transformer.md").read_text("utf-8")
    torch.manual_seed(3)
    names: dict[str, object] = {
        "my_attention": MyAttention(),
        "x": torch.randn(2, 5, 48),
        "mask": torch.ones(5, 5, dtype=torch.bool).tril(),
        "tokens": ["the", "cat", "sat", "on", "it"],
        "source_tokens": ["le", "chat", "est", "là"],
        "target_tokens": ["the", "cat", "is", "there", "."],
        "cross_weights": torch.full((1, 2, 5, 4), 0.25),
    }
    blocks = BLOCK.findall(text)
    assert len(blocks) == 4
    for block in blocks[:3]:
        exec(block, names)
    report, weights, by_hand = names["report"], names["weights"], names["by_hand"]
    assert "the scores are not divided by √d_head" in str(report)
    assert isinstance(weights, Tensor) and isinstance(by_hand, Tensor)
    torch.testing.assert_close(by_hand, weights[0, 0, -1])
    names["weights"] = weights.detach()[:1]
    exec(blocks[3], names)
    assert (tmp_path / "heads.html").stat().st_size > 10_000
