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
# # 7 · Training
#
# You need [lesson 4](04_masks.py) and [lesson 6](06_three_families.py). After this lesson you can write a training step and predict its loss before the first step. You can also choose a learning rate for each step, and watch heads form.

# %%
import math

import matplotlib.pyplot as plt
import torch
from shared import MODELS, attempt, dates_model, decoder_model
from torch.nn.functional import cross_entropy

import clearhead as ch
from clearhead.training.optim.schedules import build_schedule

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)
both, decoder = dates_model(), decoder_model()
source_tokenizer, target_tokenizer = both.tokenizers.source, both.tokenizers.target

# %% [markdown]
# ## The loss
#
# A model gives each possible next token a number, its logit. Softmax turns the logits into probabilities. The loss is the negative logarithm of the probability of the right token:
#
# $$\text{loss} = -\log p(\text{right}), \qquad p = \operatorname{softmax}(\text{logits}).$$
#
# Here are three logits, where the first token is right:

# %%
logits = torch.tensor([2.0, 1.0, 0.1])
p = logits.softmax(-1)
print("probabilities", p, f" loss {-p[0].log():.4f}")
print(f"in one step from the logits: {cross_entropy(logits, torch.tensor(0)):.4f}")

# %% [markdown]
# You know the loss of an untrained model: if all $V$ tokens are equally likely, the loss is $\ln V$. If your loss begins far above, the first weights are too large. If it begins far below, the model sees the answer. The next cell computes the loss of the lessons' decoder on unseen lines, before its first step and after training:


# %%
def line_loss(model, lines):
    tokenizer, total, count = model.tokenizer, 0.0, 0
    for line in lines:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(line), tokenizer.eos_id]])
        with torch.no_grad():
            logits = model.module(ids[:, :-1]).logits[0]
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(logits)
    return total / count


valid = (MODELS / "dates" / "data" / "valid.tsv").read_text(encoding="utf-8").splitlines()[::20]
print(f"ln {decoder.tokenizer.vocab_size} = {math.log(decoder.tokenizer.vocab_size):.2f}")
for name in ("step-0", "best"):
    loss = line_loss(ch.load(f"{MODELS}/decoder@{name}"), valid)
    print(
        f"{name:7} loss {loss:.2f}   perplexity {math.exp(loss):7.2f}   bits for a character {loss / math.log(2):.2f}"
    )

# %% [markdown]
# Perplexity is $e^{\text{loss}}$: the number of equally likely tokens among which the model still has to choose.
#
# ## One softmax, not two
#
# Many notebooks end their model with a softmax, and then use a loss that computes a softmax again. No error appears. But probabilities lie between 0 and 1, so the second softmax is nearly flat. Even a perfect answer then has this loss:
#
# $$\ln(e + V - 1) - 1.$$

# %%
V = target_tokenizer.vocab_size
perfect = torch.nn.functional.one_hot(torch.tensor([7]), V).float() * 100
print(f"V = {V}: softmax once {cross_entropy(perfect, torch.tensor([7])):.4f},", end=" ")
print(f"twice {cross_entropy(perfect.softmax(-1), torch.tensor([7])):.4f} = {math.log(math.e + V - 1) - 1:.4f}")


def twice(logits, ids):
    probabilities = logits.softmax(-1)
    return cross_entropy(probabilities[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


print(ch.check.loss(twice))

# %% [markdown]
# ## Shift and teacher forcing
#
# During training, a decoder does not read its own predictions. It reads the right target, shifted by one token. At each position it reads the target up to that position, and its label is the next token. That is **teacher forcing**. With a causal mask, a single run computes the predictions of all positions.

# %%
ids = [target_tokenizer.bos_id, *target_tokenizer.encode("1998-01-05"), target_tokenizer.eos_id]
target, source = torch.tensor([ids]), torch.tensor([source_tokenizer.encode_with_special("Montag, 5. Januar 1998")])
read, labels = target[:, :-1], target[:, 1:]
print("reads ", target_tokenizer.tokens(read[0].tolist()))
print("labels", target_tokenizer.tokens(labels[0].tolist()))
with torch.no_grad():
    at_once = both.module(source, read).logits[0]
    one_by_one = torch.stack([both.module(source, read[:, : n + 1]).logits[0, -1] for n in range(read.shape[1])])
print(
    f"{len(at_once)} predictions of one run, and of {len(at_once)} runs: apart by {float((at_once - one_by_one).abs().max()):.1e}"
)

# %% [markdown]
# ## Overfit one batch
#
# Before you train for a night, train for a few seconds: let the model learn one batch by heart. A model that cannot learn one batch has a bug, and you have found it early. The loss ignores padding. The optimizer is the paper's, Adam with $\beta = (0.9, 0.98)$ and $\varepsilon = 10^{-9}$:


# %%
def pad(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=0)


rows = [line.split("\t") for line in valid[:32]]
sources = pad([source_tokenizer.encode_with_special(row[0]) for row in rows])
targets = pad([target_tokenizer.encode_with_special(row[1]) for row in rows])
if targets[0, 0] != target_tokenizer.bos_id:
    targets = torch.cat([torch.full((len(rows), 1), target_tokenizer.bos_id), targets], 1)
assert source_tokenizer.pad_id == target_tokenizer.pad_id == 0


def by_heart(rate, steps=60, softmax=False):
    torch.manual_seed(1)
    module, losses = ch.build(both.spec), []
    optimizer = torch.optim.Adam(module.parameters(), rate, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(steps):
        read, labels = targets[:, :-1], targets[:, 1:]
        logits = module(sources, read, mask=sources != 0, target_mask=read != 0).logits
        logits = logits.softmax(-1) if softmax else logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


runs = {f"rate {rate:g}": by_heart(rate) for rate in (1e-4, 5e-3, 0.3)}
runs["rate 0.005, softmax twice"] = by_heart(5e-3, softmax=True)
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, losses in runs.items():
    axis.plot(losses, label=name)
    assert losses[-1] < losses[0]
    print(f"{name:26} first {losses[0]:6.2f}  last {losses[-1]:8.4f}")
axis.axhline(math.log(V), color="grey", linewidth=0.8, linestyle=":")
axis.set(yscale="log", xlabel="step", ylabel="loss on one batch", ylim=(1e-2, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The dotted line is $\ln V$. The small rate also reaches it, but much later. The large learning rate destroys the weights in the first steps. With two softmaxes the loss cannot fall below the 1.82 of the formula above, even for right answers.
#
# ## A learning rate for each step
#
# The best learning rate for later steps is too large for the first steps. In the first steps the weights are random, and Adam's averages cover too few steps. So the rate rises first and falls later. The paper's schedule does both in one line, for a width $d$ and $w$ steps of warm-up:
#
# $$\text{rate}(s) = d^{-1/2} \cdot \min(s^{-1/2},\ s \cdot w^{-3/2}).$$
#
# The next cell uses the paper's $d = 512$ and $w = 4000$:

# %%
paper = build_schedule("paper", learning_rate=1.0, warmup=4000, steps=None, width=512)
for step in (1, 1000, 4000, 16_000, 100_000):
    print(f"step {step:7,}   by hand {512**-0.5 * min(step**-0.5, step * 4000**-1.5):.3e}   here {paper(step):.3e}")
    torch.testing.assert_close(paper(step), 512**-0.5 * min(step**-0.5, step * 4000**-1.5))

# %% [markdown]
# The rate is highest where both terms are equal, at $s = w$. At $s = 4w$, the rate is half of this maximum. The run file offers the schedules below, here with a peak of 1 and a run of 1000 steps:

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for kind in ("inverse-sqrt", "cosine", "linear", "wsd", "constant"):
    schedule = build_schedule(kind, learning_rate=1.0, warmup=100, steps=1000, width=512)
    axis.plot(range(1, 1001), [schedule(step) for step in range(1, 1001)], label=kind)
axis.set(xlabel="step", ylabel="share of the highest rate")
figure.legend(frameon=False, ncols=5, loc="outside upper center")
plt.show()

# %% [markdown]
# ## Label smoothing
#
# The loss on the right token alone has its minimum at $p = 1$, with infinite logits, so the logits grow without end. Label smoothing takes a share $\varepsilon$ from the right token and spreads it evenly over all $V$ tokens:
#
# $$\text{loss} = (1 - \varepsilon) \cdot (-\log p_{\text{right}}) + \frac{\varepsilon}{V} \sum_v -\log p_v.$$
#
# For $V = 5$ and $\varepsilon = 0.1$, the right token should have $0.9 + 0.02 = 0.92$, and the others 0.02 each. A higher probability raises the loss:

# %%
print("   p   plain  smoothed")
for p in (0.5, 0.92, 0.999):
    logits = torch.tensor([[p, *[(1 - p) / 4] * 4]]).log()
    plain, smoothed = (cross_entropy(logits, torch.tensor([0]), label_smoothing=share) for share in (0.0, 0.1))
    by_hand = 0.9 * -math.log(p) + 0.02 * -(math.log(p) + 4 * math.log((1 - p) / 4))
    print(f"{p:5}  {plain:.4f}   {smoothed:.4f}, by hand {by_hand:.4f}")

# %%
p = torch.linspace(0.3, 0.9999, 400)
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
for share in (0.0, 0.1, 0.2):
    logits = torch.stack([p, *[(1 - p) / 4] * 4], -1).log()
    losses = cross_entropy(logits, torch.zeros(400, dtype=torch.long), label_smoothing=share, reduction="none")
    axis.plot(p, losses, label=f"ε = {share:g}, lowest at {float(p[losses.argmin()]):.2f}")
axis.set(xlabel="probability of the right token", ylabel="loss")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# So a smoothed loss never reaches zero. Compare losses only if they have the same share $\varepsilon$.
#
# ## Heads form
#
# During training, the weights of the decoder were saved after 0, 2, 5, 10, 22, ... steps. These steps are about equally spaced on a logarithmic scale, because heads form fast at first and slowly later. The next cell lets each snapshot continue the same text:

# %%
steps = sorted(int(path.name[5:]) for path in (MODELS / "decoder" / "checkpoints" / "snapshots").iterdir())
at = {step: ch.load(f"{MODELS}/decoder@step-{step}") for step in steps}
losses = {step: line_loss(model, valid[::3]) for step, model in at.items()}
for step, model in at.items():
    written = model.generate("Montag, 5. Januar 1998\t", temperature=0, max_new_tokens=14)[0].text
    print(f"step {step:4}   loss {losses[step]:.2f}   {written!r}")

# %% [markdown]
# The untrained model repeats the most recent token. Later it writes the most frequent characters, then the form of a date, then the right date, and last the language. The plot shows the loss of each character of one line. Dark characters are those that the model did not expect:

# %%
line = "Montag, 5. Januar 1998\t1998-01-05\tde"
ids = torch.tensor([[decoder.tokenizer.bos_id, *decoder.tokenizer.encode(line), decoder.tokenizer.eos_id]])
surprise = []
for model in at.values():
    with torch.no_grad():
        surprise.append(cross_entropy(model.module(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none"))
figure, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
image = axis.imshow(torch.stack(surprise), cmap="Blues", aspect="auto", vmin=0, vmax=6)
axis.set(xticks=range(len(line) + 1), yticks=range(len(steps)), yticklabels=steps, ylabel="step")
axis.set_xticklabels([*line.replace("\t", "⇥").replace(" ", "␣"), "end"])
figure.colorbar(image, label="loss")
plt.show()

# %% [markdown]
# All characters of the date become light at about the same step: then the model has learned to attend to the text. Here are the four heads of the second layer at each step:

# %%
maps = {step: model.attention(line) for step, model in at.items()}
figure, axes = plt.subplots(4, len(steps), figsize=(9, 4), layout="constrained")
for head, row in enumerate(axes):
    row[0].set_ylabel(f"head {head}", rotation=0, ha="right", va="center")
    for axis, step in zip(row, steps, strict=True):
        axis.imshow(maps[step].weights("decoder.self", 1, head), cmap="Blues", vmin=0, vmax=0.6, aspect="auto")
        axis.set(xticks=[], yticks=[])
for axis, step in zip(axes[0], steps, strict=True):
    axis.set_title(step)
plt.show()

# %% [markdown]
# At step 0 all heads look alike: they attend to all tokens a little. That is no bug, because they are untrained. If they still look alike at the end, your model has not learned to attend.
#
# Now measure a skill that this task needs. While the model writes the year of the date, the digits of the year stand in the text. How much does each head attend to the digit that comes next?

# %%
tokens = maps[0].tokens
first, tab = tokens.index("1"), tokens.index("\t")
queries, keys = torch.arange(tab, tab + 4), torch.arange(first, first + 4)
weights = torch.tensor(
    [[maps[step].weights("decoder.self", n // 4, n % 4)[queries, keys].mean() for n in range(8)] for step in steps]
)
figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
for n in range(8):
    axis.plot(range(len(steps)), weights[:, n], label=f"layer {n // 4} head {n % 4}")
axis.set(xticks=range(len(steps)), xticklabels=steps, xlabel="step", ylabel="weight on the digit")
figure.legend(frameon=False, ncols=4, fontsize=8, loc="outside upper center")
beside = axis.twinx()
beside.plot(range(len(steps)), losses.values(), color="grey", linestyle=":")
beside.set_ylabel("loss (dotted)")
plt.show()
best = int(weights[-1].argmax())
print("step         ", *(f"{step:5}" for step in steps))
print(f"layer {best // 4} head {best % 4}", *(f"{weight:5.2f}" for weight in weights[:, best].tolist()))

# %% [markdown]
# The weight rises between steps 22 and 215, and the loss falls with it: the head has learned its function. You can browse the steps on the next page. There, layer 0 is step 0, layer 1 is step 2, layer 2 is step 5, and so on.

# %%
stack = torch.stack([torch.stack([maps[step].weights("decoder.self", 1, head) for head in range(4)]) for step in steps])
ch.view_attention(stack.numpy(), tokens, title="the second layer, step by step")

# %% [markdown]
# `clearhead view RUN TEXT --checkpoints` makes such a page for any run. It shows all layers and has a slider for the step.
#
# ## Break it
#
# **The switch.** A training step makes its masks from the target, and then feeds the target without its last token. Both lines look right.


# %%
class Translator(torch.nn.Module):
    shifts_inside = True

    def __init__(self, width=16, vocab=20):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(vocab, width), torch.nn.Linear(width, vocab)
        self.places = torch.nn.Embedding(32, width)
        self.stacks = torch.nn.Transformer(width, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def embed(self, ids):
        return self.table(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, source, target):
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        read = target[:, :-1] if self.shifts_inside else target
        return self.head(self.stacks(self.embed(source), self.embed(read), tgt_mask=future))


# %% [markdown]
# **The symptom.** You are lucky, because the code cannot run. But the message mentions sizes, not targets:

# %%
source, target = torch.randint(1, 20, (2, 7)), torch.randint(1, 20, (2, 6))
try:
    Translator()(source, target)
except (RuntimeError, AssertionError) as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# Code that cuts the mask to the right size inside the model can hide the mistake. Then every token may read one token too far, as in [lesson 4](04_masks.py).
#
# **The detector.**

# %%
print("\n".join(ch.check.module(Translator()).lines()))

# %% [markdown]
# **The fix.** Shift once, where you make the batch. Then the model gets the shifted input of the decoder, and makes its masks from this input:

# %%
Translator.shifts_inside = False
read, labels = target[:, :-1], target[:, 1:]
print("logits", tuple(Translator()(source, read).shape), "for labels", tuple(labels.shape))
print(ch.check.module(Translator()).verdict)

# %% [markdown]
# ## Exercises
#
# **1 · A batch (10 minutes, medium).** `rows` are lists of ids without special tokens. Return three tensors `[batch, tokens]`: the input of the decoder, the labels, and the mask of real input tokens. Fill up short rows with `pad`.


# %% tags=["exercise"]
def make_batch(rows, bos, eos, pad):
    raise NotImplementedError


def check_batch(make_batch):
    batch = make_batch([[7, 8, 9], [5]], 1, 2, 0)
    assert isinstance(batch, tuple) and len(batch) == 3, "return three tensors: the input, the labels, the mask"
    read, labels, real = batch
    assert read.shape == labels.shape == real.shape, (
        f"one label for each token that is read: got {tuple(read.shape)}, {tuple(labels.shape)}, {tuple(real.shape)}"
    )
    assert read.shape == (2, 4), f"three tokens and one special token make 4 positions, not {read.shape[1]}"
    assert read[:, 0].tolist() == [1, 1], "the decoder reads the start token first; without it nothing predicts token 1"
    assert labels[0].tolist() != read[0].tolist(), "the labels equal the input: the model would learn to copy"
    assert labels.tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]], f"labels are the tokens, then the end: {labels.tolist()}"
    assert 2 not in read.tolist()[0], "the input contains the end token: no token follows it"
    assert read[1].tolist() != [1, 5, 2, 0], "a short row still reads its end token: take it off before you fill up"
    assert read.tolist() == [[1, 7, 8, 9], [1, 5, 0, 0]], f"what is read is wrong: {read.tolist()}"
    assert real.dtype == torch.bool, f"a mask is boolean; yours is {real.dtype}"
    assert real.tolist() == [[True] * 4, [True, True, False, False]], f"True is a real token: {real.int().tolist()}"
    return "right"


attempt(lambda: check_batch(make_batch))


# %% tags=["hide-cell", "solution"]
def batch_solution(rows, bos, eos, pad):
    read, labels = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in full], batch_first=True, padding_value=pad)
        for full in ([[bos, *row] for row in rows], [[*row, eos] for row in rows])
    )
    return read, labels, read != pad


assert check_batch(batch_solution) == "right"

# %% [markdown]
# **2 · The schedule of the paper (5 minutes, easy).** Write the learning rate of the paper's schedule for one step.


# %% tags=["exercise"]
def my_rate(step, width, warmup):
    raise NotImplementedError


def check_rate(my_rate):
    case = "width 512, warm-up 4000:"
    assert my_rate(1, 512, 4000) is not None, "return the rate"
    rising, top, later = (my_rate(step, 512, 4000) for step in (1000, 4000, 16_000))
    assert rising < top, f"{case} it should rise until step 4000; at 1000 it is {rising:.2e}, at 4000 {top:.2e}"
    assert abs(top / rising - 4) < 1e-6, f"{case} the rise is a line: step 4000 has 4 times the rate of step 1000"
    assert abs(top / later - 2) < 1e-6, f"{case} it falls with the root: step 16,000 has half of step 4000"
    narrow = my_rate(4000, 128, 4000)
    assert abs(narrow / top - 2) < 1e-6, "a quarter of the width has twice the rate: width to the power -1/2"
    assert abs(top - 6.9877e-4) < 1e-7, f"{case} the highest rate is 6.99e-04; yours is {top:.2e}"
    return "right"


attempt(lambda: check_rate(my_rate))


# %% tags=["hide-cell", "solution"]
def rate_solution(step, width, warmup):
    return width**-0.5 * min(step**-0.5, step * warmup**-1.5)


assert check_rate(rate_solution) == "right"
try:
    check_rate(lambda step, width, warmup: width**-0.5 * step**-0.5)
except AssertionError as error:
    print("a wrong answer reads:", error)

# %% [markdown]
# **3 · Smooth labels (15 minutes, medium).** `logits` has the shape `[tokens, vocabulary]`, `labels` has the shape `[tokens]`. Return the mean of the smoothed loss, without `label_smoothing` of PyTorch.


# %% tags=["exercise"]
def my_smoothed(logits, labels, share):
    raise NotImplementedError


def check_smoothed(my_smoothed):
    torch.manual_seed(3)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    assert my_smoothed(logits, labels, 0.0) is not None, "return the loss"
    none, mine = float(my_smoothed(logits, labels, 0.0)), float(my_smoothed(logits, labels, 0.2))
    plain = float(cross_entropy(logits, labels))
    assert abs(none - 6 * plain) > 1e-9, "that is the sum over tokens: take the mean"
    assert abs(none - float(cross_entropy(logits.softmax(-1), labels))) > 1e-9, "softmax is taken twice"
    assert abs(none - plain) < 1e-9, f"with a share of 0 it is the plain loss, {plain:.4f}; yours is {none:.4f}"
    others = float(cross_entropy(logits, labels, label_smoothing=0.25))
    assert abs(mine - others) > 1e-9, "you spread the share over the 4 other tokens; it goes over all 5"
    right = float(cross_entropy(logits, labels, label_smoothing=0.2))
    assert abs(mine - plain) > 1e-9, "the share has no effect"
    assert abs(mine - 0.8 * plain) > 1e-9, "the share is taken from the right token, but no token gets it"
    assert abs(mine - right) < 1e-9, f"with a share of 0.2 expected {right:.4f}, got {mine:.4f}: see the formula above"
    return "right"


attempt(lambda: check_smoothed(my_smoothed))


# %% tags=["hide-cell", "solution"]
def solution_smoothed(logits, labels, share):
    surprise = -logits.log_softmax(-1)
    right = surprise.gather(-1, labels[:, None])[:, 0]
    return ((1 - share) * right + share * surprise.mean(-1)).mean()


def over_others(logits, labels, share):
    surprise = -logits.log_softmax(-1)
    right = surprise.gather(-1, labels[:, None])[:, 0]
    return ((1 - share) * right + share * (surprise.sum(-1) - right) / (logits.shape[-1] - 1)).mean()


assert check_smoothed(solution_smoothed) == "right"
try:
    check_smoothed(over_others)
except AssertionError as error:
    print("a wrong answer reads:", error)
