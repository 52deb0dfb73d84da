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
# # 11 · Ablate and patch
#
# You need [lesson 3](03_attention.py). After this lesson you can ablate a head and patch the activations of one text into another. You can tell which heads and tokens an answer depends on.
#
# The attention map of a head does not show what the head does for the answer. To learn that, change the head and compare the answers.

# %%
import matplotlib.pyplot as plt
import torch
from shared import attempt, dates_model

model = dates_model()
print(model.translate("Montag, 5. Januar 1998"))

# %% [markdown]
# ## Switch a head off
#
# A head is off when its output, $\operatorname{softmax}(\text{scores})\,V$, is zero. Its effect is a difference of log-probabilities:
#
# $$\text{effect}(h) = \log p(\text{answer} \mid h \text{ off}) - \log p(\text{answer}).$$
#
# The answer here is the last digit of the year, the 8 of 1998. An effect below zero means that the head helped:

# %%
attention_maps = model.attention("Montag, 5. Januar 1998", "1998-01-05")
effects = sorted(attention_maps.effects(of=(4, "8")), key=lambda effect: effect.change)
for effect in effects[:5]:
    print(f"{effect.stack:15} layer {effect.layer} head {effect.head}  {effect.change:8.3f}")

# %% [markdown]
# You can also switch a head off yourself, with one edit. `mixed` is the output of the heads before the output projection; its second axis is the head. Switch off the head that helps most, and read the new translation:

# %%
strongest = effects[0]
stack_and_step = {"decoder.self": ("decoder", 0), "decoder.memory": ("decoder", 1), "encoder.self": ("encoder", 0)}
stack, step = stack_and_step[strongest.stack]
address = f"{stack}.layers.{strongest.layer}.steps.{step}.branches.0.function.mixed"


def without(head):
    def off(mixed):
        changed = mixed.clone()
        changed[:, head] = 0
        return changed

    return off


with model.edit({address: without(strongest.head)}):
    print(model.translate("Montag, 5. Januar 1998"))
print(model.translate("Montag, 5. Januar 1998"), "after the edit has ended")

# %% [markdown]
# The explorer shows the attention map of each head. Select the same head there:

# %%
attention_maps

# %% [markdown]
# ## Patch a run
#
# Take two texts that differ in one character. Copy the residual stream of one text into the run of the other, one position at a time. If the answer changes, that position holds the difference between the texts:
#
# $$\text{patch}(d, i) = \log \frac{p(6 \mid x'_{d,i})}{p(8 \mid x'_{d,i})} - \log \frac{p(6)}{p(8)}.$$

# %%
other_maps = model.attention("Montag, 5. Januar 1996", "1998-01-05")
patches = attention_maps.patch(other_maps, of=(4, "6", "8"))
streams = torch.as_tensor(patches.streams["encoder"])
print("the two texts are apart by", round(float(patches.total), 2))
for depth, row in enumerate(streams):
    position = int(row.argmax())
    print(
        f"after {depth} layers the best position is {attention_maps.tokens[position]!r} ({position}): {float(row[position]):.2f}"
    )

# %% [markdown]
# Here are the same numbers as a picture. Before the first layer, the digit holds the whole difference. Each layer may move a share of it to other tokens.

# %%
figure, axes = plt.subplots(figsize=(8, 2.2))
axes.imshow(streams, aspect="auto", cmap="viridis")
axes.set_xticks(range(len(attention_maps.tokens)), attention_maps.tokens)
axes.set(yticks=range(len(streams)), ylabel="layers", title="why 6 and not 8: patches of the encoder")
figure.tight_layout()

# %% [markdown]
# ## Break it
#
# **The switch.** `mixed` is `[texts, heads, queries, head size]`. If you forget the first axis, `mixed[0] = 0` switches off all heads of one text, not one head of all texts.


# %%
def of_one_text(mixed):
    changed = mixed.clone()
    changed[0] = 0
    return changed


# %% [markdown]
# **The symptom.** With a single text, the result looks plausible: there is some effect, whichever head you wanted to switch off.

# %%
with model.edit({address: of_one_text}):
    print(model.translate("Montag, 5. Januar 1998"))

# %% [markdown]
# **The detector.** Pass the same text twice. Equal texts must have equal answers, with or without the edit:

# %%
twice = ["Montag, 5. Januar 1998"] * 2
with model.edit({address: of_one_text}):
    broken = model.translate(twice)
with model.edit({address: without(strongest.head)}):
    mended = model.translate(twice)
print("broken", broken, " mended", mended)
assert broken[0] != broken[1] and mended[0] == mended[1]

# %% [markdown]
# **The fix.** Index both axes: `changed[:, head] = 0`.
#
# ## Exercises
#
# **1 · Half a head (10 minutes, easy).** Return an edit that halves the output of the head `head`. The edit must not change the other heads, and must not write into its input tensor.


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
def half_solution(head):
    def edit(mixed):
        changed = mixed.clone()
        changed[:, head] *= 0.5
        return changed

    return edit


assert check_half(half_solution) == "right"
try:
    check_half(lambda head: lambda mixed: mixed * 0.5)
except AssertionError as error:
    print("a wrong answer reads:", error)

# %% [markdown]
# **2 · The token that holds the month (10 minutes, medium).** You cannot patch "5. Januar 1998" with "5. Februar 1998", because their lengths differ. Find two dates of the same length but with different months, and patch one with the other. Which source token holds the difference before the first layer?

# %% tags=["exercise"]
first, second = None, None


def check_dates(first, second):
    if first is None:
        raise NotImplementedError
    lengths = [len(model.attention(text, "1998-01-05").tokens) for text in (first, second)]
    assert lengths[0] == lengths[1], f"a patch copies position by position and needs equal lengths, got {lengths}"
    months = [model.translate(text)[5:7] for text in (first, second)]
    assert months[0] != months[1], f"the model reads the same month in both: {months[0]}"
    return "right: look at the best positions of their patches as above"


attempt(lambda: check_dates(first, second))

# %% tags=["hide-cell", "solution"]
assert check_dates("5. Juni 1998", "5. Juli 1998").startswith("right")
june, july = (model.attention(text, "1998-06-05") for text in ("5. Juni 1998", "5. Juli 1998"))
of_month = torch.as_tensor(june.patch(july, of=(7, "7", "6")).streams["encoder"])[0]
print("the token that holds the difference:", june.tokens[int(of_month.argmax())])
assert june.tokens[int(of_month.argmax())] == "n"
