"""Positions, norms, losses and rotary embeddings as students write them, right and wrong: functions and modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Table = list[tuple[str, Callable[..., Any], str | None]]


def positions_loop(length, d):
    table = torch.zeros(length, d)
    for pos in range(length):
        for i in range(0, d, 2):
            table[pos, i] = math.sin(pos / 10000 ** (i / d))
            table[pos, i + 1] = math.cos(pos / 10000 ** (i / d))
    return table


def positions(length, d, start=0, step=1.0, base=10000.0, sign=-1.0):
    pos = torch.arange(start, start + length).float().unsqueeze(1)
    div = torch.exp(torch.arange(0, d, 2).float() * step * (sign * math.log(base) / d))
    return torch.stack([torch.sin(pos * div), torch.cos(pos * div)], dim=2).flatten(1)


def positions_double_step(length, d):
    """The loop steps by two, and the exponent multiplies by two again (4.b3)."""
    table = torch.zeros(length, d)
    for pos in range(length):
        for i in range(0, d, 2):
            table[pos, i] = math.sin(pos / 10000 ** (2 * i / d))
            table[pos, i + 1] = math.cos(pos / 10000 ** (2 * i / d))
    return table


def positions_halves(length, d):
    """All the sines and then all the cosines."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def positions_cos_exponent(length, d):
    """The exponent of the cosine is that of its odd column."""
    pos = torch.arange(length)[:, None]
    table = torch.zeros(length, d)
    table[:, 0::2] = torch.sin(pos / 10000 ** (torch.arange(0, d, 2) / d))
    table[:, 1::2] = torch.cos(pos / 10000 ** (torch.arange(1, d, 2) / d))
    return table


def positions_cos_first(length, d):
    """The even columns are cosines."""
    return positions_loop(length, d).unflatten(1, (-1, 2)).flip(2).flatten(1)


POSITIONS: Table = [
    ("positions_loop", positions_loop, None),
    ("positions_exp", positions, None),
    ("positions_double_step", positions_double_step, "double_step"),
    ("positions_halves", positions_halves, "sin_cos_halves"),
    ("positions_off_by_one", lambda n, d: positions(n, d, start=1), "position_off_by_one"),
    ("positions_base", lambda n, d: positions(n, d, base=1000.0), "wrong_base"),
    ("positions_sign", lambda n, d: positions(n, d, sign=1.0), "log_of_wrong_sign"),
    ("positions_cos_exponent", positions_cos_exponent, "cosine_exponent_of_odd_column"),
    ("positions_cos_first", positions_cos_first, "sin_cos_swapped"),
    ("positions_half_step", lambda n, d: positions(n, d, step=0.5), "half_step"),
]


class Norm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.rand(width)), eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class NormOfMoments(Norm):
    def forward(self, x):
        var = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(var + self.eps) * self.gamma + self.beta


class NormUnbiased(Norm):
    """x.var divides by n - 1 by default."""

    def forward(self, x):
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt() + self.beta


class NormEpsOutside(Norm):
    """eps is added to the standard deviation (shows where the variance is small)."""

    def forward(self, x):
        std = x.std(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (std + self.eps) + self.beta


class NormUnbiasedOutside(Norm):
    """The annotated transformer's: n - 1 and eps outside the root (4.b11)."""

    def forward(self, x):
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.beta


class NormOverTime(Norm):
    """Mean and variance run over time."""

    def forward(self, x):
        var = x.var(1, keepdim=True, unbiased=False)
        return self.gamma * (x - x.mean(1, keepdim=True)) / torch.sqrt(var + self.eps) + self.beta


class NormOverAll(Norm):
    """Mean and variance run over time and features together."""

    def forward(self, x):
        var = x.var((1, 2), keepdim=True, unbiased=False)
        return self.gamma * (x - x.mean((1, 2), keepdim=True)) / torch.sqrt(var + self.eps) + self.beta


class NormNoBeta(Norm):
    """The shift is never added."""

    def forward(self, x):
        return super().forward(x) - self.beta


class NormNoRoot(Norm):
    """Divided by the variance."""

    def forward(self, x):
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - x.mean(-1, keepdim=True)) / (var + self.eps) + self.beta


class NormNoMean(Norm):
    """RMS where a LayerNorm is meant."""

    def forward(self, x):
        return self.gamma * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.eps) + self.beta


class Rms(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gamma


class RmsCentered(Norm):
    """The mean is subtracted in an RMSNorm."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gamma


class RmsSum(Norm):
    """The root of the sum of squares, not of their mean."""

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps) * self.gamma


NORM: Table = [
    ("norm_by_hand", Norm, None),
    ("norm_of_moments", NormOfMoments, None),
    ("norm_unbiased", NormUnbiased, "unbiased_variance"),
    ("norm_eps_outside", NormEpsOutside, "eps_outside_root"),
    ("norm_unbiased_outside", NormUnbiasedOutside, "unbiased_variance"),
    ("norm_over_time", NormOverTime, "wrong_axis"),
    ("norm_over_all", NormOverAll, "wrong_axis"),
    ("norm_no_beta", NormNoBeta, "bias_missing"),
    ("norm_no_root", NormNoRoot, "root_missing"),
    ("norm_no_mean", NormNoMean, "mean_not_subtracted"),
]
RMS_NORM: Table = [
    ("rms", Rms, None),
    ("rms_centered", RmsCentered, "mean_subtracted"),
    ("rms_sum", RmsSum, "sum_for_mean"),
]


def loss(logits, ids, pad):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1), ignore_index=pad)


def loss_by_hand(logits, ids, pad):
    logp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    keep = (ids[:, 1:] != pad).float()
    return -(logp * keep).sum() / keep.sum()


def loss_not_shifted(logits, ids, pad):
    """The model must predict the token that it has just read."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=pad)


def loss_with_padding(logits, ids, pad):
    """ignore_index is missing."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])


def loss_double_softmax(logits, ids, pad):
    """Softmax, and cross-entropy does it again."""
    return loss(logits.softmax(-1), ids, pad)


def loss_shifted_twice(logits, ids, pad):
    """Labels are shifted by the data and again by the loss."""
    return F.cross_entropy(logits[:, :-2].transpose(1, 2), ids[:, 2:], ignore_index=pad)


def loss_backwards(logits, ids, pad):
    """The logits are shifted, not the targets."""
    return F.cross_entropy(logits[:, 1:].transpose(1, 2), ids[:, :-1], ignore_index=pad)


def loss_mean_with_padding(logits, ids, pad):
    """Padding has no loss but counts in the mean."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=pad, reduction="none").mean()


def loss_reshaped(logits, ids, pad):
    """(B, T, V) viewed as (B, V, T): mixed instead of transposed."""
    b, t, v = logits[:, :-1].shape
    return F.cross_entropy(logits[:, :-1].reshape(b, v, t), ids[:, 1:], ignore_index=pad)


def loss_sum(logits, ids, pad):
    """The sum where the mean is meant."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=pad, reduction="sum")


LOSS: Table = [
    ("loss", loss, None),
    ("loss_by_hand", loss_by_hand, None),
    ("loss_not_shifted", loss_not_shifted, "targets_not_shifted"),
    ("loss_with_padding", loss_with_padding, "padding_counted"),
    ("loss_mean_with_padding", loss_mean_with_padding, "padding_counted"),
    ("loss_double_softmax", loss_double_softmax, "double_softmax"),
    ("loss_shifted_twice", loss_shifted_twice, "shifted_twice"),
    ("loss_backwards", loss_backwards, "shifted_backwards"),
    ("loss_reshaped", loss_reshaped, "axes_reshaped"),
    ("loss_sum", loss_sum, "sum_for_mean"),
]


def rope_complex(x, theta=10000.0, start=0):
    """x: (batch, heads, time, size), pairs are neighbours."""
    angles = torch.outer(
        torch.arange(start, start + x.size(2)).float(), theta ** (-torch.arange(0, x.size(3), 2) / x.size(3))
    )
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(z).flatten(-2)


def rope(x, sign=1.0, power=1.0):
    d = x.shape[-1]
    a = torch.arange(x.size(-2))[:, None] / 10000 ** (power * torch.arange(0, d, 2) / d)
    even, odd, sin = x[..., 0::2], x[..., 1::2], sign * a.sin()
    return torch.stack((even * a.cos() - odd * sin, even * sin + odd * a.cos()), -1).flatten(-2)


def rope_halves(x):
    """Pairs are (i, i + d/2), as in Llama of Hugging Face, where neighbours are meant."""
    half = x.size(-1) // 2
    y = rope(torch.stack((x[..., :half], x[..., half:]), -1).flatten(-2))
    return torch.cat((y[..., 0::2], y[..., 1::2]), -1)


def rope_mixed(x):
    """Angles in halves [a|a] but pairs are neighbours."""
    a = torch.arange(x.size(-2))[:, None] / 10000 ** (torch.arange(0, x.size(-1), 2) / x.size(-1))
    a = torch.cat((a, a), -1)
    return x * a.cos() + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * a.sin()


ROPE: Table = [
    ("rope_complex", rope_complex, None),
    ("rope", rope, None),
    ("rope_halves", rope_halves, "interleaved_or_halves"),
    ("rope_mixed", rope_mixed, "angles_and_pairs_mismatched"),
    ("rope_sign", lambda x: rope(x, sign=-1.0), "wrong_sign"),
    ("rope_theta", lambda x: rope_complex(x, theta=1000.0), "wrong_theta"),
    ("rope_off_by_one", lambda x: rope_complex(x, start=1), "position_off_by_one"),
    ("rope_double_step", lambda x: rope(x, power=2.0), "double_step"),
    ("rope_over_heads", lambda x: rope(x.transpose(1, 2)).transpose(1, 2), "position_of_wrong_axis"),
]
