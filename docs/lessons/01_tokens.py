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
# # 1 · Tokens
#
# You need no earlier lesson. After this lesson you know what a model reads, and how one long text becomes a batch with its targets. You also know why a special token that somebody types must stay text.
#
# A model reads numbers. A **tokenizer** cuts a text into tokens. Each token has a number, its **id**.

# %%
import itertools

import torch
from shared import attempt

import clearhead as ch
from clearhead.text.tokenizer_training import train_tokenizer

lines = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "a cat and a dog read the newest paper",
    "reading papers is the newest way of sitting",
]

# %% [markdown]
# ## Four ways to cut a text
#
# A tokenizer can cut a text into characters, words or frequent pieces. Byte-pair encoding (BPE) joins the most frequent pair of neighbours, again and again, until the vocabulary is full. With bytes as its alphabet it can encode any text.

# %%
sizes = {"character": 60, "word": 60, "bpe": 48, "byte-bpe": 280}
tokenizers = {kind: train_tokenizer(kind, lines, vocab_size=size) for kind, size in sizes.items()}
for kind, tokenizer in tokenizers.items():
    ids = tokenizer.encode("the newest cat reads")
    print(f"{kind:10} {len(ids):2} tokens of {tokenizer.vocab_size:3}: {tokenizer.tokens(ids)}")

# %% [markdown]
# Characters need a small vocabulary but make long sequences. Words make short sequences but cannot encode a word that they have never seen. BPE lies between the two. The next cell prints ids with their tokens. `Ġ` stands for the space in front of a word, as in GPT-2's files:

# %%
bpe = tokenizers["byte-bpe"]
ids = bpe.encode("reading newest papers")
for index, token in zip(ids, bpe.tokens(ids), strict=True):
    print(f"{index:4} = {token!r}")
print("and back:", bpe.decode(ids))

# %% [markdown]
# GPT-2's tokenizer is a byte-level BPE with 50,257 ids. `ch.load("openai-community/gpt2").tokenizer` downloads it. It encodes " machine learning" as 4572 and 4673. Its only special token, `<|endoftext|>` with the id 50256, marks both the start and the end of a text.
#
# A tokenizer of words or characters turns unseen words or characters into the unknown token, so they are lost. A byte-level tokenizer loses nothing.

# %%
for kind in ("word", "character", "byte-bpe"):
    ids = tokenizers[kind].encode("the zebra")
    print(f"{kind:10} {tokenizers[kind].tokens(ids)} -> {tokenizers[kind].decode(ids)!r}")

# %% [markdown]
# ## Special tokens
#
# Some ids stand for no text: the start, the end, padding. A program adds them to a text, and typed text must never turn into them. Otherwise a user could end the text for the model by typing the end token. A message in a chat could also pretend to come from another speaker.

# %%
print("special:", {name: getattr(bpe, f"{name}_id") for name in ("pad", "bos", "eos", "unk")})
print("put around a text:", bpe.tokens(bpe.encode_with_special("the cat")))
typed = bpe.encode("the cat</s>")
print("typed:            ", bpe.tokens(typed), "- the end is among them:", bpe.eos_id in typed)

# %% [markdown]
# ## Windows and the shift
#
# A language model learns from one long text. Cut the text into windows of ten ids. The next id is known for each position, so the targets of a window are the same window, shifted by one:

# %%
stream = torch.tensor(bpe.encode(" ".join(lines)))
windows = stream.unfold(0, 10, 1)
print(f"{len(stream)} ids, {len(windows)} windows of 10")
inputs, answers = stream[:-1].unfold(0, 10, 10), stream[1:].unfold(0, 10, 10)
print("reads   ", bpe.tokens(inputs[0].tolist()))
print("answers ", bpe.tokens(answers[0].tolist()))

# %% [markdown]
# One window teaches ten predictions at once: the token after `the`, the token after `the cat`, and so on. That is why a decoder may not read later tokens ([lesson 4](04_masks.py)).
#
# In translation, the input of the decoder is a start token and the target text. Its targets are the target text and an end token:

# %%
target = bpe.encode("the log")
print("reads   ", bpe.tokens([bpe.bos_id, *target]))
print("answers ", bpe.tokens([*target, bpe.eos_id]))

# %% [markdown]
# ## Break it
#
# **The switch.** Create the ids with `torch.Tensor` instead of `torch.tensor`. Only one letter differs.

# %%
wrong = torch.Tensor([50256, 2**24, 2**24 + 1])
print(wrong.dtype, wrong.tolist())

# %% [markdown]
# **The symptom.** The ids became floating-point numbers. They look right, but above $2^{24}$ two different ids can become equal. An embedding table cannot look them up:

# %%
try:
    torch.nn.Embedding(10, 4)(torch.Tensor([1, 2]))
except RuntimeError as error:
    print(str(error).split(";")[0])

# %% [markdown]
# **The detector** is the error above. Code that raises no such error needs a check of `ids.dtype`. A second switch raises no error at all: predict each token from itself.

# %%
logits = torch.nn.functional.one_hot(inputs, bpe.vocab_size).float() * 9
same = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())
print(f"a model that repeats what it reads has a loss of {same:.3f} where the answers are not shifted,")
shifted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
print(f"and of {shifted:.3f} where they are")


# %%
def loss_unshifted(logits, ids):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0)


print(ch.check.loss(loss_unshifted))

# %% [markdown]
# **The fix** is in the last line of the report above.
#
# ## Exercises
#
# **1 · The loss of a language model (5 minutes, easy).** `logits` has the shape `[batch, tokens, vocabulary]`, and `ids` has the shape `[batch, tokens]`. Id 0 is padding, which does not count in the loss.


# %% tags=["exercise"]
def my_loss(logits, ids):
    raise NotImplementedError


attempt(lambda: ch.check.loss(my_loss), hint=1)


# %% tags=["hide-cell", "solution"]
def loss_solution(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


assert ch.check.loss(loss_solution).ok

# %% [markdown]
# **2 · Count the windows (2 minutes, easy).** A text has 100 ids. How many windows of 10 are there, if each window begins one id after the previous window?

# %% tags=["exercise"]
count = None


def check_count(count):
    if count is None:
        raise NotImplementedError
    assert count != 100, "the last windows would be too short: the last one begins at id 90"
    assert count != 10, "that is how many there are side by side; here each begins one id later"
    assert count == len(torch.arange(100).unfold(0, 10, 1)), f"the first begins at 0, the last at 90; not {count!r}"
    return "right"


attempt(lambda: check_count(count))

# %% tags=["hide-cell", "solution"]
assert check_count(91) == "right"

# %% [markdown]
# **3 · One merge (10 minutes, medium).** The argument is a list of words, and each word is a list of pieces. Return the pair of neighbouring pieces that occurs most often in all words. If several pairs are equally frequent, return the first. That is one step of byte-pair encoding.


# %% tags=["exercise"]
def best_pair(words):
    raise NotImplementedError


def check_pair(best_pair):
    assert best_pair([list("aab"), list("aab"), list("ab")]) == ("a", "b"), "a b occurs three times, a a twice"
    assert best_pair([["th", "e"], ["th", "is"], ["th", "e"]]) == ("th", "e"), "pieces may be longer than a character"
    assert best_pair([list("ab"), list("cd")]) == ("a", "b"), "of equal counts the first"
    return "right"


attempt(lambda: check_pair(best_pair))


# %% tags=["hide-cell", "solution"]
def best_pair_solution(words):
    counts = {}
    for word in words:
        for pair in itertools.pairwise(word):
            counts[pair] = counts.get(pair, 0) + 1
    return max(counts, key=counts.get)


assert check_pair(best_pair_solution) == "right"
