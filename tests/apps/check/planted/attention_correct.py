"""Correct attention in the styles that tutorials teach."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.apps.check.planted.entry import Planted, per_head, read_fused, read_stacked, separate


class Annotated(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        n = query.size(0)
        q, k, v = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p = scores.softmax(dim=-1)
        return self.linears[-1](torch.matmul(p, v).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)), p


def read_annotated(candidate):
    weights = {}
    for letter, layer in zip("qkvo", candidate.linears, strict=True):
        weights |= {letter: layer.weight, letter + "b": layer.bias}
    return weights


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Interleaved(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.qkv_layer = nn.Linear(d_model, 3 * d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        b, s, e = x.shape
        qkv = self.qkv_layer(x).reshape(b, s, self.num_heads, 3 * self.head_dim).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        scaled = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim) + mask
        values = F.softmax(scaled, dim=-1) @ v
        return self.linear_layer(values.permute(0, 2, 1, 3).reshape(b, s, e))


class ListOfHeads(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        size = width // heads
        self.queries = nn.ModuleList([nn.Linear(width, size, bias=False) for _ in range(heads)])
        self.keys = nn.ModuleList([nn.Linear(width, size, bias=False) for _ in range(heads)])
        self.values = nn.ModuleList([nn.Linear(width, size, bias=False) for _ in range(heads)])
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        outs = []
        for wq, wk, wv in zip(self.queries, self.keys, self.values, strict=True):
            q, k, v = wq(x), wk(x), wv(x)
            a = torch.softmax(q @ k.mT * k.shape[-1] ** -0.5, -1)
            outs.append(a @ v)
        return self.proj(torch.cat(outs, dim=-1))


class Einsum(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d = d_model // n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d) * 0.3)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d) * 0.3)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d) * 0.3)
        self.W_O = nn.Parameter(torch.randn(n_heads, d, d_model) * 0.3)

    def forward(self, x):
        q = torch.einsum("bpd,ndh->bpnh", x, self.W_Q)
        k = torch.einsum("bpd,ndh->bpnh", x, self.W_K)
        v = torch.einsum("bpd,ndh->bpnh", x, self.W_V)
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / q.size(-1) ** 0.5
        block = torch.triu(torch.ones_like(scores[0, 0]), diagonal=1).bool()
        z = torch.einsum("bnqk,bknh->bqnh", scores.masked_fill(block, float("-inf")).softmax(-1), v)
        return torch.einsum("bqnh,nhd->bqd", z, self.W_O)


def multihead(x, wq, wk, wv, wo, heads):
    """Weights are (in, out): x @ w."""
    b, t, d = x.shape
    q, k, v = ((x @ w).reshape(b, t, heads, d // heads).swapaxes(1, 2) for w in (wq, wk, wv))
    s = q @ k.swapaxes(2, 3) / math.sqrt(d // heads)
    s = s - s.amax(-1, keepdim=True)
    e = s.exp()
    return ((e / e.sum(-1, keepdim=True)) @ v).swapaxes(1, 2).reshape(b, t, d) @ wo


class Bmm(nn.Module):
    def __init__(self, l, h):
        super().__init__()
        self.heads = h
        self.tokeys = nn.Linear(l, l, bias=False)
        self.toqueries = nn.Linear(l, l, bias=False)
        self.tovalues = nn.Linear(l, l, bias=False)
        self.unifyheads = nn.Linear(l, l)

    def forward(self, x):
        b, t, l = x.size()
        h, s = self.heads, l // self.heads

        def fold(y):
            return y.view(b, t, h, s).transpose(1, 2).reshape(b * h, t, s)

        k, q, v = fold(self.tokeys(x)), fold(self.toqueries(x)), fold(self.tovalues(x))
        q, k = q / s**0.25, k / s**0.25
        w = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=2)
        return self.unifyheads(torch.bmm(w, v).view(b, h, t, s).transpose(1, 2).reshape(b, t, l))


class TimeFirst(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * dim, dim) * 0.3)
        self.in_proj_bias = nn.Parameter(torch.randn(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        t, b, d = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (y.contiguous().view(t, b * self.heads, -1).transpose(0, 1) for y in (q, k, v))
        a = torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), q, k.transpose(1, 2), alpha=q.size(-1) ** -0.5)
        return self.out_proj(torch.bmm(a.softmax(-1), v).transpose(0, 1).reshape(t, b, d))


def in_proj(candidate):
    weights = {"o": candidate.out_proj.weight, "ob": candidate.out_proj.bias}
    for i, letter in enumerate("qkv"):
        weights |= {letter: candidate.in_proj_weight.chunk(3)[i], letter + "b": candidate.in_proj_bias.chunk(3)[i]}
    return weights


class ToQ(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, q, k, v, mask):
        q, k, v = self.to_q(q), self.to_k(k), self.to_v(v)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Chunked(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = self.Wq(x), self.Wk(x), self.Wv(x)
        q, k, v = (torch.stack(y.chunk(self.heads, dim=-1)) for y in (q, k, v))
        w = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        return self.Wo((w @ v).permute(1, 2, 0, 3).reshape(x.shape)), w


class BertStyle(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.n = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.n, x.size(-1) // self.n).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + (1 - attention_mask) * -10000.0
        context = torch.matmul(self.dropout(nn.Softmax(dim=-1)(scores)), v).permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(hidden_states.shape))


class ScaledWeights(nn.Module):
    """The scale is applied to the queries before the product and the mask is a float added out of place."""

    def __init__(self, embed, heads):
        super().__init__()
        self.heads, self.scale = heads, (embed // heads) ** -0.5
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(embed, embed, bias=False) for _ in range(4))

    def forward(self, q, k, v, mask):
        split = lambda y: y.reshape(*y.shape[:2], self.heads, -1)  # noqa: E731
        q, k, v = split(self.W_q(q) * self.scale), split(self.W_k(k)), split(self.W_v(v))
        w = (torch.einsum("bihd,bjhd->bhij", q, k) + mask).softmax(3)
        return self.W_o(torch.einsum("bhij,bjhd->bihd", w, v).flatten(-2))


CORRECT: list[Planted] = [
    Planted("annotated", Annotated, None, "q k v mask", "ones", read_annotated),
    Planted("gpt", CausalSelfAttention, None, "x", "causal", read_fused("c_attn", "c_proj")),
    Planted(
        "interleaved", Interleaved, None, "x mask", "additive", read_fused("qkv_layer", "linear_layer", "num_heads")
    ),
    Planted("list_of_heads", ListOfHeads, None, "x", "none", per_head),
    Planted("einsum", Einsum, None, "x", "causal", read_stacked),
    Planted("function", lambda width, heads: multihead, None, "x"),
    Planted("bmm", Bmm, None, "x", "none", separate("toqueries", "tokeys", "tovalues", "unifyheads")),
    Planted("time_first", TimeFirst, None, "x", "none", in_proj, time_first=True),
    Planted("to_q", ToQ, None, "q k v mask", "block", separate("to_q", "to_k", "to_v", "to_out")),
    Planted("chunked", Chunked, None, "x", "none", separate("Wq", "Wk", "Wv", "Wo")),
    Planted("bert", BertStyle, None, "x mask", "ones", separate("query", "key", "value", "dense")),
    Planted("scaled_query", ScaledWeights, None, "q k v mask", "additive", separate("W_q", "W_k", "W_v", "W_o")),
]
