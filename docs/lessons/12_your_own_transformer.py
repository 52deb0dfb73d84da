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
# # 12 · Your own Transformer
#
# You need lessons [2](02_embeddings_and_positions.py) to [5](05_residuals_and_norms.py). In this lesson you write a whole encoder-decoder Transformer in less than a hundred lines of plain PyTorch. You prove that it equals clearhead's, weight by weight, and train it.
#
# The page starts empty and grows. You write three missing pieces, in any order: the attention, the decoder layer, the loss. While a piece is not right yet, a finished version replaces it. So the page always runs to its end.
#
# Each check has three hints. `hint=1` tells you where your result differs, `hint=2` names the line of mathematics, and `hint=3` names the mistake and its fix. Try to use only the first.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from shared import solves
from torch import nn

import clearhead as ch

_ = torch.manual_seed(0)
torch.set_num_threads(1)  # for such small matrices a second thread costs more time than it saves
PAD, START, END = 0, 1, 2

# %% [markdown]
# ## Attention
#
# **Exercise 1 (20 minutes, medium).** Only attention combines several tokens, so begin with it. Queries come from `x`, keys and values from `memory`. Without a memory the tokens attend to each other:
#
# $$\operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{\text{width}/\text{heads}}}\right) V.$$
#
# `x` is `[batch, queries, width]`, `memory` is `[batch, keys, width]`, and `mask` is `[batch, queries, keys]`, where True means "may attend". For a query that may attend to no key, the weights must be zero.


# %% tags=["exercise"]
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory=None, mask=None):
        raise NotImplementedError


attention_is_right = solves(lambda: ch.check.attention(Attention(48, 6), width=48, heads=6), hint=1)


# %% tags=["hide-cell", "solution"]
class SolvedAttention(Attention):
    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        q, k, v = (
            project(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None].any(-1, keepdim=True), 0)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


assert ch.check.attention(SolvedAttention(48, 6), width=48, heads=6).ok
if not attention_is_right:
    Attention = SolvedAttention

# %% [markdown]
# ## The modules for single tokens
#
# You know the feed-forward sub-layer and the positions from lessons [5](05_residuals_and_norms.py) and [2](02_embeddings_and_positions.py). They are short enough to copy. The angles are computed in double precision. In single precision, an angle at position 1,000 would have an error of up to 0.00006.


# %%
class FeedForward(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def positions(length, width):
    even = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(length)[:, None] / 10000 ** (even / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).float()


print("positions: ", ch.check.positions(positions, width=64).verdict)

# %% [markdown]
# ## Two kinds of layers
#
# A layer of the encoder is attention, then feed-forward. Each of the two has a residual around it and a norm after it. That is post-norm, as in the paper.


# %%
class EncoderLayer(nn.Module):
    def __init__(self, width, heads, size, dropout=0.1):
        super().__init__()
        self.attention, self.feedforward = Attention(width, heads), FeedForward(width, size)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = self.norms[0](x + self.dropout(self.attention(x, mask=mask)))
        return self.norms[1](x + self.dropout(self.feedforward(x)))


print("a layer of the encoder: ", ch.check.layer(EncoderLayer(48, 6, 96), width=48, heads=6).verdict)

# %% [markdown]
# **Exercise 2 (20 minutes, hard).** A decoder layer has a third step between attention and feed-forward. It attends to the output of the encoder. Which side gives the queries, and which side gives the keys? Each row of attention weights belongs to one query token and has one weight for each key token.
#
# `x` is `[batch, target tokens, width]` with `mask`, and `memory` is `[batch, source tokens, width]` with `memory_mask`.


# %% tags=["exercise"]
class DecoderLayer(nn.Module):
    def __init__(self, width, heads, size, dropout=0.1):
        super().__init__()
        self.attention, self.cross = Attention(width, heads), Attention(width, heads)
        self.feedforward = FeedForward(width, size)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, mask=None, memory_mask=None):
        raise NotImplementedError


layer_is_right = solves(lambda: ch.check.layer(DecoderLayer(48, 6, 96), width=48, heads=6), hint=1)


# %% tags=["hide-cell", "solution"]
class SolvedDecoderLayer(DecoderLayer):
    def forward(self, x, memory, mask=None, memory_mask=None):
        x = self.norms[0](x + self.dropout(self.attention(x, mask=mask)))
        x = self.norms[1](x + self.dropout(self.cross(x, memory, memory_mask)))
        return self.norms[2](x + self.dropout(self.feedforward(x)))


assert ch.check.layer(SolvedDecoderLayer(48, 6, 96), width=48, heads=6).ok
if not layer_is_right:
    DecoderLayer = SolvedDecoderLayer

# %% [markdown]
# ## The whole model
#
# The model consists of two tables, two stacks and one linear map to the vocabulary. It makes the masks from the same ids that it reads. No query attends to padding, and a target token sees no later token ([lesson 4](04_masks.py)).


# %%
class Transformer(nn.Module):
    def __init__(self, source_vocab, target_vocab, width, heads, layers, size, dropout=0.1):
        super().__init__()
        self.source, self.target = nn.Embedding(source_vocab, width), nn.Embedding(target_vocab, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, size, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, size, dropout) for _ in range(layers))
        self.head = nn.Linear(width, target_vocab)
        self.dropout = nn.Dropout(dropout)

    def embed(self, table, ids):
        x = table(ids) * table.embedding_dim**0.5
        return self.dropout(x + positions(ids.shape[1], table.embedding_dim).to(x))

    def encode(self, src, src_mask):
        x = self.embed(self.source, src)
        for layer in self.encoder:
            x = layer(x, src_mask[:, None])
        return x

    def decode(self, tgt, memory, src_mask, tgt_mask):
        x, causal = self.embed(self.target, tgt), torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        for layer in self.decoder:
            x = layer(x, memory, causal & tgt_mask[:, None], src_mask[:, None])
        return x

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        src_mask = src != PAD if src_mask is None else src_mask
        tgt_mask = tgt != PAD if tgt_mask is None else tgt_mask
        return self.head(self.decode(tgt, self.encode(src, src_mask), src_mask, tgt_mask))


def lines_of(piece):
    kinds = [base for base in getattr(piece, "__mro__", ()) if base.__module__ == __name__]
    functions = [function for kind in kinds for function in vars(kind).values() if inspect.isfunction(function)] or [
        piece
    ]
    return bool(kinds) + sum(len(inspect.getsource(function).splitlines()) for function in functions)


pieces = (Attention, FeedForward, positions, EncoderLayer, DecoderLayer, Transformer)
print("lines of all pieces together:", sum(map(lines_of, pieces)))
print("still ours:", [piece.__name__ for piece in pieces if "Solved" in piece.__name__])

# %% [markdown]
# The check tests the whole model. It changes each id in turn and draws which output reads which input. It pads the source, and runs texts alone and in a batch. Then it compares every layer and every attention:

# %%
print(ch.check.transformer(Transformer(60, 60, 48, 6, 2, 96), width=48, heads=6))

# %% [markdown]
# If you make the target's mask before you shift the target, the mask has one token too many. At least this mistake raises an error:

# %%
with torch.no_grad():
    ids = torch.randint(3, 60, (2, 8))
    logits = Transformer(60, 60, 48, 6, 2, 96).eval()(ids, ids[:, :-1])
    print("logits", tuple(logits.shape), " probabilities sum to", logits.softmax(-1).sum(-1).unique().tolist()[0])
    try:
        Transformer(60, 60, 48, 6, 2, 96)(ids, ids[:, :-1], tgt_mask=ids != PAD)
    except RuntimeError as error:
        print(error)

# %% [markdown]
# ## Count the weights
#
# An attention has four maps of $w^2 + w$ weights each. A feed-forward sub-layer has $2ws + s + w$ weights, and a norm has $2w$. The next cell uses a size from a tutorial: width 300, four heads of 75, and twelve layers in each stack. The feed-forward size is 64, and both vocabularies have 10,000 tokens.

# %%
w, s, v = 300, 64, 10_000
attention, feedforward, norm = 4 * (w * w + w), 2 * w * s + s + w, 2 * w
counts = {
    "two tables": 2 * v * w,
    "encoder": 12 * (attention + feedforward + 2 * norm),
    "decoder": 12 * (2 * attention + feedforward + 3 * norm),
    "head": w * v + v,
}
large = Transformer(v, v, 300, 4, 12, 64).eval()
print("by hand:", " + ".join(f"{count:,}" for count in counts.values()), f"= {sum(counts.values()):,}")
counted = sum(p.numel() for p in large.parameters())
print(f"yours:   {counted:,}")
assert counted == sum(counts.values()) == 22_979_536

# %% [markdown]
# The plot shows that attention has more than half of the weights. The tables and the head, which only map between tokens and vectors, have most of the rest.

# %%
shares = {
    "tables and head": counts["two tables"] + counts["head"],
    "attention": 36 * attention,
    "feed-forward": 24 * feedforward,
    "norms": 60 * norm,
}
figure, axis = plt.subplots(figsize=(7, 2.2), layout="constrained")
bars = axis.barh(list(shares), [count / 1e6 for count in shares.values()])
axis.bar_label(bars, [f"{count / counted:.1%}" for count in shares.values()], padding=4)
axis.set(xlabel="million weights", xlim=(0, 15))
axis.invert_yaxis()
plt.show()

# %% [markdown]
# The next cell runs the model on a batch of 64 sources of 30 tokens and 64 targets of 20 tokens. Each target token gets a logit for each of 10,000 vocabulary entries:

# %%
src, tgt = torch.randint(3, v, (64, 30)), torch.randint(3, v, (64, 20))
with torch.no_grad():
    memory = large.encode(src, src != PAD)
    states = large.decode(tgt, memory, src != PAD, tgt != PAD)
    print("memory", tuple(memory.shape), " states", tuple(states.shape), " logits", tuple(large.head(states).shape))

# %% [markdown]
# ## Equal to clearhead's, weight by weight
#
# In clearhead a Transformer is not a class but a spec: a tree that describes its modules. This is the spec of the same model:

# %%
spec = ch.spec


def same_as_spec(source_vocab, target_vocab, width, heads, layers, size):
    def step(function):
        return spec.Step(branches=(spec.Branch(function=function),), out=spec.LayerNorm())

    def attention(**which):
        return step(spec.Attention(num_heads=heads, num_kv_heads=heads, head_size=width // heads, **which))

    def stack(rows, *steps):
        table = spec.Embedding(table=spec.Table(rows=rows), scale=width**0.5, position=spec.Sinusoidal())
        return spec.Stack(width=width, embedding=table, layers=(spec.Layer(steps=steps),) * layers)

    thinks = step(spec.FeedForward(size=size, activation="relu"))
    return spec.validate(
        spec.Model(
            encoder=stack(source_vocab, attention(), thinks),
            decoder=stack(target_vocab, attention(mask=spec.Causal()), attention(source="memory"), thinks),
            head=spec.Head(layers=(spec.Linear(size=target_vocab, bias=True),)),
        )
    )


sizes = (60, 70, 48, 6, 2, 96)
ours = ch.build(same_as_spec(*sizes)).double().eval()
print(f"{sum(p.numel() for p in ch.build(same_as_spec(v, v, 300, 4, 12, 64)).parameters()):,} weights at that size")

# %% [markdown]
# Each of your weights corresponds to one weight of this model. Write a map between the names, and copy your weights. An additional, missing or differently shaped weight would raise an error here:

# %%
PLACES = {
    "source.": "encoder.embedding.table.",
    "target.": "decoder.embedding.table.",
    "head.": "head.layers.0.",
    "encoder.": "encoder.layers.",
    "decoder.": "decoder.layers.",
    ".attention.": ".steps.0.branches.0.function.",
    ".cross.": ".steps.1.branches.0.function.",
    ".norms.0.": ".steps.0.out.",
    ".norms.1.": ".steps.1.out.",
    ".norms.2.": ".steps.2.out.",
}


def map_name(name):
    last = 2 if name.startswith("decoder") else 1
    name = name.replace(".feedforward.", f".steps.{last}.branches.0.function.")
    start = next(start for start in PLACES if name.startswith(start))
    name = PLACES[start] + name.removeprefix(start)
    for mine, theirs in PLACES.items():
        name = name.replace(mine, theirs) if mine.startswith(".") else name
    return name


def hand_over(mine, ours):
    ours.load_state_dict({map_name(name): tensor for name, tensor in mine.state_dict().items()})


mine = Transformer(*sizes).double().eval()
hand_over(mine, ours)
for name in ("decoder.1.cross.query.weight", "encoder.0.norms.1.bias", "head.weight"):
    print(f"{name:30} -> {map_name(name)}")

# %% [markdown]
# Equal weights must give equal logits and equal gradients. The gradient of a weight shows how the model uses this weight. So gradients can reveal a wrongly used weight even if the logits are equal. The next cell compares them in double precision, on random ids with some padding:

# %%
src, tgt = torch.randint(3, 60, (4, 9)), torch.randint(3, 70, (4, 7))
src[0, 6:], tgt[0, 5:] = PAD, PAD


def gradients(logits, tgt, weights):
    labels = torch.randint(3, 70, tgt.shape, generator=torch.Generator().manual_seed(1))
    labels[tgt == PAD] = PAD
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    return torch.autograd.grad(loss, weights)


def compare(mine, src, tgt):
    names = [name for name, _ in mine.named_parameters()]
    my_logits = mine(src, tgt)
    our_logits = ours(src, tgt, mask=src != PAD, target_mask=tgt != PAD).logits
    of_mine = gradients(my_logits, tgt, [mine.get_parameter(name) for name in names])
    of_ours = gradients(our_logits, tgt, [ours.get_parameter(map_name(name)) for name in names])
    return float((my_logits - our_logits)[tgt != PAD].detach().abs().max()), of_mine, of_ours


apart, of_mine, of_ours = compare(mine, src, tgt)
furthest = max(float((gradient - other).abs().max()) for gradient, other in zip(of_mine, of_ours))
print(f"logits differ by {apart:.0e}, the gradients of {len(of_mine)} weights by {furthest:.0e}")
assert apart < 1e-12 and furthest < 1e-12

# %% [markdown]
# Each dot of the plot is one weight tensor: the size of its gradient in your model and in clearhead's. All dots lie on the diagonal. The biases of the keys are not shown, because their gradient is zero. Such a bias adds the same number to all scores of a row, and a softmax ignores that.


# %%
def draw(of_mine, of_ours, title):
    _, axis = plt.subplots(figsize=(4.6, 3.8), layout="constrained")
    axis.plot([1e-4, 3], [1e-4, 3], color="gray", linewidth=0.8)
    axis.scatter(
        *([float(gradient.norm()) for gradient in gradient_list] for gradient_list in (of_ours, of_mine)), s=14
    )
    axis.set(xscale="log", yscale="log", xlabel="ours", ylabel="yours", title=title)
    axis.set(xlim=(1e-4, 3), ylim=(1e-4, 3))
    plt.show()


draw(of_mine, of_ours, "size of the gradient of each weight")

# %% [markdown]
# ## The loss
#
# **Exercise 3 (10 minutes, easy).** `logits` has the shape `[batch, tokens, vocabulary]`. `answers` has the shape `[batch, tokens]` and is already shifted. Padding does not count.


# %% tags=["exercise"]
def loss_of(logits, answers):
    raise NotImplementedError


loss_is_right = solves(lambda: ch.check.loss(loss_of, shifts=False), hint=1)


# %% tags=["hide-cell", "solution"]
def loss_solution(logits, answers):
    return nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=PAD)


assert ch.check.loss(loss_solution, shifts=False).ok
if not loss_is_right:
    loss_of = loss_solution

# %% [markdown]
# A softmax at the end of the head looks right, because the paper's figure has one. But the loss computes a softmax itself, and the second softmax flattens the probabilities. With thirteen tokens, the lowest possible loss is then $\ln(e^1 + 12\,e^0) - 1$.


# %%
def twice(logits, answers):
    return loss_solution(logits.softmax(-1), answers)


perfect = 99 * nn.functional.one_hot(torch.tensor([[3, 7]]), 13).float()
once, two = (float(loss(perfect, torch.tensor([[3, 7]]))) for loss in (loss_solution, twice))
print(f"perfect logits: {once:.3f} with one softmax, {two:.3f} with two")
print(ch.check.loss(twice, shifts=False))

# %% [markdown]
# ## Train it
#
# The task is to write four to eight digits backwards: the smallest task that needs every module. The decoder reads a start token and the target. The answer is the target, shifted by one, with an end token.


# %%
def batch(size, generator):
    src, tgt, answers = torch.zeros(3, size, 9, dtype=torch.long)
    lengths = torch.randint(4, 9, (size,), generator=generator)
    for row, length in enumerate(lengths.tolist()):
        digits = torch.randint(3, 13, (length,), generator=generator)
        src[row, :length], tgt[row, 0] = digits, START
        tgt[row, 1 : length + 1] = answers[row, :length] = digits.flip(0)
        answers[row, length] = END
    return src, tgt, answers


def train(model, steps, loss_of=loss_solution):
    generator, losses = torch.Generator().manual_seed(2), []
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min((step + 1) / 50, 1 - step / steps)
        src, tgt, answers = batch(64, generator)
        loss = loss_of(model(src, tgt), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def write(model, src):
    """Take the most probable token, again and again, until the end token."""
    tgt = torch.full((len(src), 1), START)
    with torch.no_grad():
        while tgt.shape[1] < 10 and not (tgt == END).any(1).all():
            tgt = torch.cat([tgt, model(src, tgt)[:, -1:].argmax(-1)], 1)
    return tgt


def text(row):
    row = row.tolist()
    return "".join(str(token - 3) for token in (row[: row.index(END)] if END in row else row) if token > 2)


torch.manual_seed(0)
reverser = Transformer(13, 13, 32, 4, 2, 64, dropout=0.0)
losses = train(reverser, 600, loss_of)
src, _, answers = batch(200, torch.Generator().manual_seed(3))
written = write(reverser, src)
right = sum(text(output) == text(answer) for output, answer in zip(written, answers))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; {right} of 200 new ones are right")
for row in range(3):
    print(text(src[row]), "->", text(written[row]))

# %% [markdown]
# Because the two models are equal, every tool of clearhead works with your weights. Copy them, and capture every head of the cross-attention. A row of the map is a written token. The rows should move from the end of the source to its beginning:

# %%
twin = ch.build(same_as_spec(13, 13, 32, 4, 2, 64)).eval()
hand_over(reverser, twin)
digits = torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11]])
seen_as = write(reverser, digits)
with torch.no_grad(), ch.capture(twin, "decoder.layers.*.steps.1.**.weights") as seen:
    twin(digits, seen_as[:, :-1])
weights = torch.stack([records[0].tensor[0] for records in seen.values()])
ch.view_attention(weights.numpy(), list("12345678"), [*text(seen_as[0]), "end"])

# %% [markdown]
# ## Break it
#
# **The switch.** Reverse the cross-attention: the queries come from the memory, the keys and values from the decoder. This mistake is copied into handwritten decoders more often than any other. If source and target have the same length, the shapes fit.


# %%
class Reversed(SolvedDecoderLayer):
    def forward(self, x, memory, mask=None, memory_mask=None):
        x = self.norms[0](x + self.dropout(self.attention(x, mask=mask)))
        x = self.norms[1](x + self.dropout(self.cross(memory, x)))  # queries from the encoder
        return self.norms[2](x + self.dropout(self.feedforward(x)))


def with_layer(kind, *sizes, **options):
    model = Transformer(*sizes, **options)
    for index, old in enumerate(model.decoder):
        model.decoder[index] = kind(old.norms[0].weight.numel(), old.attention.heads, old.feedforward.up.out_features)
    return model


wrong = with_layer(Reversed, 13, 13, 32, 4, 2, 64, dropout=0.0)

# %% [markdown]
# **The symptom.** The loss falls as in a right model, because no mask hides later target tokens in the reversed attention. So the model copies the answer. Generation starts with a single target token, and fails:

# %%
print(f"loss after 200 steps: {train(wrong, 200)[-1]:.2f}; of the right model {losses[199]:.2f}")
try:
    write(wrong, src)
except RuntimeError as error:
    print(error)

# %% [markdown]
# Many authors pad the target to the length of the source to avoid this error. Then the model generates nonsense.
#
# **The detector.** Check the layer alone. The report names the mistake:

# %%
print(ch.check.layer(Reversed(48, 6, 96), width=48, heads=6))

# %% [markdown]
# The plot of the gradients shows the mistake too. The decoder uses most weights in another way, so the dots leave the diagonal:

# %%
crossed = with_layer(Reversed, *sizes).double().eval()
hand_over(crossed, ours)
src, tgt = torch.randint(3, 60, (4, 9)), torch.randint(3, 70, (4, 9))
apart, of_mine, of_ours = compare(crossed, src, tgt)
print(f"logits differ by {apart:.2f}")
draw(of_mine, of_ours, "with the cross-attention reversed")

# %% [markdown]
# **The fix.** `self.cross(x, memory, memory_mask)`: queries come from the decoder, keys from the memory, and the mask hides the padding of the source. Without this mask the layer reads padding and no error appears, but the check reports it:


# %%
class Unmasked(SolvedDecoderLayer):
    def forward(self, x, memory, mask=None, memory_mask=None):
        return super().forward(x, memory, mask)


report = ch.check.transformer(with_layer(Unmasked, 60, 60, 48, 6, 2, 96), width=48, heads=6)
print("\n".join(report.lines()))
assert not report.ok

# %% [markdown]
# ## Where next
#
# `clearhead check mine.py` runs the same check on your file, without a line of Python ([guide](../guides/your-own-transformer.md)). [Lesson 7](07_training.py) covers label smoothing, and [lesson 8](08_generation.py) beam search. To train on your own sentences, see [your data](../guides/your-data.md).
