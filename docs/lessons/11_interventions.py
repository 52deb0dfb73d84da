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
# %% [markdown]
# # 11 · Ablate and patch
#
# You need [lesson 3](03_attention.py). Afterwards you can switch a head off, put the activations of one text into another, and say what the answer depends on.
#
# Where a head looks is not what it does. To know what it does, change it and watch the answer.

# %%
import matplotlib.pyplot as plt
import torch
from shared import attempt, dates_model

model = dates_model()
print(model.translate("Montag, 5. Januar 1998"))

# %% [markdown]
# ## Switch a head off
#
# A head is off when what it mixes, $\operatorname{softmax}(\text{scores})\,V$, is zero. Its effect is a difference of log-probabilities:
#
# $$\text{effect}(h) = \log p(\text{answer} \mid h \text{ off}) - \log p(\text{answer}).$$
#
# The answer here is the last digit of the year, the 8 of 1998. Below zero means that the head helped:

# %%
here = model.attention("Montag, 5. Januar 1998", "1998-01-05")
effects = sorted(here.effects(of=(4, "8")), key=lambda effect: effect.change)
for effect in effects[:5]:
    print(f"{effect.stack:15} layer {effect.layer} head {effect.head}  {effect.change:8.3f}")

# %% [markdown]
# By hand it is one edit. Heads are the second axis of `mixed`. Switch off the one that helps most, and read what the model writes now:

# %%
strongest = effects[0]
part = {"decoder.self": ("decoder", 0), "decoder.memory": ("decoder", 1), "encoder.self": ("encoder", 0)}
stack, step = part[strongest.stack]
address = f"{stack}.layers.{strongest.layer}.steps.{step}.branches.0.function.mixed"


def without(head):
    def off(mixed):
        changed = mixed.clone()
        changed[:, head] = 0
        return changed

    return off


with model.edit({address: without(strongest.head)}):
    print(model.translate("Montag, 5. Januar 1998"))
print(model.translate("Montag, 5. Januar 1998"), "once the block is closed")

# %% [markdown]
# Its row of the explorer shows where it looks; press the same head there:

# %%
here

# %% [markdown]
# ## Patch a run
#
# Take two texts that differ in one character. Put the residual stream of one into the run of the other, place by place. Where the answer changes, the difference is kept:
#
# $$\text{patch}(d, i) = \log \frac{p(6 \mid x'_{d,i})}{p(8 \mid x'_{d,i})} - \log \frac{p(6)}{p(8)}.$$

# %%
there = model.attention("Montag, 5. Januar 1996", "1998-01-05")
patches = here.patch(there, of=(4, "6", "8"))
streams = torch.as_tensor(patches.streams["encoder"])
print("the two texts are apart by", round(float(patches.total), 2))
for depth, row in enumerate(streams):
    place = int(row.argmax())
    print(f"after {depth} layers the best place is {here.tokens[place]!r} ({place}): {float(row[place]):.2f}")

# %% [markdown]
# As a picture: before the first layer all of the difference stands on the digit. Each layer may hand some of it on.

# %%
figure, axes = plt.subplots(figsize=(8, 2.2))
axes.imshow(streams, aspect="auto", cmap="viridis")
axes.set_xticks(range(len(here.tokens)), here.tokens)
axes.set(yticks=range(len(streams)), ylabel="layers", title="why 6 and not 8: patches of the encoder")
figure.tight_layout()

# %% [markdown]
# ## Break it
#
# **The switch.** `mixed` is `[texts, heads, queries, head size]`. Forget the first axis, and `mixed[0] = 0` switches off every head of one text, not one head of every text.


# %%
def of_one_text(mixed):
    changed = mixed.clone()
    changed[0] = 0
    return changed


# %% [markdown]
# **The symptom.** One text alone looks plausible: some effect is there, whichever head you meant.

# %%
with model.edit({address: of_one_text}):
    print(model.translate("Montag, 5. Januar 1998"))

# %% [markdown]
# **The detector.** Give the same text twice. Equal texts must have equal answers, edited or not:

# %%
twice = ["Montag, 5. Januar 1998"] * 2
with model.edit({address: of_one_text}):
    broken = model.translate(twice)
with model.edit({address: without(strongest.head)}):
    mended = model.translate(twice)
print("broken", broken, " mended", mended)
assert broken[0] != broken[1] and mended[0] == mended[1]

# %% [markdown]
# **The mend.** Name both axes: `changed[:, head] = 0`.
#
# ## Exercises
#
# **1 · Half a head (10 minutes, easy).** Return an edit that halves what head `head` mixes, and leaves the others and its input alone.


# %% tags=["exercise"]
def half(head):
    raise NotImplementedError


def check_half(half):
    mixed = torch.ones(2, 4, 5, 3)
    changed = half(1)(mixed)
    assert (mixed == 1).all(), "your edit changed its input: clone it first"
    assert changed.shape == mixed.shape, (
        f"an edit keeps the shape {tuple(mixed.shape)}; yours is {tuple(changed.shape)}"
    )
    assert (changed[:, [0, 2, 3]] == 1).all(), "another head changed: heads are the second axis"
    assert (changed[:, 1] == 0.5).all(), f"the head should be one half; it is {changed[0, 1, 0, 0]}"
    return "right"


attempt(lambda: check_half(half))


# %% tags=["hide-cell", "solution"]
def solved_half(head):
    def edit(mixed):
        changed = mixed.clone()
        changed[:, head] *= 0.5
        return changed

    return edit


assert check_half(solved_half) == "right"
try:
    check_half(lambda head: lambda mixed: mixed * 0.5)
except AssertionError as error:
    print("a wrong answer reads:", error)

# %% [markdown]
# **2 · Where the month is read (10 minutes, medium).** Patch "5. Januar 1998" with "5. Februar 1998"? They have different lengths. Find two dates of the same length whose months differ, and patch them: which token of the source holds the difference before the first layer?

# %% tags=["exercise"]
first, second = None, None


def check_dates(first, second):
    if first is None:
        raise NotImplementedError
    lengths = [len(model.attention(text, "1998-01-05").tokens) for text in (first, second)]
    assert lengths[0] == lengths[1], f"a patch goes place by place: equal lengths are needed, yours are {lengths}"
    months = [model.translate(text)[5:7] for text in (first, second)]
    assert months[0] != months[1], f"the model reads the same month in both: {months[0]}"
    return "right: look at the best places of their patches as above"


attempt(lambda: check_dates(first, second))

# %% tags=["hide-cell", "solution"]
assert check_dates("5. Juni 1998", "5. Juli 1998").startswith("right")
june, july = (model.attention(text, "1998-06-05") for text in ("5. Juni 1998", "5. Juli 1998"))
of_month = torch.as_tensor(june.patch(july, of=(7, "7", "6")).streams["encoder"])[0]
print("the difference stands on", june.tokens[int(of_month.argmax())])
assert june.tokens[int(of_month.argmax())] == "n"
