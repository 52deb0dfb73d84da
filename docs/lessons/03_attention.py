# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · Attention
#
# You need matrix products and softmax. After this lesson you can write multi-head attention and prove that it is right. You also know one mistake that raises no error.
#
# Each token asks a question. Every other token holds an answer and a label that says what the answer is about. Attention compares the question with all labels. It mixes the answers, weighted by how well their labels fit.

# %%
import inspect

import torch
from shared import attempt

import clearhead as ch
from clearhead.core import Attention

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## Attention without weights
#
# Start with the simplest case: the vector of a token is its question, its label and its answer. Then attention is two matrix products with a softmax between them:
#
# $$W = \operatorname{softmax}(X X^\top), \qquad Y = W X.$$
#
# The code uses a batch of 34 sequences. Each has 20 tokens of 10 numbers:

# %%
x = torch.randn(34, 20, 10)
weights = (x @ x.transpose(1, 2)).softmax(-1)
y = weights @ x
print("weights", tuple(weights.shape), " output", tuple(y.shape))
print("each row sums to one:", bool(torch.allclose(weights.sum(-1), torch.ones(34, 20))))

# %% [markdown]
# This function does not know the position of a token. If you shuffle the tokens, the outputs are shuffled in the same way: $f(PX) = P f(X)$. That is why [lesson 2](02_embeddings_and_positions.py) adds positions.

# %%
order = torch.randperm(20)
shuffled = x[:, order]
again = (shuffled @ shuffled.transpose(1, 2)).softmax(-1) @ shuffled
print("largest difference:", float((again - y[:, order]).abs().max()))

# %% [markdown]
# ## Query, key, value
#
# Now multiply each vector by three matrices. They give the query (the question), the key (the label) and the value (the answer). The whole formula is:
#
# $$\operatorname{attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V.$$
#
# This example is small enough for a pencil: two queries, two keys of three numbers, two values.

# %%
Q = torch.tensor([[1.0, 0, 1], [0, 1, 1]])
K = torch.tensor([[1.0, 2, 1], [2, 1, 0]])
V = torch.tensor([[0.5, 0.8], [0.2, 0.3]])
scores = Q @ K.T
by_hand = (scores / 3**0.5).softmax(-1)
print("QKᵀ", scores.tolist())
print("weights", by_hand)
print("output", by_hand @ V)
torch.testing.assert_close(by_hand @ V, torch.tensor([[0.35, 0.55], [0.4281, 0.6802]]), atol=5e-5, rtol=0)

# %% [markdown]
# The first query fits both keys equally well (scores 2 and 2), so its weights are ½ and ½. The second query fits the first key better (3 against 1), so its weights are 0.7604 and 0.2396.
#
# Why divide by $\sqrt{d}$? A score is a sum of $d$ products. The longer the sum, the wider the scores spread. The softmax of widely spread scores puts nearly all weight on a single key. Then almost no gradient flows back through the softmax.

# %%
for size in (4, 64, 1024):
    q, k = torch.randn(1000, size), torch.randn(1000, size)
    raw = (q * k).sum(-1)
    print(f"d = {size:5}  spread of the scores {raw.std():6.2f}   divided by √d {(raw / size**0.5).std():.2f}")

# %% [markdown]
# Now compute the softmax of the scores 2, 4 and 5. Subtract the largest score first: the result does not change, and the powers do not overflow:

# %%
softmax = torch.tensor([2.0, 4, 5]).softmax(-1)
print(softmax)
torch.testing.assert_close(softmax, torch.tensor([0.0351, 0.2595, 0.7054]), atol=5e-5, rtol=0)
shifted = torch.tensor([2.0, 4, 5]) - 5
print(shifted.exp() / shifted.exp().sum())

# %% [markdown]
# ## Heads
#
# One softmax can express only one relation between tokens. So the width is divided among several heads. Each head reads a slice of $d = \text{width} / \text{heads}$ numbers and attends separately. The results of the heads are concatenated. Here a 4 × 4 matrix of the numbers 1 to 16 is split into two heads:

# %%
matrix = torch.arange(1, 17).view(1, 4, 4)
print(matrix.unflatten(-1, (2, 2)).transpose(1, 2)[0].tolist())

# %% [markdown]
# Two mistakes are common here, and neither raises an error. First, `split(heads)` makes pieces of `heads` features each, not `heads` pieces. The matrix above hides this mistake, because 4 is 2 times 2.
#
# Second, one linear map can compute query, key and value together, $x \mapsto [q \mid k \mid v]$. GPT-2 splits the output of this map first into query, key and value, GPT-NeoX first into heads. Weights of one layout are noise in the other.

# %%
print("width 12, split(2):", len(torch.randn(12).split(2)), "heads of", len(torch.randn(12).split(2)[0]))
print("width 12, chunk(2):", len(torch.randn(12).chunk(2)), "heads of", len(torch.randn(12).chunk(2)[0]))
joint = torch.randn(4, 10, 18).unflatten(-1, (2, 9)).transpose(1, 2)
print("by head: ", tuple(joint.shape), "->", [tuple(piece.shape) for piece in joint.chunk(3, -1)])

# %% [markdown]
# You can compute the heads in three ways: a loop over heads, one batch that contains all heads, or PyTorch's fused kernel. All three must agree, and clearhead's tests check that they do.

# %%
width, heads = 12, 3
q, k, v = (torch.randn(2, 5, width, dtype=torch.float64) for _ in range(3))


def attend_by_loop(q, k, v):
    pieces = []
    for query, key, value in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1)):
        pieces.append((query @ key.transpose(1, 2) / (width // heads) ** 0.5).softmax(-1) @ value)
    return torch.cat(pieces, -1)


def attend_folded(q, k, v):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


def attend_fused(q, k, v):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


print("loop = folded:", float((attend_by_loop(q, k, v) - attend_folded(q, k, v)).abs().max()))
print("loop = fused: ", float((attend_by_loop(q, k, v) - attend_fused(q, k, v)).abs().max()))

# %% [markdown]
# Every model of clearhead, of any family, computes attention with the lines below. You have just written `scores`, `weights` and the last two lines of `attend`. The other lines handle masks, biases, the fused kernel and hook points:

# %%
print(inspect.getsource(Attention.attend))
print(inspect.getsource(Attention.weights))
print(inspect.getsource(Attention.scores))

# %% [markdown]
# In `scores` the scale is a Python number. If it were a tensor in single precision, it would silently convert scores in half precision to single precision. It would also stay on the CPU when the model moves to a GPU:

# %%
half = torch.ones(2, 2, dtype=torch.float16)
print("by a tensor:", (half / torch.sqrt(torch.FloatTensor([64]))).dtype, "  by a number:", (half / 64**0.5).dtype)

# %% [markdown]
# With its projections, attention has $4 w^2 + w$ weights for a width $w$, if only the output projection has a bias. Here the width is 256, in four heads of 64:

# %%
module = ch.MultiHeadAttention(256, 4, bias=False)
print(
    f"{sum(p.numel() for p in module.parameters()) + 256:,} with the output's bias; queries, keys and values alone {3 * 256 * 256:,}"
)
assert (sum(p.numel() for p in module.parameters()) + 256, 3 * 256 * 256) == (262_400, 196_608)

# %% [markdown]
# Queries and keys may come from different sequences. Here three tokens attend to a memory of five tokens. The number of heads must divide the width:

# %%
with torch.no_grad():
    out, weights = ch.MultiHeadAttention(300, 4)(torch.randn(1, 3, 300), torch.randn(1, 5, 300), return_weights=True)
print("output", tuple(out.shape), " weights", tuple(weights.shape), " numbers of a head:", 300 // 4)
try:
    ch.MultiHeadAttention(300, 7)
except ValueError as error:
    print(error)

# %% [markdown]
# ## See it
#
# You can view attention weights of any library. Pass an array `[layers, heads, queries, keys]` and the tokens:

# %%
sentence = "Mary gave roses to Susan".split()
reference = ch.MultiHeadAttention(16, 4)
with torch.no_grad():
    _, shown = reference(torch.randn(1, 5, 16), return_weights=True)
ch.view_attention(shown.numpy(), sentence)

# %% [markdown]
# These weights are random, so the picture shows no relation yet. The same page shows [every head of a model that you trained](../guides/view.md).
#
# ## Break it
#
# **The switch.** Put the head axis in front of the batch axis, `[heads, batch, tokens, d]`. Then merge the heads with the permutation that belongs to `[batch, heads, tokens, d]`. The shapes fit, and no line fails.


# %%
class Mixed(torch.nn.Module):
    broken = True

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (torch.stack(linear(x).chunk(self.heads, -1)) for linear in (self.query, self.key, self.value))
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        order = (0, 2, 1, 3) if self.broken else (1, 2, 0, 3)
        return self.out(mixed.permute(*order).reshape(x.shape))


mixed = Mixed()
pair = torch.randn(2, 4, 12)
changed = pair.clone()
changed[1] += 1

# %% [markdown]
# **The symptom.** Change only the second sentence of the batch, and look at the output of the first:

# %%
with torch.no_grad():
    print("the first sentence's output moves by", float((mixed(changed)[0] - mixed(pair)[0]).abs().max()))

# %% [markdown]
# The output of one sentence depends on the other sentences of its batch. The training loss still falls, so the loss curve does not show this mistake.
#
# **The detector.**

# %%
print(ch.check.attention(mixed, width=12, heads=3))

# %% [markdown]
# **The fix.**

# %%
Mixed.broken = False
print(ch.check.attention(mixed, width=12, heads=3).verdict)

# %% [markdown]
# ## Exercises
#
# **1 · Your own attention (15 minutes, medium).** Write `forward`. Its input has the shape `[batch, tokens, width]`. The check tells you where your result differs. `hint=2` adds the line of mathematics, and `hint=3` adds the fix.


# %% tags=["exercise"]
class MyAttention(torch.nn.Module):
    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        raise NotImplementedError


attempt(lambda: ch.check.attention(MyAttention(), width=12, heads=3), hint=1)


# %% tags=["hide-cell", "solution"]
class Solved(MyAttention):
    def forward(self, x):
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


assert ch.check.attention(Solved(), width=12, heads=3).ok

# %% [markdown]
# **2 · Features, not time (5 minutes, easy).** `q` has the shape `[batch, tokens, width]`. Somebody takes one head out of `q` with `q[:, 4:8]`. What does this slice contain, and what is right? Set `mine` to the right slice for head 1 of three.

# %% tags=["exercise"]
q = torch.arange(2 * 20 * 12).view(2, 20, 12)
mine = None


def check_slice(mine):
    if mine is None:
        raise NotImplementedError
    assert mine.shape != (2, 4, 12), "that is four tokens with all their features: the second axis is time"
    assert mine.shape == (2, 20, 4), f"a head has all 20 tokens and 12 / 3 = 4 features; yours is {tuple(mine.shape)}"
    assert torch.equal(mine, q.chunk(3, -1)[1]), "four features, but not those of head 1: it begins at feature 4"
    return "right"


attempt(lambda: check_slice(mine))

# %% tags=["hide-cell", "solution"]
assert check_slice(q[..., 4:8]) == "right"

# %% [markdown]
# **3 · Twelve tokens (2 minutes, easy).** How many attention weights does one head compute for 12 tokens, and for 24?

# %% tags=["exercise"]
for_12, for_24 = None, None


def check_cost(for_12, for_24):
    if for_12 is None:
        raise NotImplementedError
    assert for_12 == 144, f"every one of 12 tokens looks at every one of 12; that is not {for_12}"
    assert for_24 == 4 * for_12, f"twice as many tokens look at twice as many; that is not {for_24}"
    return "right: the cost grows with the square of the length"


attempt(lambda: check_cost(for_12, for_24))

# %% tags=["hide-cell", "solution"]
print(check_cost(12**2, 24**2))
