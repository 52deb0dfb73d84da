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
# # 13 · The whole Transformer in one sitting
#
# You need lessons [3](03_attention.py), [4](04_masks.py) and [5](05_residuals_and_norms.py). In about 45 minutes you read the code that runs every model of clearhead. After this lesson you can find the line that computes any number.
#
# One equation describes every Transformer. A model has one or two stacks, a stack is a sequence of layers, and a layer is a sequence of steps. Every step computes
#
# $$x \leftarrow \operatorname{out}\left(x + \sum_b s_b \cdot \operatorname{dropout}(\operatorname{post}_b(f_b(\operatorname{pre}_b(\operatorname{pre}(x)))))\right).$$
#
# An absent norm is the identity, and an absent scale is 1. The code below is not a copy: each cell prints code from the installed package. So you read the code that runs.

# %%
import inspect
from dataclasses import replace

import torch
from shared import attempt

import clearhead as ch
from clearhead import core
from clearhead.core import attention, context, embedding, feedforward, head, model, norm, stack
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)


def show(*functions):
    for function in functions:
        print(inspect.getsource(function))


print(inspect.getdoc(core))

# %% [markdown]
# The example is a small decoder with two layers, four heads and width 32. It has learned positions and pre-norm, like GPT-2.

# %%
sizes = Hyperparameters(
    family="decoder", layers=2, width=32, heads=4, feedforward=128, norm_place="pre", positions="learned",
    max_positions=64, activation="gelu_tanh", dropout=0.0, initialization="normal",
)  # fmt: skip
gpt = ch.build(build_spec(sizes, source_vocab=50, target_vocab=50)).eval()
ids = torch.tensor([[5, 17, 3, 42, 8, 8, 21]])
print(f"{sum(parameter.numel() for parameter in gpt.parameters()):,} weights")

# %% [markdown]
# ## 1. The model
#
# `forward` reads ids and returns an `Output`. A decoder takes the first branch, an encoder-decoder the second, and an encoder the last. All other code of this class checks arguments and names sizes.

# %%
show(model.Transformer.forward)

# %%
with torch.no_grad():
    out = gpt(ids)
print("hidden", tuple(out.hidden.shape), "logits", tuple(out.logits.shape))
assert out.logits.shape == (1, 7, 50)

# %% [markdown]
# Check the loss: an untrained model knows nothing, so its loss is close to the logarithm of the vocabulary size.

# %%
loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
print(f"loss {loss:.2f}, log 50 = {torch.log(torch.tensor(50.0)):.2f}")
assert abs(loss - 3.912) < 0.3

# %% [markdown]
# ## 2. The stack
#
# A stack embeds its input, then runs its layers. A layer runs its steps, and a step computes the equation. These few lines are the center of the library.

# %%
show(stack.Step.forward, stack.Branch.forward)

# %% [markdown]
# The residual stream has one vector of 32 numbers for each token, and each step adds to it. Watch the stream grow: the hook point `after` of a layer is the stream after the layer.

# %%
with torch.no_grad(), ch.capture(gpt, "decoder.layers.*.after") as seen:
    gpt(ids)
for address, (record,) in seen.items():
    print(f"{address}: mean length of a token's vector {record.tensor.norm(dim=-1).mean():.3f}")

# %% [markdown]
# ## 3. Attention
#
# `forward` computes queries, keys and values, and appends the new keys and values to those of the cache. `attend` computes the weighted mean of the values. It makes a single call of a fused kernel where it can. Otherwise it computes the steps below, for example if a capture reads the weights. `weights` is equation 1 of the paper.

# %%
show(attention.Attention.forward, attention.Attention.attend, attention.Attention.weights, attention.Attention.scores)

# %% [markdown]
# The fused kernel and the separate steps give the same result. Here are the weights of one head. Each row sums to one. The upper triangle is zero, because a token sees no later token.

# %%
address = "decoder.layers.0.steps.0.branches.0.function"
with torch.no_grad(), ch.capture(gpt, [f"{address}.weights", f"{address}.mixed"]) as seen:
    watched = gpt(ids)
weights = seen[f"{address}.weights"][0].tensor[0, 0]
print(weights)
assert torch.allclose(weights.sum(-1), torch.ones(7)) and weights.triu(1).abs().max() == 0
print(f"with and without a watcher the logits differ by {(watched.logits - out.logits).abs().max():.1e}")
assert (watched.logits - out.logits).abs().max() < 1e-5

# %% [markdown]
# ## 4. The feed-forward network
#
# Between attentions, the network processes every token separately. It widens the vector, applies an activation, and narrows the vector again.

# %%
show(feedforward.FeedForward.forward, feedforward.activate)

# %%
network = gpt.decoder.layers[0].steps[1].branches[0].function
share = sum(parameter.numel() for parameter in network.parameters()) * 2 / sum(p.numel() for p in gpt.parameters())
print(f"inner size {network.up.out_features}; both networks hold {share:.0%} of the weights")
assert network.up.out_features == 128

# %% [markdown]
# ## 5. The norms
#
# Two kinds of norm are enough for all families. Both divide the vector by the root mean square of its numbers. LayerNorm first subtracts their mean.

# %%
show(norm.LayerNorm, norm.RMSNorm)

# %%
x = torch.tensor([2.0, -1, 3, 0])
layer_norm = norm.LayerNorm(4, ch.spec.LayerNorm(eps=1e-5))
print(layer_norm(x).detach())
torch.testing.assert_close(layer_norm(x).detach(), torch.tensor([0.6325, -1.2649, 1.2649, -0.6325]), atol=5e-5, rtol=0)

# %% [markdown]
# ## 6. The embedding
#
# The first $x$ of the equation has, for each token, a row of the embedding table, times a scale, plus the position.

# %%
show(embedding.Embedding.forward, embedding.LearnedPosition.forward)

# %%
table, positions = gpt.decoder.embedding.rows.weight, gpt.decoder.embedding.position.weight
with torch.no_grad(), ch.capture(gpt, "decoder.embedded") as seen:
    gpt(ids)
by_hand = table[ids[0]] + positions[:7]
difference = (seen["decoder.embedded"][0].tensor[0] - by_hand).abs().max()
print(f"by hand and by the model: {difference:.1e} apart")
assert difference < 1e-6

# %% [markdown]
# ## 7. The head
#
# One matrix product turns the last $x$ into logits. GPT-2 uses the embedding table again as this matrix.

# %%
show(head.Projection.outputs)

# %%
with torch.no_grad():
    by_hand = out.hidden @ table.T
print(f"{(by_hand - out.logits).abs().max():.1e} apart")
assert (by_hand - out.logits).abs().max() < 1e-5

# %% [markdown]
# ## 8. The masks and the cache
#
# The last topics are masks and the KV cache. A mask is boolean, and True means "may attend". The masks for structure (causal, window), padding and documents are joined with "and".

# %%
show(context.Masking.build)

# %% [markdown]
# The KV cache holds keys and values, so the model computes only the new token. Running the model token by token gives the same logits as one run over the whole sequence:

# %%
cache = ch.Cache()
with torch.no_grad():
    steps = torch.cat([gpt(ids[:, position : position + 1], cache=cache).logits for position in range(7)], 1)
print(f"token by token and whole: {(steps - out.logits).abs().max():.1e} apart")
assert (steps - out.logits).abs().max() < 1e-5

# %% [markdown]
# ## Break it
#
# **The switch.** Attention divides its scores by the square root of the head size. Remove this scale by changing one number in the spec.

# %%
sharp = ch.build(build_spec(replace(sizes, attention_scale=1.0), source_vocab=50, target_vocab=50))
sharp.load_state_dict(gpt.state_dict())
seen_weights = {}
for name, module in (("with", gpt), ("without", sharp.eval())):
    first = module.get_submodule(address)
    with torch.no_grad():
        first.query.weight.mul_(10), first.key.weight.mul_(10)  # trained weights are larger than initial weights
        with ch.capture(module, f"{address}.weights") as seen:
            module(ids)
    seen_weights[name] = seen[f"{address}.weights"][0].tensor[0, 0]

# %% [markdown]
# **The symptom.** No error appears. But each head attends to fewer tokens. A softmax that is nearly one-hot has almost no gradient, so training is slow.

# %%


def effective(weights):
    return (-(weights * weights.clamp_min(1e-12).log()).sum(-1)).exp().mean()


even, steep = effective(seen_weights["with"]), effective(seen_weights["without"])
print(f"tokens that a query attends to: {even:.2f} with the right scale, {steep:.2f} without")
assert steep < even - 0.2

# %% [markdown]
# **The detector.** `ch.check.attention` compares an attention module with the mathematics and names a wrong scale. The core passes:

# %%
report = ch.check.attention(ch.MultiHeadAttention(width=32, num_heads=4), width=32, heads=4)
print("\n".join(report.lines()))

# %% [markdown]
# **The fix.** Leave out `attention_scale`: then the core uses `head_size ** -0.5`, in one line of `Attention.__init__`.
#
# ## Exercise
#
# Write one pre-norm step by hand, with the modules of the first layer. The step applies the norm, applies the function (attention or feed-forward), and adds the result to `x`. Attention would also need the context, so the check uses the feed-forward step.


# %%
def my_step(x, norm, function):
    raise NotImplementedError


# %% tags=["hide-cell", "solution"]
def my_step(x, norm, function):  # noqa: F811
    return x + function(norm(x))


# %%
def check():
    branch = gpt.decoder.layers[0].steps[1].branches[0]
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        mine, ours = my_step(x, branch.pre, branch.function), x + branch.function(branch.pre(x))
    assert torch.allclose(mine, ours), "the sum is not x + function(norm(x))"
    return "right: this is the equation with one branch and `pre` alone"


attempt(check)

# %% [markdown]
# ## Where next
#
# [Architecture](../architecture.md) shows the place of the core in the library. [Design decisions](../decisions.md) list the alternatives that were considered. `clearhead inspect gpt2 --svg gpt2.svg` draws any spec. [Add a custom module](../guides/add-a-part.md) shows how to use your own module as $f_b$ in the equation.
