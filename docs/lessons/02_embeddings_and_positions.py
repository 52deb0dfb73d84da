# %% [markdown]
# # 2. Embeddings and positions
#
# **Needs:** [tokens](01_tokens.py). **Gives:** the vectors that attention mixes.
#
# An embedding is a table with one row for each id. To embed is to look up.
#
# $$ x_t = E[i_t] \cdot s + P[t] $$

# %%

import shared
import torch
from matplotlib import pyplot as plt

import clearhead as ch

table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [1.0, 1.1, 1.2], [1.3, 1.4, 1.5]])
print(table[2], len(table[2]))

# %% [markdown]
# A look-up equals a product with a one-hot row, which is why its gradient reaches only the rows that you read.

# %%
one_hot = torch.eye(5)[2]
assert torch.equal(one_hot @ table, table[2])

# %% [markdown]
# The model that you have just trained has such a table. Its rows, for the characters of a date, are these numbers:

# %%
model = shared.dates_model()
with model.capture("encoder.embedded") as seen:
    model.attention("5. Januar 1998", "1998-01-05")
embedded = seen.tensor("encoder.embedded")
print(embedded.shape, embedded[0, :3, :5], sep="\n")

# %% [markdown]
# ## Positions
#
# Attention sees a set: it does not know which token came first. The original Transformer adds a table of sines and cosines.
#
# $$ P[p, 2i] = \sin\frac{p}{10000^{2i/d}}, \qquad P[p, 2i + 1] = \cos\frac{p}{10000^{2i/d}} $$
#
# For a width of six there are three denominators:

# %%
width = 6
denominators = 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
print(denominators)
assert torch.allclose(denominators, torch.tensor([1.0, 21.5443, 464.1589], dtype=torch.float64), atol=1e-3)


# %%
def sinusoidal(length: int, width: int) -> torch.Tensor:
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, width, 2) / width).double()
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


positions = sinusoidal(10, 6)
torch.set_printoptions(precision=4, sci_mode=False)
print(positions)
for row, numbers in {
    1: [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000],
    2: [0.9093, -0.4161, 0.0927, 0.9957, 0.0043, 1.0000],
    5: [-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999],
    9: [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
}.items():
    assert torch.allclose(positions[row], torch.tensor(numbers), atol=6e-5)
print(ch.check.positions(sinusoidal))

# %% [markdown]
# The core computes the same. These are its own lines, which you find behind the spec node `Sinusoidal`:

# %%
shared.core_lines("clearhead.kernels.positions", "sinusoidal_table")

# %% [markdown]
# As a picture: the left columns turn fast and tell neighbours apart, the right ones turn slowly and tell the beginning from the end.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
axes.imshow(sinusoidal(60, 64), aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
axes.set(xlabel="component", ylabel="position", title="sinusoidal positions")
figure.tight_layout()

# %% [markdown]
# Others add a learned table (BERT, GPT-2), or turn queries and keys inside the attention (rotary). The model of this lesson is one of these:

# %%
print(model.spec)

# %% [markdown]
# ## Break it: the doubled exponent
#
# A loop that steps `i` by two and multiplies by two again is a famous slip. Position 2 at width 300 should read `.90930 -.41615 .95231 -.30515`; the slip gives `.98045 -.19678` where `.95231 -.30515` belongs.
#
# - **Symptom:** it trains, a little worse: most columns hardly turn at all.
# - **Detector:** `ch.check.positions`.
# - **Mend:** one formula; `arange(0, d, 2)` is 2i already.

# %%
BROKEN = True


def loop(length: int, width: int) -> torch.Tensor:
    exponent = torch.arange(0, width, 2).double() * (2 if BROKEN else 1) / width
    angle = torch.arange(length).double()[:, None] / 10000**exponent
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


print(loop(3, 300)[2, :4], sinusoidal(3, 300)[2, :4], sep="\n")
right = [0.90930, -0.41615, 0.95231, -0.30515, 0.98045, -0.19678, 0.99570, -0.09260, 0.99998, 0.00634]
of_pairs = sinusoidal(3, 300)[2].view(-1, 2)
assert torch.allclose(of_pairs[:2].flatten(), torch.tensor(right[:4]), atol=1e-5)
assert torch.allclose(sinusoidal(3, 4)[2], torch.tensor([0.9093, -0.4161, 0.0200, 0.9998]), atol=6e-5)
report = ch.check.positions(loop)
print(report)
assert report.ok is not BROKEN

# %% [markdown]
# ## Break it, too: a whole table
#
# A forward that adds the whole table fails at length 7, and at length 1 it silently gives ten positions. Slice by the length.

# %%
whole = sinusoidal(10, 6)
x = torch.zeros(1, 1, 6)
print("one token became", (x + whole).shape[1], "; sliced:", (x + whole[: x.shape[1]]).shape[1])
assert (x + whole).shape[1] == 10

# %% [markdown]
# ## Exercise 1 (15 minutes, medium): the table
#
# Write the table yourself, from the formula. Raise `hint` to 2 and 3 if you are stuck.


# %%
def my_positions(length: int, width: int) -> torch.Tensor:
    raise NotImplementedError


shared.exercise(lambda: ch.check.positions(my_positions), hint=1)


# %% tags=["hide-cell"]
shared.solved(lambda: ch.check.positions(sinusoidal))
BROKEN = True
shared.wrong(lambda: ch.check.positions(loop), "position")

# %% [markdown]
# ## Exercise 2 (5 minutes, easy): count
#
# How many numbers does a table for a million ids at width 300 hold? And how many bytes in fp32?


# %%
def numbers_and_bytes() -> tuple[int, int]:
    raise NotImplementedError


def check_count(answer) -> None:
    numbers, size = answer()
    assert numbers == 300_000_000, f"one number for each id and component: 1,000,000 x 300; you have {numbers:,}"
    assert size == 4 * numbers, f"a float32 takes 4 bytes: 32 bits, not {8 * size // max(numbers, 1)}"


shared.exercise(lambda: check_count(numbers_and_bytes))


# %% tags=["hide-cell"]
shared.solved(lambda: check_count(lambda: (300_000_000, 1_200_000_000)))
shared.wrong(lambda: check_count(lambda: (300_000_000, 2_400_000_000)), "4 bytes")
