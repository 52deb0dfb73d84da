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
# You need softmax from [lesson 3](03_attention.py) and masks from [lesson 4](04_masks.py). After this lesson you know how each option of `generate` changes the next token, and in which order the options act. You also know why a text repeats itself, ends too early, or changes with its batch.
#
# A model only gives probabilities for the next token. You choose how to pick a token from these probabilities. This choice changes the text as much as the model does.

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
# This decoder writes lines such as `5. Januar 1998 ⇥ 1998-01-05 ⇥ de`, character by character, in dozens of languages; ⇥ is a tab. In Catalan, Spanish, Galician and Portuguese a date begins with, for example, `12 de `, and the month follows. The output layer gives one number for every character, its logit $z$. Softmax turns the logits into probabilities:
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
# If you draw from these probabilities, each token appears as often as its probability says. The plot compares two thousand drawn first characters with the probabilities:

# %%
drawn = model.generate("12 de ", max_new_tokens=1, num_return_sequences=2000, temperature=1, seed=0)
counts = [sum(draw.tokens[0] == token for draw in drawn) for token in model.tokenizer.tokens(best.tolist())]
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.bar(range(14), logits.softmax(-1)[best], color="#9ecae1", label="probability")
axis.plot(range(14), [count / 2000 for count in counts], "o", color="#c0392b", label="share of 2,000 draws")
axis.set_xticks(range(14), tokens(best))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Greedy search, sampling and seeds
#
# **Greedy search** takes the most probable token every time, so it always writes the same text. **Sampling** draws the token. A seed makes a draw repeatable. Without a seed, each call gives another text, and you cannot reproduce a strange text.

# %%
print("greedy ", model.generate("12 de ", temperature=0)[0].text)
for seed in (1, 2, 1):
    print("seed", seed, model.generate("12 de ", temperature=1, seed=seed)[0].text)

# %% [markdown]
# The random numbers for a text depend only on the seed and on the prompt. So the text does not depend on the other prompts in the batch:

# %%
batch = model.generate(["3. ", "12 de ", "Donnerstag, 17. September 20"], temperature=1, seed=1)
print(batch[1][0].text == model.generate("12 de ", temperature=1, seed=1)[0].text)

# %% [markdown]
# ## Temperature
#
# Temperature divides all logits by $T$ before the softmax. Below 1 the likely tokens gain, above 1 the unlikely tokens gain. At 0 only the best token remains, which is greedy search. The next cell shows this for the logits 2, 4 and 5:

# %%
scores = torch.tensor([2.0, 4, 5])
for temperature in (0.5, 1, 2):
    print(f"T = {temperature:3}", (scores / temperature).softmax(-1))

# %% [markdown]
# A small $T$ makes large numbers, and $e^{z}$ of a large number is infinite in floating point. Infinity divided by infinity is NaN. So subtract the largest logit first. The probabilities do not change, because numerator and denominator are divided by the same number. Then no power is above 1.

# %%
cold = scores / 0.01
print("as written:      ", cold.exp() / cold.exp().sum())
shifted = cold - cold.max()
print("minus largest:   ", shifted.exp() / shifted.exp().sum())

# %% [markdown]
# ## The filters and their order
#
# A filter removes tokens: their logit becomes $-\infty$, and the other tokens get their probability. Filters, penalty and temperature are five steps. transformers and clearhead apply them in this order:
#
# 1. **Repetition penalty** $\theta$: a token that has occurred before gets the logit $z / \theta$ if $z$ is positive, otherwise $z \cdot \theta$.
# 2. **No repeated n-gram**: a token is banned if it would repeat an n-gram of the text.
# 3. **Temperature**: all logits are divided by $T$.
# 4. **Top-k**: only the k most probable tokens stay.
# 5. **Top-p**: only the most probable tokens stay, just enough of them to reach a total probability of p.


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
# The text so far is `12 de `. It ends in a space, and a `d` has followed a space before. So `d` would repeat this pair, and it is banned. The penalty lowers the probability of each character that has occurred. Each plot shows one step, applied to the result of the step before:

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
# Does `generate` do the same? Draw with the same options. Each drawn token must be one of the tokens that are left in the last plot:

# %%
options = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "temperature": 0.7, "top_k": 8, "top_p": 0.8}
drawn = model.generate("12 de ", max_new_tokens=1, num_return_sequences=2000, seed=0, **options)
left = set(model.tokenizer.tokens(torch.nonzero(z > -torch.inf)[:, 0].tolist()))
print("drawn", sorted({draw.tokens[0] for draw in drawn}), "left", sorted(left))

# %% [markdown]
# In clearhead each of these steps is a function of the logits. The function `build_logits_warpers` returns temperature, top-k, top-p and min-p in their order:

# %%
print(inspect.getsource(build_logits_warpers))

# %% [markdown]
# The order matters. Top-p after the temperature sees other probabilities than top-p before it. Programs differ in this order: llama.cpp applies the temperature last. So the same options can give different probabilities in two programs.

# %%
for temperature in (0.5, 1.5):
    after, front = top_p(logits / temperature, 0.9), top_p(logits, 0.9) / temperature
    print(f"T = {temperature}: top-p 0.9 after it leaves {int((after > -torch.inf).sum())} tokens,", end=" ")
    print(f"before it {int((front > -torch.inf).sum())}")

# %% [markdown]
# ## The cost of these options
#
# You can check a line of this model: does its date exist? The next cell generates two hundred lines for each setting. The setting "that call" is from a well-known tutorial about GPT-2: `max_length=100, no_repeat_ngram_size=2, top_k=50, top_p=0.95, do_sample=True, temperature=0.7`.


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
    lines = [sample.text for sample in model.generate("", num_return_sequences=200, seed=0, **chosen)]
    shares.append(sum(map(is_date, lines)) / len(lines))
    kinds.append(len({line.split("\t")[-1] for line in lines if is_date(line)}))
    print(f"{name:17} {shares[-1]:4.0%} have a date, in {kinds[-1]} languages   {lines[0]!r}")

# %% [markdown]
# At a low temperature the texts are right but alike. At a high temperature they are varied but wrong. Top-k and top-p cut off the unlikely tokens: they keep most of the variety and remove most of the nonsense.
#
# One option does harm here. The ban on repeated n-grams allows no pair of characters twice, so no line can write its year a second time. A ban does not know the meaning of your text. Use it only where a repetition is never right.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True, layout="constrained")
for axis, values, label in zip(axes, (shares, kinds), ("share with a date", "languages")):
    axis.barh(range(len(settings)), values, color="#3b78b0")
    axis.set(xlabel=label)
axes[0].set_yticks(range(len(settings)), list(settings))
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# The call of the tutorial has two more traps. It sets no seed. Its `max_length` also counts the tokens of the prompt, so a long prompt leaves few tokens to write. In clearhead `max_new_tokens` counts only new tokens, and `stop_reason` tells why a text ended:

# %%
for most in (4, 100):
    (continuation,) = model.generate("5. Januar 1998\t", temperature=0, max_new_tokens=most)
    print(repr(continuation.text), continuation.stop_reason)

# %% [markdown]
# ## My translation repeats itself
#
# Most texts that repeat themselves come from a model that has not learned enough. When such a model is uncertain, it repeats the most recent text. Greedy search cannot leave such a loop, because the same state gives the same token. Watch the translator of dates at four steps of its training:


# %%
def share_of_repeats(text, n=3):
    pieces = [text[i : i + n] for i in range(len(text) - n + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


translator = dates_model()
table = (MODELS / "dates" / "data" / "valid.tsv").read_text(encoding="utf-8").splitlines()
pairs = [line.split("\t")[:2] for line in table[:100]]
for step in ("step-22", "step-46", "step-100", "best"):
    young = ch.load(f"{MODELS / 'dates'}@{step}")
    translations = young.translate([source for source, _ in pairs], beam_size=1)
    share = sum(map(share_of_repeats, translations)) / len(translations)
    right = sum(text == target for text, (_, target) in zip(translations, pairs)) / len(pairs)
    print(f"{step:9} repeats {share:4.0%}, right {right:4.0%}   {translations[1]!r}")

# %% [markdown]
# Penalties and bans break the loop but do not remove its cause. With the trained decoder they make right answers wrong, because the tokens of the prompt count as tokens that have occurred:

# %%
for name, chosen in {"greedy": {}, "3-gram": {"no_repeat_ngram_size": 3}, "1.5": {"repetition_penalty": 1.5}}.items():
    print(f"{name:7}", repr(model.generate("5. Januar 1998\t", temperature=0, **chosen)[0].text))

# %% [markdown]
# So look for the cause first. It may be too few steps, too little data, or an end token that training never showed. The prompt may also have another form than in training. Then try sampling or beam search, and only then a mild penalty.
#
# ## Beams
#
# Greedy search takes the best token and cannot revise it. **Beam search** keeps the $B$ best beginnings, which are called hypotheses. It extends all of them, keeps the best $B$ again, and sets finished hypotheses aside. At the end, the hypothesis with the highest score wins:
#
# $$\text{score}(y) = \frac{\sum_t \log p(y_t \mid y_{<t})}{|y|^{\alpha}}.$$
#
# Without the division ($\alpha = 0$) each further token lowers the score, so short texts win. If you give the translator a date without a year, it has to guess the year:

# %%
for hypothesis in translator.translate_n_best("5. Januar", n=4):
    total, length = hypothesis.log_probability, len(hypothesis.tokens)
    print(f"{hypothesis.text}  sum {total:.3f}, {length} tokens, score {total:.3f} / {length} = {hypothesis.score:.3f}")

# %% [markdown]
# The plot shows the tree of such a search, from left to right. Each step keeps three hypotheses, with the best on top. Where the text determines the next token, each hypothesis has one child. At the year the hypotheses branch, and some are pruned:

# %%
beam_search = translator.attention("5. Januar", beam_size=3)
figure, axis = plt.subplots(figsize=(8, 2), layout="constrained")
places, height = {}, {}
for number, node in enumerate(beam_search.beams()):
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
pruned = sum(node.state == "pruned" for node in beam_search.beams())
print(len(places), "kept or finished,", pruned, "considered and given up")

# %% [markdown]
# Press **Beams** in the explorer to see all hypotheses: the probability of each token, each score, and the reason for pruning.

# %%
beam_search

# %% [markdown]
# A search finds texts that the model considers probable, not texts that are right. Compare greedy search and beam search on the half-trained model:

# %%
young, sources = ch.load(f"{MODELS / 'dates'}@step-100"), [source for source, _ in pairs]
for beams in (1, 5):
    translations = young.translate(sources, beam_size=beams)
    sums = [score.log_probability for score in young.score(sources, translations)]
    right = sum(text == target for text, (_, target) in zip(translations, pairs))
    print(f"{beams} beams: mean log-probability {sum(sums) / len(sums):.3f}, {right} of {len(pairs)} right")

# %% [markdown]
# Beam search finds more probable texts, because it searches for them. But a more probable text is right only if the model is right.
#
# There is no single right length penalty. The next cell lets the decoder search for its best line with different values of $\alpha$. A large $\alpha$ rewards length so much that a text without an end can win:

# %%
for alpha in (0, 1, 2):
    (continuation,) = model.generate("", beam_size=4, length_penalty=alpha, max_new_tokens=100)
    print(
        f"α = {alpha}: {len(continuation.tokens):3} tokens, stopped by {continuation.stop_reason}: {continuation.text[:60]!r}"
    )

# %% [markdown]
# ## Break it
#
# **The switch.** Put prompts of different lengths into one batch, with padding in front of the short ones. The function below is greedy search on the whole batch. The switch decides whether the model gets the padding mask.


# %%
def continue_prompts(prompts, tell_mask):
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
# **The symptom.** No error appears, and the output is a date of ten characters. But the date is often wrong:

# %%
prompts, targets = [f"{source}\t" for source, _ in pairs], [target for _, target in pairs]
broken = continue_prompts(prompts, tell_mask=False)
print(sum(text == target for text, target in zip(broken, targets)), "of", len(pairs), "are right")

# %% [markdown]
# **The detector.** A prompt must give the same text alone and in a batch. Alone it has no padding:

# %%
short = min(prompts, key=len)
alone, in_batch = (
    continue_prompts([short], tell_mask=False),
    continue_prompts([short, max(prompts, key=len)], tell_mask=False),
)
print(f"{short!r} alone: {alone[0]!r}, with a long prompt: {in_batch[0]!r}")
differ = [text for text, prompt in zip(broken, prompts) if text != continue_prompts([prompt], tell_mask=False)[0]]
print(f"{len(differ)} of {len(prompts)} prompts depend on their batch")
assert differ

# %% [markdown]
# `clearhead check RUN` makes this comparison for any model: with padding on either side, in batches, and with a KV cache.
#
# **The fix.** Pass the mask of real tokens to the model. The mask hides the padding, and the positions count only real tokens:

# %%
mended = continue_prompts(prompts, tell_mask=True)
print(sum(text == target for text, target in zip(mended, targets)), "of", len(pairs), "are right")
still = [text for text, prompt in zip(mended, prompts) if text != continue_prompts([prompt], tell_mask=False)[0]]
print(f"{len(still)} of {len(prompts)} prompts depend on their batch")
assert len(still) < len(differ)

# %% [markdown]
# ## Exercises
#
# **1 · Another filter (10 minutes, easy).** Min-p keeps each token that has at least p times the largest probability. So it keeps few tokens if the model is certain and many if it is not. Write min-p for one row of logits. The logits of removed tokens become $-\infty$, the others do not change.


# %% tags=["exercise"]
def min_p(z, p):
    raise NotImplementedError


def check_min_p(function):
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    for p, expected in ((0.2, [1, 2, 3]), (0.5, [1, 3]), (1.0, [1]), (0.0, [0, 1, 2, 3])):
        z = shares.log() + 3
        filtered = function(z.clone(), p)
        assert isinstance(filtered, torch.Tensor), f"return the changed logits; yours returns {type(filtered).__name__}"
        assert filtered.shape == z.shape, f"return logits of shape {tuple(z.shape)}; yours have {tuple(filtered.shape)}"
        stays = torch.nonzero(filtered > -torch.inf)[:, 0].tolist()
        about = f"of the probabilities 0.05, 0.5, 0.15, 0.3 and p = {p} you keep tokens {stays}"
        assert stays == expected, f"{about}; the least that may stay is {p} · 0.5 = {p * 0.5:.2f}: tokens {expected}"
        assert torch.equal(filtered[stays], z[stays]), f"{about}, which is right; but their logits must not change"
    return "right"


attempt(lambda: check_min_p(min_p))


# %% tags=["hide-cell", "solution"]
def min_p_solution(z, p):
    shares = z.softmax(-1)
    return z.masked_fill(shares < p * shares.max(), -torch.inf)


assert check_min_p(min_p_solution) == "right"
attempt(lambda: check_min_p(lambda z, p: z.masked_fill(z.softmax(-1) < p, -torch.inf)))  # a wrong answer

# %% [markdown]
# **2 · Short or long (5 minutes, easy).** One hypothesis has 6 tokens and a sum of log-probabilities of −6.0. Another has 10 tokens and a sum of −7.5. Which length wins at $\alpha = 0$, and which at $\alpha = 1$ (6 or 10)? From which $\alpha$ on does the long one win, to two digits?

# %% tags=["exercise"]
at_0, at_1, turns_at = None, None, None


def check_lengths(at_0, at_1, turns_at):
    if None in (at_0, at_1, turns_at):
        raise NotImplementedError
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
# **3 · A penalty that rewards (5 minutes, medium).** The repetition penalty was first published as $z / \theta$ for every token that has occurred. Suppose that only token 0 has occurred, and that token 1 has the logit 1. For which logit of token 0 does this formula make token 0 **more** probable? Give one number.

# %% tags=["exercise"]
mine = None


def check_reward(mine):
    if mine is None:
        raise NotImplementedError
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
