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
# # 6 · Three families
#
# You need [lesson 3](03_attention.py) and [lesson 4](04_masks.py). Afterwards you know what an encoder-decoder, an encoder and a decoder are trained for, what each of them can see, and which one your task needs.
#
# All three are the same layers. They differ in two things: who may look at whom, and which tokens are asked for.

# %%
import tempfile

import matplotlib.pyplot as plt
import torch
from shared import MODELS, attempt, dates_model, decoder_model

import clearhead as ch

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## One folder
#
# One table of dates is enough for all three: a text, its date, its language, with tabs between them. Two of the models are trained already, once for all lessons. They read 58 languages; the one that you train below reads six.

# %%
folder = MODELS / "dates" / "data"
both, decoder = dates_model(), decoder_model()


def lines_of(part):
    lines = (folder / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("\t")[2] in {"de", "en", "es", "fr", "it", "nl"}]


train, valid, test = (lines_of(part) for part in ("train", "valid", "test"))
print(f"{len(train):,} lines to learn from, such as")
print("\n".join(train[:4]))

# %% [markdown]
# ## Three objectives
#
# Take one line. The **encoder-decoder** reads the text $x$ and is asked for the date $y$, token by token:
#
# $$-\sum_t \log p(y_t \mid y_{<t}, x).$$
#
# The **encoder** reads the whole line with some tokens hidden, the set $M$, and is asked for those alone:
#
# $$-\sum_{i \in M} \log p(x_i \mid x_{\text{not } M}).$$
#
# The **decoder** reads the line, and is asked at every token for the next one:
#
# $$-\sum_t \log p(x_t \mid x_{<t}).$$
#
# So from one line each of them gets another number of answers to learn from:

# %%
text, date, language = "Montag, 5. Januar 1998", "1998-01-05", "de"
line = f"{text}\t{date}\t{language}"
hidden = {9, 12, 15, 26, 31}
read = "".join("_" if place in hidden else character for place, character in enumerate(line))
print(
    f"encoder-decoder reads  {text!r} and {date!r}\n                asked  {date!r} and the end: {len(date) + 1} answers"
)
print(
    f"encoder         reads  {read!r}\n                asked  {[line[place] for place in sorted(hidden)]}: {len(hidden)} answers"
)
print(f"decoder         reads  {line!r}\n                asked  all of it and the end: {len(line) + 1} answers")

# %% [markdown]
# How are tokens hidden? BERT chooses 15 % of them. Of the chosen ones 80 % become a mask token, 10 % another token, and 10 % stay as they are. The last two keep the model honest: a token that it can see may be wrong, so it has to look at the others at every place.


# %%
def hide(ids, share, mask_id, vocab_size, generator):
    chosen = (torch.rand(ids.shape, generator=generator) < share) & (ids != 0)
    dice = torch.rand(ids.shape, generator=generator)
    other = torch.randint(vocab_size, ids.shape, generator=generator)
    read = torch.where(chosen & (dice < 0.8), mask_id, ids)
    read = torch.where(chosen & (dice >= 0.9), other, read)
    return read, chosen


many = torch.randint(5, 100, (1000, 100))
read, chosen = hide(many, 0.15, 4, 100, torch.Generator().manual_seed(0))
print(f"chosen {chosen.float().mean():.3f}, of them")
print(
    f"hidden {(read[chosen] == 4).float().mean():.3f}, as they are {(read[chosen] == many[chosen]).float().mean():.3f}"
)

# %% [markdown]
# ## Train the third
#
# The encoder takes about 20 seconds. It hides 30 % instead of 15: twice as many answers from each line, and each a little harder. The run file says what is different from the other two in two words, `fill` and `encoder`.

# %% tags=["remove-output"]
run_file = {
    "task": {"kind": "fill", "mask_share": 0.3},
    "data": {"max_length": 128},
    "tokenizer": {"kind": "character"},
    "model": {"family": "encoder", "layers": 2, "width": 64, "heads": 4, "feedforward": 128, "norm_place": "pre"},
    "train": {"steps": 500, "batch_tokens": 1536, "optimizer": "muon", "learning_rate": 0.03, "schedule": "cosine"},
}
changes = {"model.positions": "rotary", "model.qk_norm": True, "model.dropout": 0.0, "train.warmup": 50}
changes |= {"train.clip": 1.0, "train.validate_every": 250, "train.run": tempfile.mkdtemp() + "/encoder"}
result = ch.train(run_file, changes, data={"train": train, "valid": valid})

# %%
encoder = result.load()
for name, model in (("encoder-decoder", both), ("encoder", encoder), ("decoder", decoder)):
    print(f"{name:15} {sum(one.numel() for one in model.module.parameters()):8,} parameters")

# %% [markdown]
# ## What each can see
#
# Do not believe a drawing: measure it. Change one token, and see which outputs change. Blue is what an output reads.


# %%
@torch.no_grad()
def reads(logits_of, ids):
    before = logits_of(ids)
    seen = torch.zeros(before.shape[1], ids.shape[1])
    for place in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, place] = 7 if ids[0, place] == 6 else 6
        seen[:, place] = (logits_of(changed) - before).abs().amax(-1)[0] > 1e-4
    return seen


def ids_of(tokenizer, text):
    return torch.tensor([tokenizer.encode(text)])


source, target = ids_of(both.tokenizers.source, "5. Mai"), ids_of(both.tokenizers.target, "05-05")
joined = torch.cat([source, target], 1)
split = source.shape[1]
pictures = {
    "encoder-decoder:\n5. Mai|05-05": reads(lambda ids: both.module(ids[:, :split], ids[:, split:]).logits, joined),
    "encoder": reads(lambda ids: encoder.module(ids).logits, ids_of(encoder.tokenizer, "5. Mai\t05-05")),
    "decoder": reads(lambda ids: decoder.module(ids).logits, ids_of(decoder.tokenizer, "5. Mai\t05-05")),
}
figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
for axis, (name, seen) in zip(axes, pictures.items(), strict=True):
    axis.imshow(seen, cmap="Blues", vmin=0, vmax=1.4)
    axis.set(title=name, xlabel="input", ylabel="output", xticks=range(0, seen.shape[1], 2), yticks=range(len(seen)))
plt.show()

# %% [markdown]
# The encoder sees all of the line. The decoder sees what came before. The encoder-decoder has both: each of its outputs sees all of the text, and of the date what came before.
#
# ## What follows from it
#
# Hide the `l` of `5. Juli`. Is it June or July? The date to the right says it. An encoder looks there; a decoder has not read it yet:


# %%
def next_character(text, characters):
    with torch.no_grad():
        logits = decoder.module(torch.tensor([[decoder.tokenizer.bos_id, *decoder.tokenizer.encode(text)]])).logits
    probabilities = logits[0, -1].softmax(-1)
    return [float(probabilities[decoder.tokenizer.encode(one)[0]]) for one in characters]


print("                                     l     n")
for month in ("07", "06"):
    gap = f"5. Ju___i 1998\t1998-{month}-05\tde"
    found = {one.text: one.probability for one in encoder.fill(gap, top_k=20)[0]}
    print(f"encoder, date is 1998-{month}-05        {found['l']:.2f}  {found['n']:.2f}")
print("decoder, behind '5. Ju'             ", *(f"{one:.2f} " for one in next_character("5. Ju", "ln")))

# %% [markdown]
# Now ask for the whole date. The encoder-decoder and the decoder write it character by character, and each character is read by the next. The encoder fills all ten places at once. It does not know what it has put beside a place, so the pieces need not fit together:

# %%
rows = [line.split("\t") for line in test[::3]]
texts, dates = [row[0] for row in rows], [row[1] for row in rows]
mask = encoder.tokenizer.tokens([encoder.tokenizer.mask_id])[0]
filled = encoder.fill([f"{text}\t{mask * 10}\t{language}" for text, _, language in rows], top_k=1)
written = decoder.generate([f"{text}\t" for text in texts], temperature=0, max_new_tokens=14)
answers = {
    "encoder-decoder": both.translate(texts),
    "encoder": ["".join(place[0].text for place in places) for places in filled],
    "decoder": [one[0].text.partition("\t")[0] for one in written],
}
for name, found in answers.items():
    print(f"{name:15} {sum(map(str.__eq__, found, dates)) / len(dates):4.0%} of {len(dates)} dates right")
print("such as", next((text, found) for text, found, date in zip(texts, answers["encoder"], dates) if found != date))

# %% [markdown]
# Do not read this as a race: the encoder has learned for 20 seconds, on few languages, and was never asked for ten places in a row. The decoder spends most of its answers on the text in front of the date, which nobody can predict. In return it writes the language as well, and whole lines of its own:

# %%
print(repr(decoder.generate("Montag, 5. Januar 1998\t", temperature=0)[0].text))
print(repr(decoder.generate("", temperature=0.7, max_new_tokens=60, seed=1)[0].text))

# %% [markdown]
# | you have | you want | family |
# |---|---|---|
# | a text | another text of its own kind: a translation, a summary | encoder-decoder |
# | a text, all of it | labels, spans, a vector, a missing word | encoder |
# | the beginning of a text | how it goes on, whatever it is | decoder |
#
# ## The same heads, drawn
#
# Each row is one kind of attention, each square one head, two layers of four. Rows of a square are queries, columns are keys.

# %%
maps = {
    "encoder-decoder": both.attention(text, date),
    "encoder": encoder.attention(line),
    "decoder": decoder.attention(line),
}
kinds = [(name, stack) for name, one in maps.items() for stack in one.stacks]
figure, axes = plt.subplots(len(kinds), 8, figsize=(9, 6.6), layout="constrained")
for row, (name, stack) in zip(axes, kinds, strict=True):
    row[0].set_ylabel(f"{name}\n{stack}", rotation=0, ha="right", va="center")
    for number, axis in enumerate(row):
        axis.imshow(maps[name].weights(stack, number // 4, number % 4), cmap="Blues", vmin=0, vmax=0.8, aspect="auto")
        axis.set(xticks=[], yticks=[])
for number, axis in enumerate(axes[0]):
    axis.set_title(f"{number // 4}.{number % 4}")
plt.show()

# %% [markdown]
# Full squares where all may be seen, triangles where only the past may be. `decoder.memory` is the one rectangle: rows are the date, columns are the text. In the decoder the same work is done in the lower left corner of a triangle, where the date looks back at the text.
#
# Touch them. The encoder:

# %%
maps["encoder"]

# %% [markdown]
# And the decoder, on the same line:

# %%
maps["decoder"]

# %% [markdown]
# ## One core
#
# BERT is an encoder, GPT and Llama are decoders, T5 and the first Transformer are both. In the core no line knows these names. A spec says which steps a layer has, and what each attention may see:

# %%
for name in ("transformer_base", "t5_small", "bert_base", "gpt2", "llama_tiny"):
    spec = getattr(ch.presets, name)()
    for stack in ("encoder", "decoder"):
        if getattr(spec, stack) is not None:
            functions = [step.branches[0].function for step in getattr(spec, stack).layers[0].steps]
            steps = [f"{one.source}: {one.mask}" if hasattr(one, "mask") else "feed-forward" for one in functions]
            print(f"{name:17} {stack}  {' · '.join(steps)}")

# %% [markdown]
# ## Break it
#
# **The switch.** "The target is the unmasked sequence", says many a text about encoders. Take it by its word, and count every place in the loss instead of the chosen ones. One line:


# %%
def loss_of(logits, ids, chosen, everywhere):
    counted = ids != encoder.tokenizer.pad_id if everywhere else chosen
    return torch.nn.functional.cross_entropy(logits[counted], ids[counted])


table = torch.nn.utils.rnn.pad_sequence([torch.tensor(encoder.tokenizer.encode(one)) for one in train], True)
held_out = torch.nn.utils.rnn.pad_sequence([torch.tensor(encoder.tokenizer.encode(one)) for one in valid], True)
assert encoder.tokenizer.pad_id == 0


def hide_some(ids, generator):
    return hide(ids, 0.15, encoder.tokenizer.mask_id, encoder.tokenizer.vocab_size, generator)


def train_encoder(everywhere, steps=150):
    torch.manual_seed(1)
    module, generator = ch.build(encoder.spec), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
    for _ in range(steps):
        ids = table[torch.randint(len(table), (32,), generator=generator)]
        read, chosen = hide_some(ids, generator)
        loss = loss_of(module(read, mask=ids != 0).logits, ids, chosen, everywhere)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module.eval(), float(loss.detach())


broken, broken_loss = train_encoder(everywhere=True)
mended, mended_loss = train_encoder(everywhere=False)
print(f"loss after 150 steps: {broken_loss:.2f} with every place, {mended_loss:.2f} with the chosen ones")

# %% [markdown]
# **The symptom.** A splendid loss, and a model that is no better at filling gaps. Most places are not hidden, so most of the loss is paid by copying what stands there.
#
# **The detector.** Take the same lines for both, and count hidden and visible places apart:

# %%
read, chosen = hide_some(held_out, torch.Generator().manual_seed(2))
places = {
    "visible": (held_out != 0) & ~chosen,
    "hidden": read == encoder.tokenizer.mask_id,
    "replaced": chosen & (read != encoder.tokenizer.mask_id) & (read != held_out),
}
print("right, of the places that are", *(f"{name:>9}" for name in places))
for name, module in (("every place counted", broken), ("the chosen ones counted", mended)):
    with torch.no_grad():
        right = module(read, mask=held_out != 0).logits.argmax(-1) == held_out
    print(f"{name:29}", *(f"{right[where].float().mean():9.0%}" for where in places.values()))

# %% [markdown]
# The broken one is perfect where there is nothing to do. Where a wrong character stands it believes what it sees.
#
# **The mend.** Count the chosen places alone. In code that others wrote, look for labels that are `-100` nearly everywhere; if they are not, it is broken:

# %%
print(f"{float(chosen[held_out != 0].float().mean()):.2f} of the labels count; 1.00 is this bug")


def every_place(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


print(ch.check.loss(every_place, shifts=False))

# %% [markdown]
# ## Exercises
#
# **1 · Which family? (3 minutes, easy).** Write `encoder`, `decoder` or `encoder-decoder` behind each job: the one whose training asks for just this.

# %% tags=["exercise"]
mine = {"is this mail spam": None, "go on with a story": None, "German to English": None, "names in a contract": None}


def check_families(mine):
    reasons = {
        "is this mail spam": ("encoder", "one label for a text that is there as a whole: read it in both directions"),
        "go on with a story": ("decoder", "what comes next, again and again: nothing is there to the right"),
        "German to English": ("encoder-decoder", "one text is there as a whole, another one is written: two stacks"),
        "names in a contract": ("encoder", "a label for each word, and words on both sides say which"),
    }
    for job, answer in mine.items():
        wanted, reason = reasons[job]
        assert answer in ("encoder", "decoder", "encoder-decoder"), f"'{job}': {answer!r} is none of the three families"
        assert answer == wanted, f"'{job}': {reason}"
    return "right; decoders can be made to do all four, at a price: they read in one direction"


attempt(lambda: check_families(mine) if all(mine.values()) else "not written yet")

# %% tags=["hide-cell", "solution"]
solved_families = dict(zip(mine, ("encoder", "decoder", "encoder-decoder", "encoder"), strict=True))
assert check_families(solved_families).startswith("right")

# %% [markdown]
# **2 · A prefix (10 minutes, medium).** Between the families there is one more: the first `prefix` tokens are read like an encoder's, the rest is written like a decoder's, in one stack. Write its mask `[length, length]`; True means "may attend".


# %% tags=["exercise"]
def prefix_mask(length, prefix):
    raise NotImplementedError


def check_prefix(prefix_mask):
    for length, prefix in ((6, 3), (5, 0), (4, 4)):
        mask = prefix_mask(length, prefix)
        case = f"with length {length} and prefix {prefix}"
        assert isinstance(mask, torch.Tensor), f"return the mask; got {type(mask).__name__}"
        assert mask.dtype == torch.bool, f"a mask is boolean; yours is {mask.dtype}"
        assert mask.shape == (length, length), f"{case} expected {(length, length)}, got {tuple(mask.shape)}"
        assert bool(mask[:, :prefix].all()), f"{case} somebody does not see all of the prefix: it is there for all"
        later = mask[:prefix, prefix:]
        assert not bool(later.any()), f"{case} the prefix sees what is still to be written"
        rest = mask[prefix:, prefix:]
        assert not bool(rest.triu(1).any()), f"{case} a written token sees the future"
        assert torch.equal(rest, torch.ones_like(rest).tril()), f"{case} a written token does not see all of its past"
    return "right"


attempt(lambda: check_prefix(prefix_mask))


# %% tags=["hide-cell", "solution"]
def solved_prefix(length, prefix):
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:, :prefix] = True
    return mask


assert check_prefix(solved_prefix) == "right"
try:
    check_prefix(lambda length, prefix: torch.ones(length, length, dtype=torch.bool).tril())
except AssertionError as error:
    print("a wrong answer reads:", error)

# %% [markdown]
# **3 · The loss of an encoder (5 minutes, easy).** `logits` are `[batch, tokens, vocabulary]`. `labels` hold the right id where a token was chosen, and 0 everywhere else. Write the mean over the chosen places.


# %% tags=["exercise"]
def my_loss(logits, labels):
    raise NotImplementedError


attempt(lambda: ch.check.loss(my_loss, shifts=False), hint=1)


# %% tags=["hide-cell", "solution"]
def solved_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


assert ch.check.loss(solved_loss, shifts=False).ok
