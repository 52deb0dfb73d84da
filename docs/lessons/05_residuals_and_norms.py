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
# You need [lesson 3](03_attention.py). After this lesson you know why a Transformer can be a hundred layers deep, and how the position of its norms matters. You can also find a norm that is wrong in the third digit.
#
# A layer does not replace its input. It **adds** to it: $x \leftarrow x + f(x)$. Most Transformers differ only in the function $f$ and in the position of the norm.

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
# Layer norm shifts and scales the numbers of one token, so that their mean is 0 and their variance is 1. Then it applies a scale $\gamma$ and a shift $\beta$, which the model learns:
#
# $$\operatorname{norm}(x) = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \varepsilon}} \cdot \gamma + \beta.$$
#
# For the numbers 2, -1, 3, 0 the mean is 1, and the variance is $(1 + 4 + 4 + 1) / 4 = 2.5$.

# %%
x = torch.tensor([2.0, -1, 3, 0])
by_hand = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
print("by hand:     ", by_hand)
print("nn.LayerNorm:", torch.nn.LayerNorm(4)(x).detach())
torch.testing.assert_close(by_hand, torch.tensor([0.6325, -1.2649, 1.2649, -0.6325]), atol=5e-5, rtol=0)

# %% [markdown]
# The variance divides by 4, the number of features, not by 3. With a variance that divides by $n - 1 = 3$, as in statistics, the first result would be 0.5477 in place of 0.6325. Many notebooks have this mistake.
#
# RMS norm does not subtract the mean, so it is cheaper. Llama and most newer models use it:

# %%
print("by hand:   ", x / torch.sqrt(x.pow(2).mean() + 1e-5))
print("nn.RMSNorm:", torch.nn.RMSNorm(4, eps=1e-5)(x).detach())

# %% [markdown]
# ## The feed-forward sub-layer
#
# Between two attentions, the feed-forward sub-layer processes each token separately: $W_2 \max(0, W_1 x + b_1) + b_2$. It widens the vector, applies an activation, and narrows the vector again. This example is small enough for a pencil. It has two hidden features and four outputs:

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
# The paper puts the norm **after** the sum, $\operatorname{norm}(x + f(x))$. This is called post-norm. Most models since GPT-2 put it **before** the sub-layer, $x + f(\operatorname{norm}(x))$, and add a last norm after all layers. This is called pre-norm. The core covers both with one equation, in which each of the two norms is optional:

# %%
print(inspect.getdoc(Step))
print(inspect.getsource(Step.forward))

# %% [markdown]
# With post-norm, every layer scales the sum back to the same size. After many layers, little of the first input remains, and little of the gradient comes back. With pre-norm, the residual stream passes through all layers without a norm. Its values grow, so each later layer changes the stream relatively less.
#
# Follow the residual stream through forty layers of random weights:


# %%
def road(norm_place, depth=40, width=64):
    x = torch.randn(32, width)
    sizes, first = [], x
    for _ in range(depth):
        f = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, width))
        torch.nn.init.xavier_normal_(f[0].weight), torch.nn.init.xavier_normal_(f[2].weight)
        norm = torch.nn.LayerNorm(width)
        with torch.no_grad():
            if norm_place == "post":
                x = norm(x + f(x))
            else:
                x = x + f(norm(x) if norm_place == "pre" else x)
        sizes.append(float(x.std()))
    similarity = torch.nn.functional.cosine_similarity(first, x).mean()
    return sizes, float(similarity)


figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for norm_place in ("post", "pre", "none"):
    sizes, similarity = road(norm_place)
    axis.plot(sizes, label=f"{norm_place}: {similarity:.2f} of the input is left")
axis.set(yscale="log", xlabel="layer", ylabel="spread of the numbers")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Without any norm the numbers explode. With post-norm they keep their size, but the input is forgotten. With pre-norm they grow slowly, and more of the input remains.
#
# You choose the position on a real model with one key of the run file, `norm_place = "pre"`, or with one field of the spec. The next cell shows the norms of two presets:

# %%
for name in ("transformer_base", "gpt2"):
    stack = getattr(ch.presets, name)().decoder
    branch = stack.layers[0].steps[0]
    print(f"{name:17} before: {branch.branches[0].pre}, after: {branch.out}, at the end: {stack.final_norm}")

# %% [markdown]
# ## Break it
#
# **The switch.** Compute the standard deviation with `x.std()`, which divides by $n - 1$, and add epsilon after the root. The code looks like the formula.


# %%
class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) + self.bias


# %% [markdown]
# **The symptom.** This norm trains as well as the right one. But a checkpoint that was trained with the right norm gives wrong results. The output of every norm is wrong by the factor $\sqrt{(n - 1) / n}$:

# %%
wide = torch.randn(2, 8)
print("largest difference at width 8:", float((Norm(8)(wide) - torch.nn.LayerNorm(8)(wide)).detach().abs().max()))

# %% [markdown]
# **The detector.**

# %%
print(ch.check.norm(Norm(8), width=8))

# %% [markdown]
# **The fix** is in the report above, one line for each of the two mistakes.
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
# **2 · A layer (20 minutes, hard).** Combine attention, feed-forward and norms, with post-norm or pre-norm. `x` has the shape `[batch, tokens, width]`.


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
# **3 · Forget the residual (5 minutes, medium).** Remove the first residual of your layer and run the check with `hint=3`. Suppose that a token does not attend to itself. What does the output of the layer then still contain of that token?


# %% tags=["hide-cell", "solution"]
class Forgetful(MyLayer):
    def forward(self, x):
        normed = self.norm1(x)
        x = self.attention(normed, normed, normed)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


report = ch.check.layer(Forgetful(), width=16, heads=4)
assert "residual_missing" in {finding.cause for finding in report.findings}
print(report)
