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
# # 2 · Embeddings and positions
#
# You need to know what a token is. After this lesson you can explain an embedding table and compute the table of positions with a pencil. You can also find the bug that tutorials copy most often.
#
# A model computes with vectors of numbers. The id of a token is the number of a row in a table. The **embedding** of the token is that row.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from shared import attempt

import clearhead as ch
from clearhead import spec
from clearhead.core.embedding import Embedding
from clearhead.core.kernels.positions import sinusoidal_table

torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## A row of a table
#
# The table has five tokens with three numbers each. Looking up token 2 takes row 2. A one-hot vector times the table gives the same result, but needs five times the work.

# %%
table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [1.0, 1.1, 1.2], [1.3, 1.4, 1.5]])
print("token 2:", table[2], "of length", len(table[2]))
print("one-hot:", torch.eye(5)[2] @ table)

# %% [markdown]
# A table of a million words with 300 numbers each has 300,000,000 parameters. That is why real models cut words into pieces and keep a vocabulary of some ten thousand.

# %%
print(f"{1_000_000 * 300:,} parameters for words, {30_000 * 300:,} for pieces")
print("three ids of a table of width 300:", tuple(torch.nn.Embedding(1000, 300)(torch.tensor([[1, 2, 3]])).shape))

# %% [markdown]
# The paper multiplies the row by $\sqrt{d}$. Otherwise the positions, with values up to one, would dominate the embedding. In clearhead this scale is a field of the spec, `Embedding.scale`. The core computes it in these lines:

# %%
print(inspect.getsource(Embedding.forward))

# %% [markdown]
# ## The position of a token
#
# Attention does not know the order of its inputs. So each position has a vector, which is added to the embedding. The paper uses waves of different lengths:
#
# $$\mathrm{PE}_{p,2i} = \sin\!\left(\frac{p}{10000^{2i/d}}\right), \qquad \mathrm{PE}_{p,2i+1} = \cos\!\left(\frac{p}{10000^{2i/d}}\right).$$
#
# Compute it step by step for $d = 6$. The even columns are 0, 2 and 4. Each has its denominator $10000^{2i/d}$.

# %%
even = torch.arange(0, 6, 2, dtype=torch.float64)
denominators = 10000 ** (even / 6)
print("columns", even.tolist(), "denominators", [round(float(x), 4) for x in denominators])
angles = torch.arange(10)[:, None] / denominators
steps = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).float()
for position in (1, 2, 5, 9):
    print(f"position {position}:", steps[position])
fifth = [-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999]
torch.testing.assert_close(steps[5], torch.tensor(fifth), atol=5e-5, rtol=0)

# %% [markdown]
# The sine and cosine of a pair of columns share one wave. Together they are like the hand of a clock that turns once in $2\pi \cdot 10000^{2i/d}$ tokens. The first clock turns once in about six tokens, the last in tens of thousands. The core computes the same table:


# %%
def paper(length, width):
    return sinusoidal_table(length, width, spec.Sinusoidal())


print("largest difference:", float((paper(10, 6) - steps).abs().max()))
print(inspect.getsource(sinusoidal_table))

# %% [markdown]
# Here is position 2 for two other widths, for comparison with other tables. The first line has all numbers for $d = 4$, the second line the first ten numbers for $d = 300$.

# %%
print([round(float(x), 4) for x in paper(3, 4)[2]])
first_ten = [round(float(x), 5) for x in paper(3, 300)[2, :10]]
print(first_ten)
assert first_ten == [0.9093, -0.41615, 0.95231, -0.30515, 0.98045, -0.19678, 0.9957, -0.0926, 0.99998, 0.00634]

# %% [markdown]
# In the picture each row is a position and each column a feature. Fast waves are on the left.

# %%
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
picture = axis.imshow(paper(80, 64), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
axis.set(xlabel="feature", ylabel="position", title="Sinusoidal positions, width 64")
figure.colorbar(picture, ax=axis)
plt.show()

# %% [markdown]
# Why are the waves useful? The table at $p + k$ is a rotation of the table at $p$, and the rotation depends only on $k$. So a single matrix can mean "three tokens back" at every position. The dot products of the rows show this, because they depend only on the distance:

# %%
rows = paper(80, 64)
products = rows @ rows.T
print("rows 10 and 13:", float(products[10, 13]), " rows 60 and 63:", float(products[60, 63]))

# %% [markdown]
# ## Learned, rotary, and others
#
# GPT-2 and BERT learn the table of positions instead. Inside the attention, Llama rotates queries and keys by the angles of the same clocks (`spec.Rotary`). T5 adds a number for each distance to the scores (`spec.RelativeBuckets`), and BLOOM subtracts the distance times a slope (`spec.Alibi`). All of them are fields of one spec:

# %%
for position in (spec.Sinusoidal(), spec.Learned(rows=512)):
    print("embedding.position =", position)
print("attention.position =", spec.Rotary())

# %% [markdown]
# ## Break it
#
# **The switch.** Many notebooks loop over `i` in steps of two, so `i` is already $2i$. Then they multiply `i` by two once more.


# %%
def double_exponent(length, width):
    even = torch.arange(0, width, 2)
    angles = torch.arange(length)[:, None] / 10000 ** (2 * even / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


# %% [markdown]
# **The symptom.** There is none: the code runs, the model trains, and the picture shows waves. Only a comparison with the right table shows that the right half of the columns is constant. Their clocks turn once in 63,000 tokens or more, the slowest in 350 million:

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for axis, positions, title in zip(axes, (paper, double_exponent), ("the paper's", "the exponent doubled")):
    axis.imshow(positions(80, 64), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
    axis.set(title=title, xlabel="feature")
axes[0].set_ylabel("position")
plt.show()
print("d = 300, position 2:", [round(float(x), 5) for x in double_exponent(3, 300)[2, :6]])

# %% [markdown]
# **The detector.**

# %%
print(ch.check.positions(double_exponent, width=64))

# %% [markdown]
# **The fix** is the last line of the report: `even / width`, because `even` is $2i$ already.
#
# ## Exercises
#
# **1 · The table (10 minutes, medium).** Return the paper's table, `[length, width]`.


# %% tags=["exercise"]
def my_positions(length, width):
    raise NotImplementedError


attempt(lambda: ch.check.positions(my_positions, width=64), hint=1)


# %% tags=["hide-cell", "solution"]
def positions_solution(length, width):
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


assert ch.check.positions(positions_solution, width=64).ok

# %% [markdown]
# **2 · A text of one token (5 minutes, easy).** A class holds a table of ten positions and computes `x + self.table`. The input `x` has the shape `[batch, 1, width]`. Predict the shape of the result before you run it.

# %% tags=["exercise"]
my_guess = None
result = torch.zeros(4, 1, 6) + paper(10, 6)


def check_guess(guess):
    if guess is None:
        raise NotImplementedError
    assert len(guess) == 3, f"three axes: batch, tokens, width; yours has {len(guess)}"
    assert tuple(guess) != (4, 1, 6), "that is the text before the sum; the table has ten rows"
    assert tuple(guess) == tuple(result.shape), "where one side of a sum has an axis of size 1, it is repeated"
    return "right: one token silently became ten. Slice: x + self.table[: x.shape[1]]"


attempt(lambda: check_guess(my_guess))

# %% tags=["hide-cell", "solution"]
assert check_guess((4, 10, 6)).startswith("right")

# %% [markdown]
# **3 · The period of a clock (5 minutes, hard).** For $d = 64$: after how many tokens does the slowest clock of the paper's table complete a turn? Your answer must be right within one percent.

# %% tags=["exercise"]
period = None
right = 2 * torch.pi * 10000 ** (62 / 64)


def check_period(period):
    if period is None:
        raise NotImplementedError
    assert abs(period * 2 * torch.pi / right - 1) > 0.01, "that is where the angle is 1; a full turn is 2π"
    assert abs(period / right - 1) < 0.01, "a full turn is an angle of 2π; the last pair has 2i = 62"
    return f"right: {right:,.0f} tokens"


attempt(lambda: check_period(period))

# %% tags=["hide-cell", "solution"]
print(f"{right:,.0f} tokens")
