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
# # 5 · Residuals and norms
#
# You need [lesson 3](03_attention.py). Afterwards you know why a Transformer can be a hundred layers deep, where its norms stand and what follows from that, and you can find a norm that is wrong in the third digit.
#
# A layer does not replace what it reads. It **adds** to it: $x \leftarrow x + f(x)$. What is added, and where a norm stands, is the one difference between most Transformers.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from shared import attempt

import clearhead as ch
from clearhead.core.stack import Step

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## The norm
#
# Layer norm shifts and scales the numbers of one token so that their mean is 0 and their variance 1, and then lets the model choose another scale and shift:
#
# $$\operatorname{norm}(x) = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \varepsilon}} \cdot \gamma + \beta.$$
#
# For 2, -1, 3, 0: the mean is 1, the variance $(1 + 4 + 4 + 1) / 4 = 2.5$.

# %%
x = torch.tensor([2.0, -1, 3, 0])
by_hand = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
print("by hand:     ", by_hand)
print("nn.LayerNorm:", torch.nn.LayerNorm(4)(x).detach())
torch.testing.assert_close(by_hand, torch.tensor([0.6325, -1.2649, 1.2649, -0.6325]), atol=5e-5, rtol=0)

# %% [markdown]
# It divides by 4, the number of features, not by 3. A statistician's variance divides by $n - 1$ and gives 0.5477 where 0.6325 belongs. Remember these two numbers: you will meet the wrong one in notebooks.
#
# RMS norm leaves the mean where it is and is cheaper; Llama and most newer models have it:

# %%
print("by hand:   ", x / torch.sqrt(x.pow(2).mean() + 1e-5))
print("nn.RMSNorm:", torch.nn.RMSNorm(4, eps=1e-5)(x).detach())

# %% [markdown]
# ## The feed-forward part
#
# Between attentions each token thinks by itself: it is widened, bent by an activation, and narrowed again, $W_2 \max(0, W_1 x + b_1) + b_2$. Small enough for a pencil, with two hidden numbers and four at the end:

# %%
token = torch.tensor([1.0, 0.5])
W1, b1 = torch.tensor([[0.2, 0.1], [0.1, 0.1]]), torch.tensor([0.02, 0.01])
W2 = torch.tensor([[1.0, 0.5], [-0.5, 0.2], [0.6, 0.2], [0.3, 0.2]])
b2 = torch.tensor([0.03, 0.006, 0.01, 0.015])
hidden = torch.relu(W1 @ token + b1)
print("hidden", hidden, "output", W2 @ hidden + b2)
torch.testing.assert_close(hidden, torch.tensor([0.27, 0.16]))
torch.testing.assert_close(W2 @ hidden + b2, torch.tensor([0.3800, -0.0970, 0.2040, 0.1280]))

# %% [markdown]
# ## Post and pre
#
# The paper norms **behind** the sum, $\operatorname{norm}(x + f(x))$. Most models since GPT-2 norm **in front of** the sub-layer, $x + f(\operatorname{norm}(x))$, and once more at the very end. In the core both are one equation, with a norm at either place or at both:

# %%
print(inspect.getdoc(Step))
print(inspect.getsource(Step.forward))

# %% [markdown]
# What is the difference? With the norm behind, every layer squeezes what came from below back to the same size: after many layers little of the first remains, and little of the gradient comes back. With the norm in front there is a straight road through all layers; what flows on it grows, and each layer counts for less and less.
#
# Take forty layers of random weights and look at the road:


# %%
def road(place, depth=40, width=64):
    x = torch.randn(32, width)
    sizes, first = [], x
    for _ in range(depth):
        f = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, width))
        torch.nn.init.xavier_normal_(f[0].weight), torch.nn.init.xavier_normal_(f[2].weight)
        norm = torch.nn.LayerNorm(width)
        with torch.no_grad():
            if place == "post":
                x = norm(x + f(x))
            else:
                x = x + f(norm(x) if place == "pre" else x)
        sizes.append(float(x.std()))
    similarity = torch.nn.functional.cosine_similarity(first, x).mean()
    return sizes, float(similarity)


figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for place in ("post", "pre", "none"):
    sizes, similarity = road(place)
    axis.plot(sizes, label=f"{place}: {similarity:.2f} of the input is left")
axis.set(yscale="log", xlabel="layer", ylabel="spread of the numbers")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Without any norm the numbers explode. With the norm behind they keep their size, and the input is forgotten. With the norm in front they grow slowly, and more of the input is still there.
#
# The same switch on a real model is one key of the run file, `norm_place = "pre"`, and one field of the spec. Here are the two drawn by their names:

# %%
for name in ("transformer_base", "gpt2"):
    stack = getattr(ch.presets, name)().decoder
    branch = stack.layers[0].steps[0]
    print(f"{name:17} in front: {branch.branches[0].pre}, behind: {branch.out}, at the end: {stack.final_norm}")

# %% [markdown]
# ## Break it
#
# **The switch.** Standard deviation from `x.std()`, which divides by $n - 1$, and epsilon behind the root. It looks like the formula.


# %%
class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) + self.bias


# %% [markdown]
# **The symptom.** It trains as well as the right one. But a checkpoint that was trained elsewhere gives other results, by the root of $n / (n - 1)$ in every layer:

# %%
wide = torch.randn(2, 8)
print("largest difference at width 8:", float((Norm(8)(wide) - torch.nn.LayerNorm(8)(wide)).detach().abs().max()))

# %% [markdown]
# **The detector.**

# %%
print(ch.check.norm(Norm(8), width=8))

# %% [markdown]
# **The mend** is named above, once for each of the two mistakes.
#
# ## Exercises
#
# **1 · A norm (10 minutes, easy).** Write `forward`.


# %% tags=["exercise"]
class MyNorm(Norm):
    def forward(self, x):
        raise NotImplementedError


attempt(lambda: ch.check.norm(MyNorm(8), width=8), hint=1)


# %% tags=["hide-cell", "solution"]
class SolvedNorm(Norm):
    def forward(self, x):
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5) + self.bias


assert ch.check.norm(SolvedNorm(8), width=8).ok

# %% [markdown]
# **2 · A layer (20 minutes, hard).** Join attention, feed-forward and norms, post or pre as you like. `x` is `[batch, tokens, width]`.


# %% tags=["exercise"]
class MyLayer(torch.nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = torch.nn.Linear(width, 32), torch.nn.Linear(32, width)
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)

    def forward(self, x):
        raise NotImplementedError


attempt(lambda: ch.check.layer(MyLayer(), width=16, heads=4), hint=1)


# %% tags=["hide-cell", "solution"]
class SolvedLayer(MyLayer):
    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


assert ch.check.layer(SolvedLayer(), width=16, heads=4).ok

# %% [markdown]
# **3 · Forget the residual (5 minutes, medium).** Leave the first residual of your layer away and run the check with `hint=3`. Then say what a token without attention to itself still knows of itself.


# %% tags=["hide-cell", "solution"]
class Forgetful(MyLayer):
    def forward(self, x):
        normed = self.norm1(x)
        x = self.attention(normed, normed, normed)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


report = ch.check.layer(Forgetful(), width=16, heads=4)
assert "residual_missing" in {one.cause for one in report.findings}
print(report)
