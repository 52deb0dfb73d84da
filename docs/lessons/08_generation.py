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
# # 8 · Generation
#
# You need softmax from [lesson 3](03_attention.py) and masks from [lesson 4](04_masks.py). Afterwards you know what each knob of `generate` does to the next token, in which order, and why a text repeats itself, ends too early, or changes with its neighbours.
#
# A model gives probabilities of the next token and nothing else. Which one is taken is your choice, and it changes the text as much as the model does.

# %%
import datetime
import inspect

import matplotlib.pyplot as plt
import torch
from shared import MODELS, attempt, dates_model, decoder_model

import clearhead as ch
from clearhead.generate.processors import build_logits_warpers

torch.set_printoptions(precision=4, sci_mode=False)
model = decoder_model()

# %% [markdown]
# ## The next token
#
# This decoder writes lines such as `5. Januar 1998 ⇥ 1998-01-05 ⇥ de`, character by character, in dozens of languages; ⇥ is a tab. In Catalan, Spanish, Galician and Portuguese a date begins with `12 de `, and then comes a month. Its output layer gives one number for every character, the logits $z$, and
#
# $$p_i = \frac{e^{z_i}}{\sum_j e^{z_j}}.$$


# %%
def next_logits(text):
    with torch.no_grad():
        return model.tree(model.read(text).source.ids).logits[0, -1]


def tokens(ids):
    return [repr(token)[1:-1] for token in model.tokenizer.tokens(ids.tolist())]


logits = next_logits("12 de ")
best = logits.topk(14).indices
for token, index in zip(tokens(best[:5]), best[:5]):
    print(f"{token!r}  logit {logits[index]:6.2f}  probability {logits.softmax(-1)[index]:.3f}")

# %% [markdown]
# Draw from these probabilities, and each token comes as often as they say. Here are two thousand first characters beside the probabilities:

# %%
drawn = model.generate("12 de ", max_new_tokens=1, num_return_sequences=2000, temperature=1, seed=0)
counts = [sum(one.tokens[0] == token for one in drawn) for token in model.tokenizer.tokens(best.tolist())]
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.bar(range(14), logits.softmax(-1)[best], color="#9ecae1", label="probability")
axis.plot(range(14), [count / 2000 for count in counts], "o", color="#c0392b", label="share of 2,000 draws")
axis.set_xticks(range(14), tokens(best))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Greedy, and a seed
#
# **Greedy** takes the most probable token every time, and always writes the same. **Sampling** draws. A seed makes a draw repeatable: a call without one gives another text each time, and nobody can find out why yours was odd.

# %%
print("greedy ", model.generate("12 de ", temperature=0)[0].text)
for seed in (1, 2, 1):
    print("seed", seed, model.generate("12 de ", temperature=1, seed=seed)[0].text)

# %% [markdown]
# The numbers that are drawn for a text depend on the seed and on its prompt alone. So it stays the same whatever else is in the batch:

# %%
beside = model.generate(["3. ", "12 de ", "Donnerstag, 17. September 20"], temperature=1, seed=1)
print(beside[1][0].text == model.generate("12 de ", temperature=1, seed=1)[0].text)

# %% [markdown]
# ## Temperature
#
# Divide all logits by $T$ before the softmax. Below 1 the likely tokens gain, above 1 the unlikely ones; at 0 only the best is left, which is greedy. For the scores 2, 4 and 5:

# %%
scores = torch.tensor([2.0, 4, 5])
for temperature in (0.5, 1, 2):
    print(f"T = {temperature:3}", (scores / temperature).softmax(-1))

# %% [markdown]
# A small $T$ makes large numbers, and $e^{z}$ of a large number is infinite. Infinity by infinity is NaN. Subtract the largest score first: no probability changes, since above and below are divided by the same, and no power is above 1.

# %%
cold = scores / 0.01
print("as written:      ", cold.exp() / cold.exp().sum())
shifted = cold - cold.max()
print("largest one off: ", shifted.exp() / shifted.exp().sum())

# %% [markdown]
# ## The filters, in their order
#
# A filter takes tokens out: their logit becomes $-\infty$ and their probability 0; the others share what was theirs. These are the usual five, in the order in which transformers and clearhead apply them:
#
# 1. **Repetition penalty** $\theta$: a token that has occurred gets $z / \theta$ if $z$ is positive, else $z \cdot \theta$.
# 2. **No repeated n-gram**: a token that would complete n tokens which have occurred is banned.
# 3. **Temperature**.
# 4. **Top-k**: the k most probable stay.
# 5. **Top-p**: the fewest most probable tokens that have probability p together stay.


# %%
def penalty(z, text_ids, strength):
    seen = z[text_ids]
    return z.index_put((text_ids,), torch.where(seen < 0, seen * strength, seen / strength))


def no_repeat(z, text_ids, n):
    ids = text_ids.tolist()
    done = [ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == ids[len(ids) - n + 1 :]]
    return z.index_fill(0, torch.tensor(done, dtype=torch.int64), -torch.inf)


def top_k(z, k):
    return z.masked_fill(z < z.topk(k).values[-1], -torch.inf)


def top_p(z, p):
    ordered, order = z.softmax(-1).sort(descending=True)
    before = ordered.cumsum(0) - ordered
    return z.index_fill(0, order[before >= p], -torch.inf)


# %% [markdown]
# What has been written is `12 de `. It ends in a space, and a `d` has followed a space before, so the pair is banned; and each of its characters is made less likely. The bars of each step, from what the step before has left:

# %%
ids = model.read("12 de ").source.ids[0]
steps = {
    "the model": lambda z: z,
    "repetition penalty 1.2": lambda z: penalty(z, ids, 1.2),
    "no 2-gram twice": lambda z: no_repeat(z, ids, 2),
    "temperature 0.7": lambda z: z / 0.7,
    "top-k 8": lambda z: top_k(z, 8),
    "top-p 0.8": lambda z: top_p(z, 0.8),
}
figure, axes = plt.subplots(3, 2, figsize=(8, 5.4), sharex=True, sharey=True, layout="constrained")
z = logits
for axis, (name, step) in zip(axes.flat, steps.items()):
    z = step(z)
    axis.bar(range(14), z.softmax(-1)[best], color="#3b78b0")
    axis.set_title(f"{name}: {int((z > -torch.inf).sum())} tokens left", fontsize=10)
    axis.set_xticks(range(14), tokens(best))
plt.show()

# %% [markdown]
# Do they do in `generate` what they do here? Draw with the same options. No token may come that the last picture does not have:

# %%
options = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "temperature": 0.7, "top_k": 8, "top_p": 0.8}
drawn = model.generate("12 de ", max_new_tokens=1, num_return_sequences=2000, seed=0, **options)
left = set(model.tokenizer.tokens(torch.nonzero(z > -torch.inf)[:, 0].tolist()))
print("drawn", sorted({one.tokens[0] for one in drawn}), "left", sorted(left))

# %% [markdown]
# In the library each is a function of the logits, and the order of the last ones is this:

# %%
print(inspect.getsource(build_logits_warpers))

# %% [markdown]
# Order matters. Top-p behind the temperature looks at other probabilities than top-p in front of it, and not every program has the same order: llama.cpp cools last. So the same numbers on two programs are two samplers.

# %%
for temperature in (0.5, 1.5):
    behind, front = top_p(logits / temperature, 0.9), top_p(logits, 0.9) / temperature
    print(f"T = {temperature}: top-p 0.9 behind it leaves {int((behind > -torch.inf).sum())} tokens,", end=" ")
    print(f"in front of it {int((front > -torch.inf).sum())}")

# %% [markdown]
# ## What they cost
#
# A line of this model can be checked: is there such a date? Two hundred lines for each setting. The last one but one is the call with which a well-known tutorial lets GPT-2 write: `max_length=100, no_repeat_ngram_size=2, top_k=50, top_p=0.95, do_sample=True, temperature=0.7`.


# %%
def is_date(line):
    try:
        return bool(datetime.date.fromisoformat(line.split("\t")[1]))
    except (IndexError, ValueError):
        return False


gpt2_call = {"no_repeat_ngram_size": 2, "top_k": 50, "top_p": 0.95, "temperature": 0.7}
settings = {
    "T = 1.5": {"temperature": 1.5},
    "T = 1": {"temperature": 1},
    "T = 0.7": {"temperature": 0.7},
    "T = 0.2": {"temperature": 0.2},
    "T = 1, top-p 0.8": {"temperature": 1, "top_p": 0.8},
    "that call": gpt2_call,
    "without its ban": {**gpt2_call, "no_repeat_ngram_size": 0},
}
shares, kinds = [], []
for name, chosen in settings.items():
    lines = [one.text for one in model.generate("", num_return_sequences=200, seed=0, **chosen)]
    shares.append(sum(map(is_date, lines)) / len(lines))
    kinds.append(len({line.split("\t")[-1] for line in lines if is_date(line)}))
    print(f"{name:17} {shares[-1]:4.0%} have a date, in {kinds[-1]} languages   {lines[0]!r}")

# %% [markdown]
# Cold text is right and all alike; hot text is varied and wrong. A filter that cuts the tail keeps most of the variety and loses most of the nonsense.
#
# And one knob does harm here: no pair of characters may come twice, so no line can write its year a second time. A ban knows nothing of your text. Use it where repeating is never right.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True, layout="constrained")
for axis, values, label in zip(axes, (shares, kinds), ("share with a date", "languages")):
    axis.barh(range(len(settings)), values, color="#3b78b0")
    axis.set(xlabel=label)
axes[0].set_yticks(range(len(settings)), list(settings))
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# That call has two more traps. It names no seed. And its `max_length` counts the prompt, so a long prompt leaves little to write. Here `max_new_tokens` counts what is new, and `stop_reason` says whether a text ended by itself:

# %%
for most in (4, 100):
    (one,) = model.generate("5. Januar 1998\t", temperature=0, max_new_tokens=most)
    print(repr(one.text), one.stop_reason)

# %% [markdown]
# ## My translation repeats itself
#
# Most texts that go round in circles come from a model that has not learned enough: when nothing is certain, what has just been written is the best guess. Greedy search cannot leave the circle, since the same state gives the same token. Watch the translator of dates at four steps of its training:


# %%
def repeated(text, n=3):
    pieces = [text[i : i + n] for i in range(len(text) - n + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


translator = dates_model()
table = (MODELS / "dates" / "data" / "valid.tsv").read_text(encoding="utf-8").splitlines()
pairs = [line.split("\t")[:2] for line in table[:100]]
for step in ("step-22", "step-46", "step-100", "best"):
    young = ch.load(f"{MODELS / 'dates'}@{step}")
    found = young.translate([source for source, _ in pairs], beam_size=1)
    share = sum(map(repeated, found)) / len(found)
    right = sum(text == target for text, (_, target) in zip(found, pairs)) / len(pairs)
    print(f"{step:9} repeats {share:4.0%}, right {right:4.0%}   {found[1]!r}")

# %% [markdown]
# Penalties and bans break the circle, and leave the cause alone. On the trained model they spoil what was right, because a decoder's prompt counts as text that has occurred:

# %%
for name, chosen in {"greedy": {}, "3-gram": {"no_repeat_ngram_size": 3}, "1.5": {"repetition_penalty": 1.5}}.items():
    print(f"{name:7}", repr(model.generate("5. Januar 1998\t", temperature=0, **chosen)[0].text))

# %% [markdown]
# So look for the cause first: too few steps or too little data; a prompt in another form than in training; an end token that training never showed. Then sample, or search with beams. Then a mild penalty.
#
# ## Beams
#
# Greedy search takes the best token and cannot take it back. **Beam search** keeps the $B$ best beginnings, extends all of them, keeps the best $B$ again, and sets aside those that end. It compares
#
# $$\text{score}(y) = \frac{\sum_t \log p(y_t \mid y_{<t})}{|y|^{\alpha}}.$$
#
# Without the division ($\alpha = 0$) each further token costs something, and short texts win. Give the translator a date without a year, and it has to guess:

# %%
for one in translator.translate_n_best("5. Januar", n=4):
    total, length = one.log_probability, len(one.tokens)
    print(f"{one.text}  sum {total:.3f}, {length} tokens, score {total:.3f} / {length} = {one.score:.3f}")

# %% [markdown]
# The tree of such a search, from left to right. Each step keeps three beginnings, best on top. Where the text says what to write, each has one child; where the year stands, they fork, and others end:

# %%
here = translator.attention("5. Januar", beam_size=3)
figure, axis = plt.subplots(figsize=(8, 2), layout="constrained")
places, height = {}, {}
for number, node in enumerate(here.beams()):
    if node.state != "pruned":
        places[number] = node.step, -height.setdefault(node.step, 0)
        height[node.step] += 1
        color = "#c0392b" if node.state == "finished" else "#3b78b0"
        axis.text(
            *places[number], node.token, ha="center", va="center", bbox={"boxstyle": "round", "fc": "w", "ec": color}
        )
        if node.parent in places:
            axis.plot(*zip(places[node.parent], places[number]), color="#9aa5b1", zorder=0)
axis.set(ylim=(-2.6, 0.6))
axis.axis("off")
plt.show()
pruned = sum(node.state == "pruned" for node in here.beams())
print(len(places), "kept or finished,", pruned, "considered and given up")

# %% [markdown]
# Press **Beams** in the explorer for all that was considered: the probability of each token, each score, and why it was given up.

# %%
here

# %% [markdown]
# A search finds what the model thinks, not what is right. Here is the half-trained model with greedy search, and with beams:

# %%
young, sources = ch.load(f"{MODELS / 'dates'}@step-100"), [source for source, _ in pairs]
for beams in (1, 5):
    found = young.translate(sources, beam_size=beams)
    sums = [one.log_probability for one in young.score(sources, found)]
    right = sum(text == target for text, (_, target) in zip(found, pairs))
    print(f"{beams} beams: mean log-probability {sum(sums) / len(sums):.3f}, {right} of {len(pairs)} right")

# %% [markdown]
# More probable, since that is what is searched for. Right only as far as the model is.
#
# And the length penalty is a taste, not a truth. Let the decoder search for its best line. A large $\alpha$ pays so much for length that a text which never ends can win:

# %%
for alpha in (0, 1, 2):
    (one,) = model.generate("", beam_size=4, length_penalty=alpha, max_new_tokens=100)
    print(f"α = {alpha}: {len(one.tokens):3} tokens, stopped by {one.stop_reason}: {one.text[:60]!r}")

# %% [markdown]
# ## Break it
#
# **The switch.** Prompts of different lengths become one batch: the short ones get padding in front. Here is greedy search by hand, on the whole batch. The switch is whether the model hears of the padding.


# %%
def continued(prompts, tell_mask):
    rows = [model.read(prompt).source.ids[0] for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    with torch.no_grad():
        for _ in range(10):
            z = model.tree(ids, mask=mask if tell_mask else None).logits[:, -1]
            ids = torch.cat([ids, z.argmax(-1, keepdim=True)], 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return [model.tokenizer.decode(row.tolist()) for row in ids[:, longest:]]


# %% [markdown]
# **The symptom.** Nothing fails, and what comes is a date of ten characters. Only it is often not the right one:

# %%
prompts, targets = [f"{source}\t" for source, _ in pairs], [target for _, target in pairs]
broken = continued(prompts, tell_mask=False)
print(sum(text == target for text, target in zip(broken, targets)), "of", len(pairs), "are right")

# %% [markdown]
# **The detector.** A prompt must give alone what it gives in company. Alone it has no padding:

# %%
short = min(prompts, key=len)
alone, beside = continued([short], tell_mask=False), continued([short, max(prompts, key=len)], tell_mask=False)
print(f"{short!r} alone: {alone[0]!r}, beside a long prompt: {beside[0]!r}")
differ = [text for text, prompt in zip(broken, prompts) if text != continued([prompt], tell_mask=False)[0]]
print(f"{len(differ)} of {len(prompts)} prompts depend on their batch")
assert differ

# %% [markdown]
# `clearhead check RUN` asks the same of any model: padding on either side, batches, and a cache.
#
# **The mend.** Tell the model which tokens are real. The mask hides the padding, and positions count real tokens only:

# %%
mended = continued(prompts, tell_mask=True)
print(sum(text == target for text, target in zip(mended, targets)), "of", len(pairs), "are right")
still = [text for text, prompt in zip(mended, prompts) if text != continued([prompt], tell_mask=False)[0]]
print(f"{len(still)} of {len(prompts)} prompts depend on their batch")
assert len(still) < len(differ)

# %% [markdown]
# ## Exercises
#
# **1 · Another filter (10 minutes, easy).** Min-p keeps each token whose probability is at least p times the largest one: few where the model is certain, many where it is not. Write it for one row of logits. What goes becomes $-\infty$, what stays keeps its logit.


# %% tags=["exercise"]
def min_p(z, p):
    raise NotImplementedError


def check_min_p(function):
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    for p, expected in ((0.2, [1, 2, 3]), (0.5, [1, 3]), (1.0, [1]), (0.0, [0, 1, 2, 3])):
        z = shares.log() + 3
        found = function(z.clone(), p)
        assert isinstance(found, torch.Tensor), f"return the changed logits; yours returns {type(found).__name__}"
        assert found.shape == z.shape, f"return logits of shape {tuple(z.shape)}; yours have {tuple(found.shape)}"
        stays = torch.nonzero(found > -torch.inf)[:, 0].tolist()
        about = f"of the probabilities 0.05, 0.5, 0.15, 0.3 and p = {p} you keep tokens {stays}"
        assert stays == expected, f"{about}; the least that may stay is {p} · 0.5 = {p * 0.5:.2f}: tokens {expected}"
        assert torch.equal(found[stays], z[stays]), f"{about}, rightly; but their logits must stay as they were"
    return "right"


attempt(lambda: check_min_p(min_p))


# %% tags=["hide-cell", "solution"]
def solved_min_p(z, p):
    shares = z.softmax(-1)
    return z.masked_fill(shares < p * shares.max(), -torch.inf)


assert check_min_p(solved_min_p) == "right"
attempt(lambda: check_min_p(lambda z, p: z.masked_fill(z.softmax(-1) < p, -torch.inf)))  # a wrong answer

# %% [markdown]
# **2 · Short or long (5 minutes, easy).** One hypothesis has 6 tokens and a sum of −6.0, another 10 tokens and −7.5. Which wins at $\alpha = 0$, which at $\alpha = 1$ (6 or 10)? And from which $\alpha$ on does the long one win, to two digits?

# %% tags=["exercise"]
at_0, at_1, turns_at = None, None, None


def check_lengths(at_0, at_1, turns_at):
    if None in (at_0, at_1, turns_at):
        return "not written yet"
    assert at_0 == 6, "α = 0 divides by 1: the larger sum wins, and −6.0 is larger than −7.5"
    assert at_1 == 10, "α = 1 compares means of a token: −6.0 / 6 = −1.00 and −7.5 / 10 = −0.75"
    score_6, score_10 = -6.0 / 6**turns_at, -7.5 / 10**turns_at
    assert abs(score_6 - score_10) < 0.01, (
        f"at α = {turns_at} the scores are {score_6:.3f} and {score_10:.3f}; look for the α where they are equal"
    )
    return "right: 6.0 / 6^α = 7.5 / 10^α, so α = ln(7.5 / 6) / ln(10 / 6)"


attempt(lambda: check_lengths(at_0, at_1, turns_at))

# %% tags=["hide-cell", "solution"]
print(check_lengths(6, 10, 0.44))
attempt(lambda: check_lengths(6, 10, 1.25))  # a wrong answer

# %% [markdown]
# **3 · A penalty that rewards (5 minutes, medium).** The repetition penalty was first published as $z / \theta$ for every token that has occurred. Which logit of token 0 becomes **more** probable by it? Give one number; token 1 has the logit 1, and only token 0 has occurred.

# %% tags=["exercise"]
mine = None


def check_reward(mine):
    if mine is None:
        return "not written yet"
    before = torch.tensor([float(mine), 1.0]).softmax(-1)[0]
    after = torch.tensor([float(mine) / 1.5, 1.0]).softmax(-1)[0]
    assert after > before, (
        f"{mine} / 1.5 = {mine / 1.5:.2f}, and its probability goes from {before:.3f} to {after:.3f}: look for a number "
        "that grows when it is divided"
    )
    return f"right: from {before:.3f} to {after:.3f}; so a negative logit is multiplied instead"


attempt(lambda: check_reward(mine))

# %% tags=["hide-cell", "solution"]
print(check_reward(-2))
attempt(lambda: check_reward(0.5))  # a wrong answer
