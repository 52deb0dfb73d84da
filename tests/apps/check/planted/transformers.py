"""Whole Transformers as tutorials write them, with masks made outside or inside, right and wrong."""

from __future__ import annotations

import math

import torch
from torch import nn

WIDTH, HEADS, LAYERS, VOCAB = 8, 2, 2, 19
IN_ATTENTION = ("hides what is True", "mask_polarity in attentions", "raises")


class Attention(nn.Module):
    """forward(query, key, value, mask), mask True = may attend."""

    def __init__(self, cause=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cause = cause
        self.scale = 1.0 if cause == "no_scaling" else math.sqrt(WIDTH // HEADS)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            projection(x).view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for projection, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = q @ k.transpose(-2, -1) / self.scale
        if mask is not None:
            hidden = mask if self.cause in ("hides what is True", "mask_polarity in attentions") else ~mask
            scores = scores.masked_fill(hidden, -1e9)
        if self.cause == "raises":
            scores = scores @ self.cause
        mixed = scores.softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(query.shape))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class EncoderLayer(nn.Module):
    def __init__(self, cause=None):
        super().__init__()
        self.self_attn, self.feed_forward, self.cause = Attention(cause), FeedForward(), cause
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        branch = self.self_attn(x, x, x, mask)
        x = self.norm1(branch if self.cause == "residual_missing" else x + branch)
        return self.norm2(x + self.feed_forward(x))


class DecoderLayer(nn.Module):
    def __init__(self, cause=None):
        super().__init__()
        self.self_attn, self.cross_attn = (Attention(cause if cause in IN_ATTENTION else None) for _ in range(2))
        self.feed_forward, self.cause = FeedForward(), cause
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        if self.cause == "source_not_read":
            memory, src_mask = x, tgt_mask
        x = self.norm2(x + self.cross_attn(x, memory, memory, src_mask))
        return self.norm3(x + self.feed_forward(x))


class Translator(nn.Module):
    """forward(src, tgt, src_mask, tgt_mask), or forward(src, tgt) of `Inside`; masks [B, 1, 1, S] and [B, 1, T, T]."""

    def __init__(self, cause=None):
        super().__init__()
        self.src, self.tgt, self.cause = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH), cause
        self.places = nn.Parameter(torch.randn(1, 32, WIDTH))
        shared = EncoderLayer()
        self.encoder = nn.ModuleList(shared if cause == "layers_shared" else EncoderLayer(cause) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(DecoderLayer(cause) for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, src, tgt, src_mask, tgt_mask):
        x = self.src(src) * WIDTH**0.5
        if self.cause != "positions_missing":
            x = x + self.places[:, : src.shape[1]]
        src_mask = None if self.cause == "padding_read" else src_mask
        read, outputs = x, []
        for layer in self.encoder:
            x = layer(read if self.cause == "layer_unread" else x, src_mask)
            outputs.append(x)
        memory = outputs[0] if self.cause == "memory_of_first_layer" else x
        y = self.tgt(tgt) * WIDTH**0.5 + self.places[:, : tgt.shape[1]]
        tgt_mask = None if self.cause == "no_causal_mask" else tgt_mask
        for layer in self.decoder:
            y = layer(y, memory, src_mask, tgt_mask)
        return self.out(y if self.cause == "norm_unread" else self.norm(y))


class Inside(Translator):
    """Makes its masks of the ids; id 1 is padding."""

    def forward(self, src, tgt):
        length = tgt.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        padding = (tgt != 1)[:, None, None]
        if self.cause == "hides what is True":
            return super().forward(src, tgt, (src == 1)[:, None, None], ~(padding & causal))
        visible = torch.ones_like(causal).triu(1) if self.cause == "mask_polarity in decoder" else padding & causal
        return super().forward(src, tgt, (src != 1)[:, None, None], visible)


class Wrapped(nn.Module):
    """PyTorch's own Transformer between two tables; its causal mask is made inside."""

    def __init__(self, cause=None):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB + 4, WIDTH)
        self.places, self.cause = nn.Embedding(32, WIDTH), cause
        self.stacks = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB + 4)

    def forward(self, source_ids, target_ids, src_key_padding_mask=None):
        x, y = (
            table(ids) + self.places(torch.arange(ids.shape[1]))
            for table, ids in ((self.src, source_ids), (self.tgt, target_ids))
        )
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=x.dtype)
        if self.cause == "mask_polarity":  # PyTorch hides where a boolean mask is True
            mask = torch.ones_like(mask, dtype=torch.bool).tril()
        hidden = None if self.cause == "padding_read" else src_key_padding_mask
        return self.out(self.stacks(x, y, tgt_mask=mask, src_key_padding_mask=hidden, memory_key_padding_mask=hidden))


class Decoder(nn.Module):
    """forward(x, mask) with a causal mask [T, T] made outside, or forward(x) of `Causal`."""

    def __init__(self, cause=None):
        super().__init__()
        self.table, self.places, self.cause = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH), cause
        self.layers = nn.ModuleList(EncoderLayer(cause) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, x, mask):
        h = self.table(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers[: LAYERS - 1] if self.cause == "layer_never_run" else self.layers:
            h = layer(h, mask)
        return self.out(h)


class Causal(Decoder):
    def forward(self, x):
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().forward(x, ~causal if self.cause in ("hides what is True", "mask_polarity") else causal)


class Backward(Decoder):
    """Reads from the end to the beginning on purpose: forward(x)."""

    def forward(self, x):
        return super().forward(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu())


RIGHT = [
    (Translator, None), (Inside, None), (Wrapped, None), (Decoder, None), (Causal, None), (Backward, None),
    (Translator, "hides what is True"), (Inside, "hides what is True"), (Causal, "hides what is True"),
    (Decoder, "hides what is True"),
]  # fmt: skip
WRONG = [
    (Translator, "no_scaling"), (Translator, "residual_missing"), (Inside, "source_not_read"),
    (Translator, "positions_missing"), (Inside, "layer_unread"), (Translator, "memory_of_first_layer"),
    (Translator, "no_causal_mask"), (Translator, "padding_read"), (Wrapped, "padding_read"),
    (Inside, "norm_unread"), (Inside, "layers_shared"), (Causal, "layer_never_run"), (Decoder, "residual_missing"),
    (Inside, "mask_polarity in decoder"), (Inside, "mask_polarity in attentions"), (Wrapped, "mask_polarity"),
    (Causal, "mask_polarity"), (Causal, "mask_polarity in attentions"),
]  # fmt: skip
RAISING = [Translator, Inside, Decoder, Causal]
