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
# You need [lesson 3](03_attention.py) and [lesson 4](04_masks.py). After this lesson you know the training objectives of encoder-decoder, encoder and decoder, and which tokens each can attend to. You can choose the family that your task needs.
#
# All three families consist of the same layers. They differ in two points: which tokens may attend to which, and which tokens the model must predict.

# %%
import tempfile

import matplotlib.pyplot as plt
import torch
from shared import MODELS, attempt, dates_model, decoder_model

import clearhead as ch

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## One data set
#
# One table of dates is enough for all three families. Each line has a text, its date and its language, separated by tabs. The encoder-decoder and the decoder are trained already, once for all lessons, on 58 languages. The encoder that you train below reads six languages.

# %%
folder = MODELS / "dates" / "data"
both, decoder = dates_model(), decoder_model()


def lines_of(split_name):
    lines = (folder / f"{split_name}.tsv").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("\t")[2] in {"de", "en", "es", "fr", "it", "nl"}]


train, valid, test = (lines_of(split_name) for split_name in ("train", "valid", "test"))
print(f"{len(train):,} lines to learn from, such as")
print("\n".join(train[:4]))

# %% [markdown]
# ## Three objectives
#
# Take one line of the table. The **encoder-decoder** reads the text $x$ and predicts the date $y$, token by token. Its loss is:
#
# $$-\sum_t \log p(y_t \mid y_{<t}, x).$$
#
# The **encoder** reads the whole line, in which some tokens are hidden. It predicts only these tokens, the set $M$. Its loss is:
#
# $$-\sum_{i \in M} \log p(x_i \mid x_{\text{not } M}).$$
#
# The **decoder** reads the line and predicts the next token at every position. Its loss is:
#
# $$-\sum_t \log p(x_t \mid x_{<t}).$$
#
# So each family gets a different number of targets from the same line:

# %%
text, date, language = "Montag, 5. Januar 1998", "1998-01-05", "de"
line = f"{text}\t{date}\t{language}"
hidden = {9, 12, 15, 26, 31}
read = "".join("_" if position in hidden else character for position, character in enumerate(line))
print(
    f"encoder-decoder reads    {text!r} and {date!r}\n                predicts {date!r} and the end: {len(date) + 1} targets"
)
print(
    f"encoder         reads    {read!r}\n                predicts {[line[position] for position in sorted(hidden)]}: {len(hidden)} targets"
)
print(f"decoder         reads    {line!r}\n                predicts all of it and the end: {len(line) + 1} targets")

# %% [markdown]
# How are tokens hidden? BERT chooses 15 % of them. Of the chosen tokens, 80 % become a mask token, 10 % become another token, and 10 % stay unchanged. Because of the last two groups, a visible token may be wrong. So at every position, the model must use the other tokens too.


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
print(f"hidden {(read[chosen] == 4).float().mean():.3f}, unchanged {(read[chosen] == many[chosen]).float().mean():.3f}")

# %% [markdown]
# ## Train the encoder
#
# Training the encoder takes about 20 seconds. It hides 30 % of the tokens instead of 15 %. So each line gives twice as many targets, and each target is a little harder. The run file differs from the run files of the other two models in two words, `fill` and `encoder`.

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
    print(f"{name:15} {sum(p.numel() for p in model.module.parameters()):8,} parameters")

# %% [markdown]
# ## What each family can see
#
# Measure what each output reads, instead of trusting a drawing. Change one token, and see which outputs change. Blue marks the inputs that an output reads.


# %%
@torch.no_grad()
def reads(logits_of, ids):
    before = logits_of(ids)
    seen = torch.zeros(before.shape[1], ids.shape[1])
    for position in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, position] = 7 if ids[0, position] == 6 else 6
        seen[:, position] = (logits_of(changed) - before).abs().amax(-1)[0] > 1e-4
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
# The encoder sees the whole line. The decoder sees only earlier tokens. The encoder-decoder combines both: each output sees the whole text and the earlier tokens of the date.
#
# ## What follows for predictions
#
# Hide the `l` of `5. Juli`. Is it June or July? The date on the right gives the answer. An encoder reads the date, but a decoder has not read it yet:


# %%
def next_character(text, characters):
    with torch.no_grad():
        logits = decoder.module(torch.tensor([[decoder.tokenizer.bos_id, *decoder.tokenizer.encode(text)]])).logits
    probabilities = logits[0, -1].softmax(-1)
    return [float(probabilities[decoder.tokenizer.encode(character)[0]]) for character in characters]


print("                                     l     n")
for month in ("07", "06"):
    gap = f"5. Ju___i 1998\t1998-{month}-05\tde"
    probabilities = {candidate.text: candidate.probability for candidate in encoder.fill(gap, top_k=20)[0]}
    print(f"encoder, date is 1998-{month}-05        {probabilities['l']:.2f}  {probabilities['n']:.2f}")
print("decoder, after '5. Ju'              ", *(f"{probability:.2f} " for probability in next_character("5. Ju", "ln")))

# %% [markdown]
# Now ask for the whole date. The encoder-decoder and the decoder write it character by character, and each prediction reads the earlier characters. The encoder fills all ten positions at once. No prediction depends on another, so they may not fit together:

# %%
rows = [line.split("\t") for line in test[::3]]
texts, dates = [row[0] for row in rows], [row[1] for row in rows]
mask = encoder.tokenizer.tokens([encoder.tokenizer.mask_id])[0]
filled = encoder.fill([f"{text}\t{mask * 10}\t{language}" for text, _, language in rows], top_k=1)
written = decoder.generate([f"{text}\t" for text in texts], temperature=0, max_new_tokens=14)
answers = {
    "encoder-decoder": both.translate(texts),
    "encoder": ["".join(candidates[0].text for candidates in gaps) for gaps in filled],
    "decoder": [continuations[0].text.partition("\t")[0] for continuations in written],
}
for name, predicted in answers.items():
    print(f"{name:15} {sum(map(str.__eq__, predicted, dates)) / len(dates):4.0%} of {len(dates)} dates right")
print(
    "such as",
    next((text, predicted) for text, predicted, date in zip(texts, answers["encoder"], dates) if predicted != date),
)

# %% [markdown]
# This is no fair comparison. The encoder was trained for 20 seconds, on few languages, and rarely had to predict ten adjacent positions. The decoder spends most of its targets on the text before the date, which is unpredictable. In return it also writes the language, and it can write whole lines:

# %%
print(repr(decoder.generate("Montag, 5. Januar 1998\t", temperature=0)[0].text))
print(repr(decoder.generate("", temperature=0.7, max_new_tokens=60, seed=1)[0].text))

# %% [markdown]
# Choose an encoder-decoder if you have a text and want a new one, such as a translation or a summary. Choose an encoder if you have a complete text and want labels, spans, a vector or a missing word. Choose a decoder if you have the beginning of a text and want it continued.
#
# ## The attention maps of all heads
#
# Each row is one kind of attention. Each square is one head, and there are two layers of four heads. The rows of a square are queries, the columns are keys.

# %%
maps = {
    "encoder-decoder": both.attention(text, date),
    "encoder": encoder.attention(line),
    "decoder": decoder.attention(line),
}
kinds = [(name, stack) for name, attention_map in maps.items() for stack in attention_map.stacks]
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
# The squares are full where a query may attend to all keys, and triangles where it may attend only to the past. `decoder.memory` is a rectangle: its rows are the date, its columns are the text. In the triangles of the decoder, the lower left corner does the same work: there the date attends to the text.
#
# You can explore the maps. Here is the encoder:

# %%
maps["encoder"]

# %% [markdown]
# Here is the decoder on the same line:

# %%
maps["decoder"]

# %% [markdown]
# ## One core
#
# BERT is an encoder. GPT and Llama are decoders. T5 and the first Transformer are encoder-decoders. The core does not contain these names. A spec lists the steps of each layer, and the mask of each attention:

# %%
for name in ("transformer_base", "t5_small", "bert_base", "gpt2", "llama_tiny"):
    spec = getattr(ch.presets, name)()
    for stack in ("encoder", "decoder"):
        if getattr(spec, stack) is not None:
            functions = [step.branches[0].function for step in getattr(spec, stack).layers[0].steps]
            steps = [
                f"{function.source}: {function.mask}" if hasattr(function, "mask") else "feed-forward"
                for function in functions
            ]
            print(f"{name:17} {stack}  {' · '.join(steps)}")

# %% [markdown]
# ## Break it
#
# **The switch.** Many texts about encoders say "The target is the unmasked sequence". Take that literally: count every position in the loss, not only the chosen ones. The change is one line:


# %%
def loss_of(logits, ids, chosen, everywhere):
    counted = ids != encoder.tokenizer.pad_id if everywhere else chosen
    return torch.nn.functional.cross_entropy(logits[counted], ids[counted])


table = torch.nn.utils.rnn.pad_sequence([torch.tensor(encoder.tokenizer.encode(line)) for line in train], True)
held_out = torch.nn.utils.rnn.pad_sequence([torch.tensor(encoder.tokenizer.encode(line)) for line in valid], True)
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
print(f"loss after 150 steps: {broken_loss:.2f} with every position, {mended_loss:.2f} with the chosen positions")

# %% [markdown]
# **The symptom.** The loss is very low, but the model fills gaps no better. Most positions are not hidden, so copying the visible tokens is enough for most of the loss.
#
# **The detector.** Use the same lines for both models, and count hidden and visible positions separately:

# %%
read, chosen = hide_some(held_out, torch.Generator().manual_seed(2))
places = {
    "visible": (held_out != 0) & ~chosen,
    "hidden": read == encoder.tokenizer.mask_id,
    "replaced": chosen & (read != encoder.tokenizer.mask_id) & (read != held_out),
}
print("right, by kind of position   ", *(f"{name:>9}" for name in places))
for name, module in (("every position counted", broken), ("the chosen ones counted", mended)):
    with torch.no_grad():
        right = module(read, mask=held_out != 0).logits.argmax(-1) == held_out
    print(f"{name:29}", *(f"{right[where].float().mean():9.0%}" for where in places.values()))

# %% [markdown]
# The broken model is perfect where it only has to copy. Where a token was replaced, it repeats the wrong character.
#
# **The fix.** Count only the chosen positions. To find this bug in other code, print its labels. If most labels are `-100`, which the loss ignores, the code is right:

# %%
print(f"{float(chosen[held_out != 0].float().mean()):.2f} of the labels count; 1.00 is this bug")


def every_place(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


print(ch.check.loss(every_place, shifts=False))

# %% [markdown]
# ## Exercises
#
# **1 · Which family? (3 minutes, easy).** Write `encoder`, `decoder` or `encoder-decoder` next to each job. Choose the family whose training objective matches the job.

# %% tags=["exercise"]
mine = {"is this mail spam": None, "go on with a story": None, "German to English": None, "names in a contract": None}


def check_families(mine):
    reasons = {
        "is this mail spam": ("encoder", "one label for a complete text: read it in both directions"),
        "go on with a story": ("decoder", "predict the next token, again and again: there is no text on the right"),
        "German to English": ("encoder-decoder", "one text is complete, and another is written: two stacks"),
        "names in a contract": ("encoder", "a label for each word, which depends on the words on both sides"),
    }
    for job, answer in mine.items():
        wanted, reason = reasons[job]
        if answer is None:
            raise NotImplementedError
        assert answer in ("encoder", "decoder", "encoder-decoder"), f"'{job}': {answer!r} is none of the three families"
        assert answer == wanted, f"'{job}': {reason}"
    return "right; decoders can do all four, but they read in one direction only"


attempt(lambda: check_families(mine))

# %% tags=["hide-cell", "solution"]
families_solution = dict(zip(mine, ("encoder", "decoder", "encoder-decoder", "encoder"), strict=True))
assert check_families(families_solution).startswith("right")

# %% [markdown]
# **2 · A prefix (10 minutes, medium).** A prefix decoder is a fourth family, between encoder and decoder. It reads the first `prefix` tokens like an encoder and writes the rest like a decoder, in one stack. Write its mask `[length, length]`; True means "may attend".


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
        assert bool(mask[:, :prefix].all()), f"{case} a token does not see the whole prefix: all tokens must see it"
        later = mask[:prefix, prefix:]
        assert not bool(later.any()), f"{case} the prefix sees tokens after it"
        rest = mask[prefix:, prefix:]
        assert not bool(rest.triu(1).any()), f"{case} a written token sees the future"
        assert torch.equal(rest, torch.ones_like(rest).tril()), f"{case} a written token does not see all of its past"
    return "right"


attempt(lambda: check_prefix(prefix_mask))


# %% tags=["hide-cell", "solution"]
def prefix_solution(length, prefix):
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:, :prefix] = True
    return mask


assert check_prefix(prefix_solution) == "right"
try:
    check_prefix(lambda length, prefix: torch.ones(length, length, dtype=torch.bool).tril())
except AssertionError as error:
    print("a wrong answer reads:", error)

# %% [markdown]
# **3 · The loss of an encoder (5 minutes, easy).** `logits` has the shape `[batch, tokens, vocabulary]`. `labels` holds the right id where a token was chosen, and 0 elsewhere. Write the mean loss over the chosen positions.


# %% tags=["exercise"]
def my_loss(logits, labels):
    raise NotImplementedError


attempt(lambda: ch.check.loss(my_loss, shifts=False), hint=1)


# %% tags=["hide-cell", "solution"]
def loss_solution(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


assert ch.check.loss(loss_solution, shifts=False).ok
