"""Attention with one mistake each: shapes, scaling and the softmax."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.apps.check.planted.entry import Planted, per_head, read_fused, read_stacked, separate


class Linears(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def combine(self, x):
        return x.transpose(1, 2).contiguous().view(x.size(0), x.size(2), self.d_model)


class NoScaling(Linears):
    """The scores are not divided by the root of the head's size."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o(self.combine(F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v))


class NoScalingFused(nn.Module):
    """One linear layer and no scaling, causal."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        att = (q @ k.mT).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        return self.c_proj((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class ScaledByWidth(Linears):
    """The root is of the width, not of the head's size."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        w = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_model), dim=-1)
        return self.W_o(self.combine(w @ v)), w


class ScaledByWidthPerHead(nn.Module):
    """A list of heads, each scaled by the root of the width C of its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.queries, self.keys, self.values = (
            nn.ModuleList([nn.Linear(width, width // heads, bias=False) for _ in range(heads)]) for _ in range(3)
        )
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        C = x.shape[-1]
        heads = zip(self.queries, self.keys, self.values, strict=True)
        return self.proj(torch.cat([((q(x) @ k(x).mT) * C**-0.5).softmax(-1) @ v(x) for q, k, v in heads], -1))


class ScaledByHeads(Linears):
    """The root is of the number of heads."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.num_heads)
        return self.W_o(self.combine(scores.softmax(-1) @ v))


class DividedByHeadSize(Linears):
    """Divided by the head's size without the root."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o(self.combine(F.softmax(q @ k.transpose(2, 3) / self.d_k, -1) @ v))


class ScaledTwice(Linears):
    """The queries and the keys are both divided by the root."""

    def forward(self, x):
        q = self.split(self.W_q(x)) * self.d_k**-0.5
        k = self.split(self.W_k(x)) * self.d_k**-0.5
        return self.W_o(self.combine((q @ k.mT).softmax(-1) @ self.split(self.W_v(x))))


class Multiplied(Linears):
    """Multiplied by the root instead of divided."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o(self.combine(torch.softmax(q @ k.mT * math.sqrt(self.d_k), -1) @ v))


class SoftmaxOverQueries(Linears):
    """The softmax runs over dim=-2."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o(self.combine(F.softmax(q @ k.mT / math.sqrt(self.d_k), dim=-2) @ v))


class SoftmaxOverHeads(Linears):
    """dim=1 fits the three dimensions of a tutorial without heads; here it is the axis of heads."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        w = nn.Softmax(dim=1)(q @ k.mT / math.sqrt(self.d_k))
        return self.W_o(self.combine(w @ v)), w


def softmax_over_queries(x, wq, wk, wv, wo, heads):
    """einsum writes keys first, and the softmax still runs over the last axis."""
    q, k, v = (torch.einsum("btd,de->bte", x, w).unflatten(-1, (heads, -1)) for w in (wq, wk, wv))
    a = torch.einsum("bkhd,bqhd->bhkq", k, q).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bhkq,bkhd->bqhd", a, v).flatten(-2) @ wo


class SplitByView(Linears):
    """view(B, heads, T, size) straight away, without a transpose; merged the same way."""

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, self.num_heads, T, self.d_k) for f in (self.W_q, self.W_k, self.W_v))
        w = F.softmax(q @ k.mT / math.sqrt(self.d_k), dim=-1)
        return self.W_o((w @ v).view(B, T, self.d_model))


class SplitByViewMerged(Linears):
    """view(B, heads, T, size) without a transpose, but merged with one."""

    def forward(self, x):
        B, T = x.shape[:2]
        q, k, v = (f(x).reshape(B, -1, T, self.d_k) for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(self.combine(F.scaled_dot_product_attention(q, k, v)))


class MergedWithoutTranspose(Linears):
    """The heads are put together by reshape alone."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o((torch.softmax(q @ k.mT / math.sqrt(self.d_k), -1) @ v).reshape(x.shape))


def merged_without_transpose(x, wq, wk, wv, wo, heads):
    """The function lacks the transpose before the output's product."""
    b, t, d = x.shape
    q, k, v = ((x @ w).view(b, t, heads, -1).permute(0, 2, 1, 3) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v).contiguous().view(b, t, d) @ wo


class NoTransposeAtAll(Linears):
    """Attention runs over heads within a position: (B, T, heads, size) is never transposed."""

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.num_heads, self.d_k) for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o((F.softmax(q @ k.mT / math.sqrt(self.d_k), -1) @ v).reshape(B, T, C))


class BatchMixed(Linears):
    """The stack is (heads, batch, T, size), and the output permutes as if the batch came first."""

    def forward(self, x):
        q, k, v = (torch.stack(f(x).chunk(self.num_heads, -1)) for f in (self.W_q, self.W_k, self.W_v))
        out = F.softmax(q @ k.mT / math.sqrt(self.d_k), -1) @ v
        return self.W_o(out.permute(0, 2, 1, 3).reshape(x.shape))


class BatchFolded(Linears):
    """(batch * heads) is unfolded as (heads, batch)."""

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (self.split(f(x)).reshape(-1, T, self.d_k) for f in (self.W_q, self.W_k, self.W_v))
        out = torch.bmm(F.softmax(torch.bmm(q, k.mT) / math.sqrt(self.d_k), -1), v)
        return self.W_o(out.view(self.num_heads, B, T, self.d_k).permute(1, 2, 0, 3).reshape(B, T, C))


class SplitByNumber(Linears):
    """torch.split takes the size of a chunk, and is given the number of heads."""

    def forward(self, x):
        q, k, v = (torch.stack(f(x).split(self.num_heads, dim=-1), 1) for f in (self.W_q, self.W_k, self.W_v))
        out = F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
        return self.W_o(out.permute(0, 2, 1, 3).reshape(x.shape))


class TimeSliced(nn.Module):
    """q[:, t:t+c] takes time steps where features are meant: one head loses the steps beyond the width."""

    def __init__(self, l, h):
        super().__init__()
        self.heads = h
        self.toqueries, self.tokeys, self.tovalues = (nn.Linear(l, l, bias=False) for _ in range(3))
        self.unifyheads = nn.Linear(l, l)

    def forward(self, x):
        c = x.size(-1) // self.heads
        q, k, v = self.toqueries(x), self.tokeys(x), self.tovalues(x)
        outs = []
        for t in range(0, x.size(-1), c):
            w = F.softmax(q[:, t : t + c] @ k[:, t : t + c].mT / math.sqrt(c), -1)
            outs.append(w @ v[:, t : t + c])
        return self.unifyheads(torch.cat(outs, -1))


class TwoGroupings(nn.Module):
    """The weights are [h][q, k, v] by their view, but the values' heads come out in reverse order."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v.flip(1)).transpose(1, 2).flatten(2))


class NoOutput(nn.Module):
    """The output projection is made and never used."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OutputPerHead(nn.Module):
    """einsum with raw weights sums the heads instead of projecting them."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        d = d_model // n_heads
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(n_heads, d_model, d) * 0.3) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(n_heads, d, d_model) * 0.3)

    def forward(self, x):
        q, k, v = (torch.einsum("bpd,ndh->bnph", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        z = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
        return z.transpose(1, 2).flatten(2)


class BiasMissing(nn.Module):
    """F.linear takes the weight of the query's layer and forgets its bias."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = x @ self.query.weight.T, x @ self.key.weight.T, x @ self.value.weight.T
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ScoresTransposed(Linears):
    """k @ q^T instead of q @ k^T."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.W_o(self.combine(F.softmax(k @ q.mT / math.sqrt(self.d_k), -1) @ v))


class WeightsTransposed(nn.Module):
    """x @ weight without the transpose that nn.Linear's layout needs."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (x @ w.weight for w in (self.Wq, self.Wk, self.Wv))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.Wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HalfPromoted(Linears):
    """The scale is a float32 tensor with a dimension: half precision becomes float32 and the values are cast."""

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        w = F.softmax(q @ k.mT / torch.sqrt(torch.tensor([self.d_k], dtype=torch.float32)), dim=-1)
        return F.linear(self.combine(w @ v.to(w.dtype)), self.W_o.weight.to(w.dtype), self.W_o.bias.to(w.dtype))


LINEARS = separate("W_q", "W_k", "W_v", "W_o")
FUSED = read_fused("c_attn", "c_proj")
WRONG: list[Planted] = [
    Planted("no_scaling", NoScaling, "no_scaling", weights=LINEARS),
    Planted("no_scaling_fused", NoScalingFused, "no_scaling", mask="causal", weights=FUSED),
    Planted("scaled_by_width", ScaledByWidth, "scaled_by_width", weights=LINEARS),
    Planted("scaled_by_width_per_head", ScaledByWidthPerHead, "scaled_by_width", weights=per_head),
    Planted("scaled_by_heads", ScaledByHeads, "scaled_by_heads", weights=LINEARS),
    Planted("divided_by_head_size", DividedByHeadSize, "scaled_without_root", weights=LINEARS),
    Planted("scaled_twice", ScaledTwice, "scaled_twice", weights=LINEARS),
    Planted("multiplied", Multiplied, "scale_multiplied", weights=LINEARS),
    Planted("softmax_over_queries", SoftmaxOverQueries, "softmax_over_queries", weights=LINEARS),
    Planted("softmax_over_queries_function", lambda width, heads: softmax_over_queries, "softmax_over_queries"),
    Planted("softmax_over_heads", SoftmaxOverHeads, "softmax_over_heads", weights=LINEARS),
    Planted("split_by_view", SplitByView, "heads_without_transpose", weights=LINEARS),
    Planted("split_by_view_merged", SplitByViewMerged, "heads_without_transpose", weights=LINEARS),
    Planted("no_transpose_at_all", NoTransposeAtAll, "heads_without_transpose", weights=LINEARS),
    Planted("merged", MergedWithoutTranspose, "heads_merged_without_transpose", weights=LINEARS),
    Planted("merged_function", lambda width, heads: merged_without_transpose, "heads_merged_without_transpose"),
    Planted("batch_mixed", BatchMixed, "batch_mixed_into_heads", weights=LINEARS),
    Planted("batch_folded", BatchFolded, "batch_mixed_into_heads", weights=LINEARS),
    Planted("split_by_number", SplitByNumber, "split_by_number_of_heads", weights=LINEARS),
    Planted(
        "time_sliced",
        lambda width, heads: TimeSliced(width, 1),
        "time_sliced_for_features",
        weights=separate("toqueries", "tokeys", "tovalues", "unifyheads"),
        shows="long",
    ),
    Planted("values_heads_reversed", TwoGroupings, "heads_mismatched", weights=read_fused("qkv", "out", "heads")),
    Planted("no_output", NoOutput, "output_projection_missing", weights=FUSED),
    Planted("no_output_einsum", OutputPerHead, "output_projection_missing", weights=read_stacked),
    Planted("bias_missing", BiasMissing, "bias_missing", weights=separate("query", "key", "value", "dense")),
    Planted("scores_transposed", ScoresTransposed, "scores_transposed", weights=LINEARS),
    Planted("weights_transposed", WeightsTransposed, "weights_transposed", weights=separate("Wq", "Wk", "Wv", "Wo")),
    Planted("half_promoted", HalfPromoted, "fp16_promoted", weights=LINEARS, shows="half"),
]
