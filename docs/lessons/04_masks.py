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
# # 4 · Masks
#
# You need [lesson 3](03_attention.py). Afterwards you can write the two masks of a Transformer, say what each output may read, and measure what it really reads.
#
# A mask says who may look at whom. It never changes a number of the model; it takes keys out of a softmax. Nearly every silent bug of a Transformer is a mask.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from shared import attempt

import clearhead as ch
from clearhead.core.attention import attention_weights
from clearhead.core.context import Masking

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## One polarity
#
# Tutorials, papers and libraries disagree on what a mask means: 1 may be "keep" or "hide", and minus infinity may be added. Choose once. Here a mask is boolean, and **True means: may attend**.
#
# Where the mask is False, the score becomes minus infinity, and the softmax makes that zero:

# %%
scores = torch.tensor([[2.0, 4.0, 5.0]])
may_attend = torch.tensor([[True, True, False]])
print(scores.masked_fill(~may_attend, float("-inf")).softmax(-1))

# %% [markdown]
# ## Padding
#
# Sentences of a batch have different lengths. Short ones are filled up, and nobody may look at what was filled in. Two sentences, id 0 is padding:

# %%
ids = torch.tensor([[7, 2, 4, 0, 0], [3, 9, 5, 6, 1]])
real = ids != 0
print(real.int())
print("as a mask over keys:", tuple(real[:, None, None].shape), "for [batch, heads, queries, keys]")

# %% [markdown]
# ## The future
#
# A decoder learns to predict the next token at every position at once. So the output at $t$ may read the inputs up to $t$, and nothing behind it. Together with padding of `[1, 2, 3, 4, 0]`:

# %%
target = torch.tensor([[1, 2, 3, 4, 0]])
causal = torch.ones(5, 5, dtype=torch.bool).tril()
both = causal & (target != 0)[:, None]
print("may attend\n", both[0].int())
print("blocked\n", (~both[0]).int())
assert (~both[0]).int().tolist() == [
    [0, 1, 1, 1, 1],
    [0, 0, 1, 1, 1],
    [0, 0, 0, 1, 1],
    [0, 0, 0, 0, 1],
    [0, 0, 0, 0, 1],
]
print("with heads:", tuple(both[:, None].shape))

# %% [markdown]
# Some code adds a mask to the scores instead: zero where it may look, minus infinity where not. That is the same mask:

# %%
additive = torch.full((5, 5), float("-inf")).triu(1)
print(additive)
torch.testing.assert_close((scores := torch.randn(5, 5)) + additive, scores.masked_fill(~causal, float("-inf")))

# %% [markdown]
# Both masks must allow a look: they are joined by **and**. These are the lines of the core. What the attention's spec says (causal, a window, a prefix) comes first, then what comes with each call: padding, documents, a mask of the caller.

# %%
print(inspect.getsource(Masking.build))

# %% [markdown]
# ## Nothing to look at
#
# What if a query may look at nothing, such as a padded row? The softmax of nothing but minus infinity is 0/0. Many notebooks fill in a large negative number instead, and get a row that looks at everything alike, padding and future included:

# %%
nothing = torch.zeros(1, 4, dtype=torch.bool)
row = torch.randn(1, 4)
print("-inf:", row.masked_fill(~nothing, float("-inf")).softmax(-1))
print("-1e9:", row.masked_fill(~nothing, -1e9).softmax(-1))
print("here:", attention_weights(row.masked_fill(~nothing, float("-inf"))[None, None], nothing[None, None])[0, 0])

# %% [markdown]
# Here such a row has weights of zero: it reads nothing, as the mask says.
#
# ## Declared and measured
#
# A mask is a promise. Whether a model keeps it can be measured: change one input, and see which outputs change. Here is a small decoder, and what each output really reads:


# %%
class Decoder(torch.nn.Module):
    diagonal = 0

    def __init__(self, width=16, vocab=50):
        super().__init__()
        self.table, self.places = torch.nn.Embedding(vocab, width), torch.nn.Embedding(64, width)
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.table(ids) + self.places(torch.arange(length))
        hidden = ~torch.ones(length, length, dtype=torch.bool).tril(self.diagonal)
        return self.head(x + self.attention(x, x, x, attn_mask=hidden)[0])


print(ch.check.module(Decoder()))

# %% [markdown]
# Row by row: output 0 reads input 0; output 5 reads all six. That triangle was not declared anywhere: it was found by changing one id after another.

# %%
model = Decoder().double().eval()
text = torch.randint(0, 50, (1, 8))
reads = torch.zeros(8, 8)
with torch.no_grad():
    before = model(text)
    for place in range(8):
        other = text.clone()
        other[0, place] = (other[0, place] + 1) % 50
        reads[:, place] = (model(other) - before).abs().amax(-1)[0]
figure, axis = plt.subplots(figsize=(4, 3.4), layout="constrained")
axis.imshow(reads > 0, cmap="Blues", vmin=0, vmax=1.4)
axis.set(xlabel="input", ylabel="output", title="what reads what")
plt.show()

# %% [markdown]
# ## Break it
#
# **The switch.** One number: `tril(1)` in place of `tril(0)`.

# %%
Decoder.diagonal = 1

# %% [markdown]
# **The symptom.** The model may look at the token that it is to predict. So the loss falls to almost nothing within minutes, which looks like success, and the model generates nonsense: when it writes, there is no next token to copy.

# %%
leaking = Decoder()
optimizer = torch.optim.Adam(leaking.parameters(), 1e-2)
for step in range(301):
    batch = torch.randint(0, 50, (32, 12))
    logits = leaking(batch)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step:3}: loss {float(loss.detach()):.2f} on random tokens, which nobody can predict")

# %% [markdown]
# A loss below $\ln 50 = 3.91$ on random tokens is impossible without looking ahead.
#
# **The detector.**

# %%
print("\n".join(ch.check.module(leaking).lines()))

# %% [markdown]
# **The mend.**

# %%
Decoder.diagonal = 0
print(ch.check.module(Decoder()).verdict)

# %% [markdown]
# ## Exercises
#
# **1 · A window (10 minutes, medium).** Write the mask `[length, length]` of a causal window: each token sees itself and the `before` tokens in front of it.


# %% tags=["exercise"]
def window(length, before):
    raise NotImplementedError


def check_window(window):
    for length, before in ((5, 2), (4, 0), (3, 7)):
        mask = window(length, before)
        assert mask.dtype == torch.bool, f"a mask is boolean; yours is {mask.dtype}"
        assert mask.shape == (length, length), f"expected {(length, length)}, got {tuple(mask.shape)}"
        assert bool(mask.diagonal().all()), "every token sees itself"
        assert not bool(mask.triu(1).any()), "somebody sees the future"
        for query in range(length):
            seen = int(mask[query].sum())
            wanted = min(query, before) + 1
            assert seen == wanted, f"with before={before}, token {query} should see {wanted} tokens; it sees {seen}"
    return "right"


attempt(lambda: check_window(window))


# %% tags=["hide-cell", "solution"]
def solved(length, before):
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ones.triu(-before)


assert check_window(solved) == "right"

# %% [markdown]
# **2 · Which way round? (5 minutes, medium).** Somebody joins a padding mask in which 1 means padding with a causal mask in which True means "may attend", by the larger of the two. What may token 1 of five real tokens look at? Set `seen` to a list of positions, in the convention that 1 is blocked.

# %% tags=["exercise"]
padding_is_1 = torch.zeros(5, dtype=torch.int)
causal_is_keep = torch.ones(5, 5, dtype=torch.int).tril()
blocked = torch.maximum(padding_is_1, causal_is_keep)
seen = None
right = [place for place in range(5) if blocked[1, place] == 0]


def check_seen(seen):
    if seen is None:
        raise NotImplementedError
    assert sorted(seen) == right, f"what is 1 is blocked, and row 1 is {blocked[1].tolist()}; not {seen}"
    return "right: it sees the future, and only the future"


attempt(lambda: check_seen(seen))

# %% tags=["hide-cell", "solution"]
assert check_seen([2, 3, 4]).startswith("right")

# %% [markdown]
# **3 · Your own decoder (10 minutes, medium).** Let `forward` hide the future. The check measures it.


# %% tags=["exercise"]
class MyDecoder(Decoder):
    def forward(self, ids):
        raise NotImplementedError


attempt(lambda: ch.check.module(MyDecoder(), flow="causal"), hint=1)


# %% tags=["hide-cell", "solution"]
class Solved(Decoder):
    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.head(x + self.attention(x, x, x, attn_mask=hidden)[0])


assert ch.check.module(Solved(), flow="causal").ok
