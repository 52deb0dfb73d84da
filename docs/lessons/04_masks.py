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
# You need [lesson 3](03_attention.py). After this lesson you can write the two masks of a Transformer. You can say which inputs each output may read, and measure which inputs it really reads.
#
# A mask says which keys a query may attend to. It never changes the numbers of the model. It removes keys from a softmax. Nearly every silent bug of a Transformer is a wrong mask.

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
# ## One convention
#
# Tutorials, papers and libraries disagree on the meaning of a mask. A 1 may mean "keep" or "hide". Other masks consist of 0 and minus infinity, and are added to the scores. Choose one convention. In clearhead a mask is boolean, and **True means: may attend**.
#
# Where the mask is False, the score becomes minus infinity. The softmax turns that into a weight of zero:

# %%
scores = torch.tensor([[2.0, 4.0, 5.0]])
may_attend = torch.tensor([[True, True, False]])
print(scores.masked_fill(~may_attend, float("-inf")).softmax(-1))

# %% [markdown]
# ## Padding
#
# The sentences of a batch have different lengths. Short sentences are filled up with padding tokens, and no query may attend to them. Here are two sentences, where id 0 is padding:

# %%
ids = torch.tensor([[7, 2, 4, 0, 0], [3, 9, 5, 6, 1]])
real = ids != 0
print(real.int())
print("as a mask over keys:", tuple(real[:, None, None].shape), "for [batch, heads, queries, keys]")

# %% [markdown]
# ## The future
#
# A decoder learns to predict the next token at every position at once. So the output at position $t$ may read the inputs up to $t$, and no later ones. The next cell combines this causal mask with the padding mask of `[1, 2, 3, 4, 0]`:

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
# Some code adds a mask to the scores instead: zero for "may attend", minus infinity for "blocked". That is the same mask:

# %%
additive = torch.full((5, 5), float("-inf")).triu(1)
print(additive)
torch.testing.assert_close((scores := torch.randn(5, 5)) + additive, scores.masked_fill(~causal, float("-inf")))

# %% [markdown]
# A query may attend to a key only if both masks allow it, so the masks are joined by **and**. The core does this in the lines below. First come the masks that the spec of the attention sets: causal, window, prefix. Then come the masks of a single call: padding, documents, and a mask that the caller passes.

# %%
print(inspect.getsource(Masking.build))

# %% [markdown]
# ## A query with no keys
#
# What if a query may attend to no key, such as a padded row? The softmax of a row of minus infinities is 0/0. Many notebooks fill in a large negative number instead. Then the row attends to all keys equally, including padding and the future:

# %%
nothing = torch.zeros(1, 4, dtype=torch.bool)
row = torch.randn(1, 4)
print("-inf:", row.masked_fill(~nothing, float("-inf")).softmax(-1))
print("-1e9:", row.masked_fill(~nothing, -1e9).softmax(-1))
print("here:", attention_weights(row.masked_fill(~nothing, float("-inf"))[None, None], nothing[None, None])[0, 0])

# %% [markdown]
# In clearhead the weights of such a row are zero: the query reads nothing, as the mask demands.
#
# ## Measure what the model reads
#
# A mask is a promise, and you can measure whether a model keeps it. Change one input, and see which outputs change. The next cell measures a small decoder:


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
# Read the table row by row: output 0 reads input 0, and output 5 reads all six inputs. The check did not read this triangle from the model's code. It found the triangle by changing each id in turn. You can do the same:

# %%
model = Decoder().double().eval()
text = torch.randint(0, 50, (1, 8))
reads = torch.zeros(8, 8)
with torch.no_grad():
    before = model(text)
    for position in range(8):
        other = text.clone()
        other[0, position] = (other[0, position] + 1) % 50
        reads[:, position] = (model(other) - before).abs().amax(-1)[0]
figure, axis = plt.subplots(figsize=(4, 3.4), layout="constrained")
axis.imshow(reads > 0, cmap="Blues", vmin=0, vmax=1.4)
axis.set(xlabel="input", ylabel="output", title="what reads what")
plt.show()

# %% [markdown]
# ## Break it
#
# **The switch.** Change one number: `tril(1)` in place of `tril(0)`.

# %%
Decoder.diagonal = 1

# %% [markdown]
# **The symptom.** The model may look at the token that it must predict. So the loss falls to almost nothing within minutes, which looks like success. But the model generates nonsense: during generation there is no next token to copy.

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
        print(f"step {step:3}: loss {float(loss.detach()):.2f} on random tokens, which are unpredictable")

# %% [markdown]
# A loss below $\ln 50 = 3.91$ on random tokens is impossible unless the model reads the future.
#
# **The detector.**

# %%
print("\n".join(ch.check.module(leaking).lines()))

# %% [markdown]
# **The fix.**

# %%
Decoder.diagonal = 0
print(ch.check.module(Decoder()).verdict)

# %% [markdown]
# ## Exercises
#
# **1 · A window (10 minutes, medium).** Write the mask `[length, length]` of a causal window. Each token sees itself and the `before` tokens that precede it.


# %% tags=["exercise"]
def window(length, before):
    raise NotImplementedError


def check_window(window):
    for length, before in ((5, 2), (4, 0), (3, 7)):
        mask = window(length, before)
        assert mask.dtype == torch.bool, f"a mask is boolean; yours is {mask.dtype}"
        assert mask.shape == (length, length), f"expected {(length, length)}, got {tuple(mask.shape)}"
        assert bool(mask.diagonal().all()), "every token sees itself"
        assert not bool(mask.triu(1).any()), "a token sees the future"
        for query in range(length):
            seen = int(mask[query].sum())
            wanted = min(query, before) + 1
            assert seen == wanted, f"with before={before}, token {query} should see {wanted} tokens; it sees {seen}"
    return "right"


attempt(lambda: check_window(window))


# %% tags=["hide-cell", "solution"]
def window_solution(length, before):
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ones.triu(-before)


assert check_window(window_solution) == "right"

# %% [markdown]
# **2 · Mixed conventions (5 minutes, medium).** In a padding mask, 1 means padding. In a causal mask, True means "may attend". Somebody joins the two masks by taking the larger value, and treats a 1 in the result as "blocked". What may token 1 of five real tokens attend to? Set `seen` to a list of positions.

# %% tags=["exercise"]
padding_is_1 = torch.zeros(5, dtype=torch.int)
causal_is_keep = torch.ones(5, 5, dtype=torch.int).tril()
blocked = torch.maximum(padding_is_1, causal_is_keep)
seen = None
right = [position for position in range(5) if blocked[1, position] == 0]


def check_seen(seen):
    if seen is None:
        raise NotImplementedError
    assert sorted(seen) == right, f"a 1 means blocked, and row 1 is {blocked[1].tolist()}; got {seen}"
    return "right: it sees the future, and only the future"


attempt(lambda: check_seen(seen))

# %% tags=["hide-cell", "solution"]
assert check_seen([2, 3, 4]).startswith("right")

# %% [markdown]
# **3 · Your own decoder (10 minutes, medium).** Write a `forward` that hides the future. The check measures it.


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
