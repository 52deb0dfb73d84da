"""Attention with one mistake each: masks, cross-attention and dropout."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.apps.check.planted.entry import Planted, read_fused, separate


class Cross(nn.Module):
    """Projections of a query, a key and a value into heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))

    def project(self, q, k, v):
        q, k, v = self.to_q(q), self.to_k(k), self.to_v(v)
        return (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))

    def scores(self, q, k):
        return q @ k.transpose(-1, -2) / math.sqrt(self.size)

    def finish(self, w, v):
        return self.to_out((w @ v).transpose(1, 2).flatten(2))


class Ignored(Cross):
    """The mask is taken and never used."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, k).softmax(-1), v)


class IgnoredResult(Cross):
    """masked_fill is out of place and its result is thrown away."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        s = self.scores(q, k)
        if mask is not None:
            s.masked_fill(mask == 0, -1e9)
        return self.finish(F.softmax(s, dim=-1), v)


class Polarity(Cross):
    """True means attend, and is filled with minus infinity."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, k).masked_fill(mask, -1e9).softmax(-1), v)


class PolarityOfFunction(Cross):
    """True means block, but scaled_dot_product_attention, which gets the mask, takes True as attend."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        return self.to_out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class AddedBoolean(Cross):
    """A boolean mask is added to the scores as 1 and 0."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        return self.finish((self.scores(q, k) + mask).softmax(-1), v)


class MultipliedScores(Cross):
    """The scores are multiplied by the mask before the softmax: a blocked score is zero and still counts."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        return self.finish((self.scores(q, k) * mask).softmax(-1), v)


class AfterSoftmax(Cross):
    """The weights are masked after the softmax: rows no longer sum to one."""

    def forward(self, q, k, v, mask=None):
        q, k, v = self.project(q, k, v)
        w = self.scores(q, k).softmax(-1).masked_fill(mask == 0, 0.0)
        return self.finish(w, v), w


class InfinityAfterSoftmax(Cross):
    """Minus 1e9 is added after the softmax."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, k).softmax(-1) + (1 - mask) * -1e9, v)


class UniformRows(Cross):
    """-1e9 makes a row that attends to nothing uniform over the padding and the future."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        return self.finish((self.scores(q, k) + torch.where(mask, 0.0, -1e9)).softmax(-1), v)


class NanRows(Cross):
    """Minus infinity makes a row that attends to nothing NaN."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1), v)


class CombinedByMax(Cross):
    """A look-ahead mask of True = keep and a padding mask of 1 = pad, joined by max and blocked."""

    def forward(self, x, mask):
        t = x.size(1)
        q, k, v = self.project(x, x, x)
        blocked = torch.max(mask.logical_not(), torch.tril(torch.ones(t, t, dtype=torch.bool)))
        return self.finish(self.scores(q, k).masked_fill(blocked, -1e9).softmax(-1), v)


class SmallFill(Cross):
    """1e-9 where -1e9 is meant."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, k).masked_fill(mask == 0, 1e-9).softmax(-1), v)


class Swapped(Cross):
    """The queries are made from the memory and the keys from the decoder."""

    def forward(self, q, k, v):
        q, k, v = self.project(k, q, v)
        return self.finish(self.scores(q, k).softmax(-1), v)


class KeyIsValue(Cross):
    """The key's layer makes the values and the value's layer makes the keys."""

    def forward(self, q, k, v):
        q, k, v = self.project(q, k, v)
        return self.finish(self.scores(q, v).softmax(-1), k)


class Dropout(Cross):
    """F.dropout has training=True by default and so runs in evaluation."""

    def forward(self, x):
        q, k, v = self.project(x, x, x)
        return self.finish(F.dropout(self.scores(q, k).softmax(-1), 0.1), v)


class DropoutOfFunction(Cross):
    """dropout_p of scaled_dot_product_attention also applies in evaluation."""

    def forward(self, x):
        q, k, v = self.project(x, x, x)
        return self.to_out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2))


class Future(nn.Module):
    """triu(diagonal=2): one future token is visible."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.diagonal = heads, 2
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        block = torch.triu(torch.ones(T, T), self.diagonal) == 1
        w = (q @ k.mT / math.sqrt(C // self.heads)).masked_fill(block, -1e9).softmax(-1)
        return self.c_proj((w @ v).transpose(1, 2).reshape(B, T, C))


class NoDiagonal(Future):
    """triu(diagonal=0): a token does not see itself."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.diagonal = 0


class UpperTriangle(nn.Module):
    """triu where tril is meant: only the future is visible."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T).triu().bool())
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class CallersMask(Cross):
    """mask *= -1e9 changes the caller's mask."""

    def forward(self, q, k, v, mask):
        q, k, v = self.project(q, k, v)
        mask -= 1
        mask *= 1e9
        return self.finish((self.scores(q, k) + mask).softmax(-1), v)


class MaskOfQueries(Cross):
    """The mask is transposed: it says which queries a key may be seen by."""

    def forward(self, x, mask):
        q, k, v = self.project(x, x, x)
        return self.finish(self.scores(q, k).masked_fill(~mask.transpose(-1, -2), -1e9).softmax(-1), v)


CROSS = separate("to_q", "to_k", "to_v", "to_out")
FUSED = read_fused("c_attn", "c_proj")
QKV = "q k v mask"
WRONG: list[Planted] = [
    Planted("ignored", Ignored, "mask_ignored", QKV, "attend", CROSS),
    Planted("ignored_result", IgnoredResult, "mask_ignored", QKV, "ones", CROSS),
    Planted("polarity", Polarity, "mask_polarity", QKV, "attend", CROSS),
    Planted("polarity_of_function", PolarityOfFunction, "mask_polarity", QKV, "block", CROSS),
    Planted("added_boolean", AddedBoolean, "mask_added_where_boolean", QKV, "attend", CROSS),
    Planted("multiplied_scores", MultipliedScores, "mask_multiplied_before_softmax", QKV, "ones", CROSS),
    Planted("after_softmax", AfterSoftmax, "mask_after_softmax", QKV, "attend", CROSS),
    Planted("infinity_after_softmax", InfinityAfterSoftmax, "mask_after_softmax", QKV, "ones", CROSS),
    Planted("uniform_rows", UniformRows, "masked_rows_uniform", QKV, "attend", CROSS, shows="empty_row"),
    Planted("nan_rows", NanRows, "masked_rows_nan", QKV, "attend", CROSS, shows="empty_row"),
    Planted("combined_by_max", CombinedByMax, "masks_combined_by_max", "x mask", "causal attend", CROSS),
    Planted("small_fill", SmallFill, "mask_value_too_small", QKV, "ones", CROSS),
    Planted("swapped", Swapped, "query_and_key_swapped", "q k v", "none", CROSS),
    Planted("key_is_value", KeyIsValue, "key_and_value_swapped", "q k v", "none", CROSS),
    Planted("dropout", Dropout, "dropout_in_evaluation", "x", "none", CROSS),
    Planted("dropout_of_function", DropoutOfFunction, "dropout_in_evaluation", "x", "none", CROSS),
    Planted("future", Future, "causal_future_visible", "x", "causal", FUSED),
    Planted("no_diagonal", NoDiagonal, "causal_diagonal_blocked", "x", "causal", FUSED),
    Planted("upper_triangle", UpperTriangle, "mask_polarity", "x", "causal", FUSED),
    Planted("callers_mask", CallersMask, "mask_changed_in_place", QKV, "float ones", CROSS, shows="caller"),
    Planted("mask_transposed", MaskOfQueries, "mask_transposed", "x mask", "attend", CROSS),
]
