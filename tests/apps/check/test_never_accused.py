"""Correct attentions are never called wrong: those of libraries, and random ones of every size, layout and mask."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import clearhead as ch

CASES = int(os.environ.get("CLEARHEAD_CASES", "40"))
"""Drawn attentions; docs/results.md has a run with 1,000 of them."""


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_torch(batch_first: bool, bias: bool) -> None:
    candidate = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first)
    report = ch.check.attention(candidate, width=12, heads=3)
    assert report.ok, report


def test_own_attention() -> None:
    report = ch.check.attention(ch.MultiHeadAttention(12, 3, num_kv_heads=1), width=12, heads=3)
    assert report.ok, report
    assert "empty" not in f"{report}"


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers_of_torch(norm_first: bool, activation: str) -> None:
    candidate = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, norm_first=norm_first, activation=activation)
    report = ch.check.layer(candidate, width=12, heads=3)
    assert report.ok, report
    other = nn.TransformerDecoderLayer(12, 3, 24, batch_first=True, norm_first=norm_first, activation=activation)
    assert ch.check.layer(other, width=12, heads=3, causal=False).ok


@pytest.mark.parametrize(
    "candidate", [nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8, bias=False), nn.RMSNorm(8, eps=1e-6)]
)
def test_norms_of_torch(candidate: nn.Module) -> None:
    report = ch.check.norm(candidate, width=8)
    assert report.ok, report


def library_attentions() -> dict[str, nn.Module]:
    models = pytest.importorskip("transformers.models")
    bert = models.bert.modeling_bert, models.bert.configuration_bert.BertConfig(hidden_size=12, num_attention_heads=3)
    gpt2 = models.gpt2.modeling_gpt2, models.gpt2.configuration_gpt2.GPT2Config(n_embd=12, n_head=3)
    t5 = models.t5.modeling_t5, models.t5.configuration_t5.T5Config(d_model=12, d_kv=4, num_heads=3)
    llama = (
        models.llama.modeling_llama,
        models.llama.configuration_llama.LlamaConfig(hidden_size=12, num_attention_heads=3, num_key_value_heads=1),
    )
    for _, config in (bert, gpt2, llama):
        config._attn_implementation = "eager"
    return {
        "bert": bert[0].BertSelfAttention(bert[1]),
        "bert with output": bert[0].BertAttention(bert[1]),
        "gpt2": gpt2[0].GPT2Attention(gpt2[1], layer_idx=0),
        "t5": t5[0].T5Attention(t5[1]),
        "t5 with positions": t5[0].T5Attention(t5[1], has_relative_attention_bias=True),
        "llama": llama[0].LlamaAttention(llama[1], layer_idx=0),
    }


def test_attention_of_transformers() -> None:
    for name, candidate in library_attentions().items():
        report = ch.check.attention(candidate, width=12, heads=3)
        assert report.verdict in ("right", "cannot compare"), f"{name}: {report}"
        if name in ("bert", "gpt2", "t5", "llama"):
            assert report.ok, f"{name}: {report}"


class Drawn(nn.Module):
    """A right attention of any layout."""

    def __init__(self, width: int, heads: int, bias: bool, fused: str, order: str, mask: str) -> None:
        super().__init__()
        self.heads, self.fused, self.order, self.kind = heads, fused, order, mask
        if fused == "none":
            self.w_q, self.w_k, self.w_v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def split(self, x: Tensor) -> Tensor:
        if self.order == "heads first":
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return x.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)

    def forward(self, query: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        memory = query if memory is None else memory
        if self.fused == "none":
            q, k, v = map(self.split, (self.w_q(query), self.w_k(memory), self.w_v(memory)))
        elif self.fused == "thirds":
            q, _, _ = self.qkv(query).chunk(3, -1)
            _, k, v = self.qkv(memory).chunk(3, -1)
            q, k, v = map(self.split, (q, k, v))
        else:
            q = self.qkv(query).unflatten(-1, (self.heads, 3, -1))[..., 0, :].transpose(1, 2)
            k, v = (self.qkv(memory).unflatten(-1, (self.heads, 3, -1))[..., i, :].transpose(1, 2) for i in (1, 2))
        if mask is not None:
            mask = {"keys": lambda m: m[:, None, None], "batch": lambda m: m[:, None], "all": lambda m: m}[self.kind](
                mask
            )
            assert mask.dim() == (2 if self.kind == "all" and mask.dim() == 2 else 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        order = (0, 2, 1, 3) if self.order == "heads first" or self.fused == "heads" else (0, 2, 3, 1)
        return self.out(mixed.permute(*order).flatten(2))


@settings(max_examples=CASES, deadline=None)
@given(
    heads=st.integers(1, 5), size=st.integers(1, 6), bias=st.booleans(),
    fused=st.sampled_from(["none", "thirds", "heads"]),
    order=st.sampled_from(["heads first", "features first"]), mask=st.sampled_from(["keys", "batch", "all"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_any_right_attention(
    heads: int, size: int, bias: bool, fused: str, order: str, mask: str, dtype: torch.dtype
) -> None:
    width = heads * size
    candidate = Drawn(width, heads, bias, fused, order, mask).to(dtype)
    before = [weight.clone() for weight in candidate.parameters()]
    report = ch.check.attention(candidate, width=width, heads=heads)
    assert report.ok, report
    assert all(torch.equal(weight, other) for weight, other in zip(before, candidate.parameters(), strict=True))
    assert candidate.training
