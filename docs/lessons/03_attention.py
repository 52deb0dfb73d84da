# %% [markdown]
# # 3. Attention
#
# **Needs:** [embeddings and positions](02_embeddings_and_positions.py). **Gives:** heads, which all later lessons open.
#
# Attention replaces every vector by a weighted mean of all vectors. The weights say where a token looks, and each row of them sums to one.

# %%
import math

import shared
import torch
from torch import nn
from torch.nn import functional as F

import clearhead as ch

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## Softmax
#
# A softmax makes weights from scores. It is not an argmax: the largest score gets the most, seldom all.
#
# $$ \mathrm{softmax}(s)_j = \frac{e^{s_j - \max s}}{\sum_k e^{s_k - \max s}} $$

# %%
scores = torch.tensor([2.0, 4.0, 5.0])
by_hand = (scores - scores.max()).exp() / (scores - scores.max()).exp().sum()
print(by_hand)
assert torch.allclose(by_hand, torch.tensor([0.0351, 0.2595, 0.7054]), atol=5e-5)
assert torch.allclose(by_hand, scores.softmax(-1))

# %% [markdown]
# ## Bare attention
#
# Nothing is learned yet: a token looks where vectors are like its own.
#
# $$ w = \mathrm{softmax}(x x^T), \qquad y = w x $$

# %%
x = torch.randn(34, 20, 10)
weights = (x @ x.transpose(1, 2)).softmax(-1)
y = weights @ x
print(weights.shape, y.shape)
assert torch.allclose(weights.sum(-1), torch.ones(34, 20))

# %% [markdown]
# It knows no order: permute the tokens, and the outputs are permuted alike. This is why lesson 2 added positions.

# %%
order = torch.randperm(20)
permuted = x[:, order]
assert torch.allclose((permuted @ permuted.transpose(1, 2)).softmax(-1) @ permuted, y[:, order], atol=1e-5)

# %% [markdown]
# ## Query, key and value
#
# What a token asks, what it answers to, and what it hands over become three vectors. The root of the key's size keeps scores in a range in which the softmax still learns.
#
# $$ \mathrm{attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d_k}}\right) V $$

# %%
query = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
key = torch.tensor([[1.0, 2.0, 1.0], [2.0, 1.0, 0.0]])
value = torch.tensor([[0.5, 0.8], [0.2, 0.3]])
products = query @ key.T
weights = (products / math.sqrt(3)).softmax(-1)
print(products, weights, weights @ value, sep="\n")
assert torch.equal(products, torch.tensor([[2.0, 2.0], [3.0, 1.0]]))
assert torch.allclose(weights, torch.tensor([[0.5, 0.5], [0.7604, 0.2396]]), atol=5e-5)
assert torch.allclose(weights @ value, torch.tensor([[0.35, 0.55], [0.4281, 0.6802]]), atol=5e-5)

# %% [markdown]
# The core's own lines: scores, weights, and how the heads are split and merged.

# %%
for name in ("Attention.scores", "Attention.split", "Attention.merge"):
    shared.core_lines("clearhead.core.attention", name)

# %% [markdown]
# ## Heads
#
# One softmax can look in one way. Heads look in several ways at once: the width is cut into h parts of d/h features, each with a softmax of its own.
#
# At width 256, four heads have 64 features each, and the three projections without bias hold 3 · 256² numbers:

# %%
width, heads = 256, 4
projections = [nn.Linear(width, width, bias=False) for _ in range(3)]
numbers = sum(layer.weight.numel() for layer in projections)
print(width // heads, numbers)
assert numbers == 196_608

# %% [markdown]
# ## A loop, a batch, a fused kernel
#
# You may loop over heads, put them on an axis of one product, or call the fused kernel. All three give the same numbers.

# %%
q, k, v = (layer(torch.randn(3, 7, width)) for layer in projections)
size = width // heads


def split(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (heads, size)).transpose(1, 2)  # [batch, heads, tokens, size]


def one_head(h: int) -> torch.Tensor:
    of_head = slice(h * size, (h + 1) * size)
    scores = q[..., of_head] @ k[..., of_head].transpose(1, 2) / math.sqrt(size)
    return scores.softmax(-1) @ v[..., of_head]


loop = torch.cat([one_head(h) for h in range(heads)], dim=-1)
batched = ((split(q) @ split(k).transpose(-1, -2) / math.sqrt(size)).softmax(-1) @ split(v)).transpose(1, 2).flatten(2)
fused = F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
print((loop - batched).abs().max(), (loop - fused).abs().max())
assert torch.allclose(loop, batched, atol=1e-5) and torch.allclose(loop, fused, atol=1e-5)

# %% [markdown]
# ## The heads of your model
#
# Here are the heads of the translator of dates. Choose one, and touch a token: the cross-attention walks along the date as the answer is written.

# %%
model = shared.dates_model()
maps = model.attention("Montag, 5. Januar 1998", "1998-01-05")
print(maps.weights("decoder.memory", layer=1, head=0).shape)
maps

# %% [markdown]
# ## Break it: batch items mixed
#
# Stack the heads in front, `[heads, batch, tokens, size]`, and merge with `permute(0, 2, 1, 3)`: the shape fits after a reshape, and no error is raised.
#
# - **Symptom:** results change with what else is in the batch.
# - **Detector:** change item 1 alone and look at item 0; `ch.check.attention` names it.
# - **Mend:** `permute(1, 2, 0, 3).reshape(batch, tokens, width)`.

# %%
BROKEN = True


class Mine(nn.Module):
    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            torch.stack(layer(query).split(self.size, dim=-1)) for layer in (self.query, self.key, self.value)
        )  # [heads, batch, tokens, size]
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(self.size)).softmax(-1) @ v
        axes = (0, 2, 1, 3) if BROKEN else (1, 2, 0, 3)
        return self.out(mixed.permute(axes).reshape(query.shape))


mine, batch = Mine(), torch.randn(2, 5, 12)
changed = batch.clone()
changed[1] += 1
moved = (mine(batch)[0] - mine(changed)[0]).abs().max().item()
print("item 0 moved by", moved)
assert (moved > 1e-4) is BROKEN
report = ch.check.attention(mine, width=12, heads=2)
print(report)
assert report.ok is not BROKEN

# %% [markdown]
# Two relatives of this slip raise no error either. `split(num_heads)` cuts chunks *of* that size, right only where the width is the square of the number of heads; and `q[:, t:t+c]` cuts time, not features.

# %%
x = torch.randn(3, 5, 12)
print("chunks of split(2):", len(x.split(2, dim=-1)), " of chunk(2):", len(x.chunk(2, dim=-1)))
print("cut time:", tuple(x[:, 0:3].shape), " cut features:", tuple(x[..., 0:3].shape))
four = torch.arange(1, 17).view(4, 4)
print(torch.stack(four.chunk(2, dim=-1)))
assert len(x.split(2, dim=-1)) == 6 and torch.stack(four.chunk(2, dim=-1))[0].tolist() == [
    [1, 2],
    [5, 6],
    [9, 10],
    [13, 14],
]

# %% [markdown]
# ## Exercise 1 (20 minutes, medium): one attention
#
# Compute the mixed values of queries, keys and values `[batch, heads, tokens, size]`. Raise `hint` to 2 and 3 if you are stuck.


# %%
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def check_attend(answer) -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).double()
    got, right = answer(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert got.shape == right.shape, (
        f"expected the shape of the queries {tuple(right.shape)}; you have {tuple(got.shape)}"
    )
    unscaled = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    assert not torch.allclose(got, unscaled), "the scores are not divided by the root of the size of a head"
    over_queries = (q @ k.transpose(-1, -2) / 2).softmax(-2) @ v
    assert not torch.allclose(got, over_queries), "the softmax runs over queries: each query's weights must sum to one"
    assert torch.allclose(got, right), "softmax(q kᵀ / √size) v is something else: compare one row by hand"


shared.exercise(lambda: check_attend(attend))


# %% tags=["hide-cell"]
shared.solved(lambda: check_attend(lambda q, k, v: (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v))
shared.wrong(lambda: check_attend(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v), "root of the size")

# %% [markdown]
# ## Exercise 2 (15 minutes, medium): merge the heads
#
# Write the axes for `permute` that bring `[heads, batch, tokens, size]` into the order in which a reshape to `[batch, tokens, width]` keeps every token together.


# %%
def axes() -> tuple[int, int, int, int]:
    raise NotImplementedError


def check_axes(answer) -> None:
    stacked = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4)
    merged = stacked.permute(answer()).reshape(3, 5, 8)
    right = torch.cat([*stacked], dim=-1)
    assert merged[0].unique().tolist() == right[0].unique().tolist(), "item 0 holds numbers of other items of the batch"
    assert torch.equal(merged, right), (
        "the items are apart, but the features of a token are not those of its heads in order"
    )


shared.exercise(lambda: check_axes(axes))


# %% tags=["hide-cell"]
shared.solved(lambda: check_axes(lambda: (1, 2, 0, 3)))
shared.wrong(lambda: check_axes(lambda: (0, 2, 1, 3)), "other items of the batch")
