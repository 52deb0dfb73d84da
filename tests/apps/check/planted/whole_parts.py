"""Encoder layers and modules from ids to logits as students write them, right and wrong; each cause names its flag."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderLayer(nn.Module):
    """Post-norm layer of PyTorch's parts: forward(x, blocked), blocked (batch, time) is True at padding."""

    def __init__(self, width, heads, cause=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2, self.cause = nn.LayerNorm(width), nn.LayerNorm(width), cause

    def forward(self, x, blocked):
        c = self.cause
        read = self.norm1(x) if c == "norm_before" else x
        a = self.attn(read, read, read, key_padding_mask=None if c == "padding_attended" else blocked)[0]
        a = F.dropout(a, 0.1) if c == "dropout_in_evaluation" else a
        x = a if c == "residual_missing" else x + a
        x = x if c == "norm_before" else self.norm1(x)
        hidden = self.fc1(x)
        hidden = hidden if c == "activation_missing" else F.gelu(hidden) if c == "wrong_activation" else hidden.relu()
        y = self.fc2(hidden)
        y = y if c == "second_residual_missing" else x + y
        return self.norm1(y) if c == "norm_used_twice" else self.norm2(y)


class CausalModel(nn.Module):
    """forward(ids): logits; id 0 is padding on the right; tied weights."""

    def __init__(self, width, heads, cause=None, vocab=11):
        super().__init__()
        self.table, self.pos = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.attn, self.norm = nn.MultiheadAttention(width, heads, batch_first=True), nn.LayerNorm(width)
        self.cause = cause

    def forward(self, ids):
        c, t = self.cause, ids.size(1)
        x = self.table(ids) * (1 if c == "embedding_scale_missing" else self.table.embedding_dim**0.5)
        x = x + self.pos.weight[:t]
        if c == "batch_mates_read":
            x = x + x.mean(0, keepdim=True)
        if c == "randomness_in_evaluation":
            x = x + 0.1 * torch.randn_like(x)
        if c == "weights_changed":
            with torch.no_grad():
                self.norm.bias.add_(0.1)
        block = torch.ones(t, t, dtype=torch.bool).triu(2 if c == "future_by_one" else 1)
        if c == "no_causal_mask":
            block = torch.zeros_like(block)
        if c == "mask_one_short":
            block = block[:-1, :-1]
        pad = None if c == "padding_read" else ids == 0
        x = self.norm(x + self.attn(x, x, x, attn_mask=block, key_padding_mask=pad)[0])
        if c == "future_by_mean":
            x = x + x.mean(1, keepdim=True)
        return x @ self.table.weight.T


LAYER = [
    None,
    "norm_before",
    "padding_attended",
    "dropout_in_evaluation",
    "residual_missing",
    "activation_missing",
    "wrong_activation",
    "second_residual_missing",
    "norm_used_twice",
]
MODULE = [
    None,
    "embedding_scale_missing",
    "batch_mates_read",
    "randomness_in_evaluation",
    "weights_changed",
    "future_by_one",
    "no_causal_mask",
    "mask_one_short",
    "future_by_mean",
]


class DecoderLayer(nn.Module):
    """forward(y, memory, blocked): y (batch, targets, width), blocked (batch, sources) is True at source padding."""

    def __init__(self, width, heads, cause=None):
        super().__init__()
        self.self_attn, self.cross = (nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2))
        self.norm1, self.norm2, self.cause = nn.LayerNorm(width), nn.LayerNorm(width), cause

    def forward(self, y, memory, blocked):
        c, t = self.cause, y.size(1)
        causal = None if c == "no_causal_mask_in_decoder" else torch.ones(t, t, dtype=torch.bool).triu(1)
        y = self.norm1(y + self.self_attn(y, y, y, attn_mask=causal)[0])
        if c == "query_from_encoder":
            return self.norm2(y + self.cross(memory, y, y)[0])
        blocked = None if c == "source_padding_attended" else blocked
        return self.norm2(y + self.cross(y, memory, memory, key_padding_mask=blocked)[0])


DECODER = [None, "no_causal_mask_in_decoder", "query_from_encoder", "source_padding_attended"]
