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
# You need nothing. Afterwards you know what a model really reads, why a special token that somebody types must stay text, and how one long text becomes a batch with its answers.
#
# A model reads numbers. A **tokenizer** cuts a text into pieces, and each piece has a number: its **id**.

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
# ## Four ways to cut
#
# By character, by word, or into pieces that are frequent: byte-pair encoding joins the most frequent pair of neighbours again and again until the vocabulary is full. With bytes as its alphabet it can write any text of the world.

# %%
sizes = {"character": 60, "word": 60, "bpe": 48, "byte-bpe": 280}
tokenizers = {kind: train_tokenizer(kind, lines, vocab_size=size) for kind, size in sizes.items()}
for kind, tokenizer in tokenizers.items():
    ids = tokenizer.encode("the newest cat reads")
    print(f"{kind:10} {len(ids):2} tokens of {tokenizer.vocab_size:3}: {tokenizer.tokens(ids)}")

# %% [markdown]
# Few characters make long texts, words make short ones and cannot say what they have never seen, pieces lie between. The table of ids, with the space in front of a word shown as `Ġ`, as in GPT-2's files:

# %%
bpe = tokenizers["byte-bpe"]
ids = bpe.encode("reading newest papers")
for index, token in zip(ids, bpe.tokens(ids), strict=True):
    print(f"{index:4} = {token!r}")
print("and back:", bpe.decode(ids))

# %% [markdown]
# GPT-2's own tokenizer is such a one, with 50,257 ids; `ch.load("openai-community/gpt2").tokenizer` fetches it. It reads " machine learning" as 4572 and 4673, and id 50256, `<|endoftext|>`, is its only special token: both start and end.
#
# What a tokenizer has never seen: characters and words become the unknown token and are lost; bytes are never lost.

# %%
for kind in ("word", "character", "byte-bpe"):
    found = tokenizers[kind].encode("the zebra")
    print(f"{kind:10} {tokenizers[kind].tokens(found)} -> {tokenizers[kind].decode(found)!r}")

# %% [markdown]
# ## Special tokens
#
# Some ids stand for no text: the start, the end, padding. A program puts them around texts; nobody may write them by typing. Otherwise a user who types the end token ends the text for the model, and a message can pretend to be another speaker.

# %%
print("special:", {name: getattr(bpe, f"{name}_id") for name in ("pad", "bos", "eos", "unk")})
print("put around a text:", bpe.tokens(bpe.encode_with_special("the cat")))
typed = bpe.encode("the cat</s>")
print("typed:            ", bpe.tokens(typed), "- the end is among them:", bpe.eos_id in typed)

# %% [markdown]
# ## Windows and the shift
#
# A language model learns from one long text. Cut it into windows of ten ids; what comes next is known for each of them. So the answer to a window is the same window, moved by one:

# %%
stream = torch.tensor(bpe.encode(" ".join(lines)))
windows = stream.unfold(0, 10, 1)
print(f"{len(stream)} ids, {len(windows)} windows of 10")
inputs, answers = stream[:-1].unfold(0, 10, 10), stream[1:].unfold(0, 10, 10)
print("reads   ", bpe.tokens(inputs[0].tolist()))
print("answers ", bpe.tokens(answers[0].tolist()))

# %% [markdown]
# One window teaches ten predictions at once: after `the`, after `the cat`, and so on. That is why a decoder may not look ahead ([lesson 4](04_masks.py)).
#
# In translation, the decoder reads the target behind a start token, and answers the target with an end token:

# %%
target = bpe.encode("the log")
print("reads   ", bpe.tokens([bpe.bos_id, *target]))
print("answers ", bpe.tokens([*target, bpe.eos_id]))

# %% [markdown]
# ## Break it
#
# **The switch.** Make the ids of `torch.Tensor` instead of `torch.tensor`. One letter.

# %%
wrong = torch.Tensor([50256, 2**24, 2**24 + 1])
print(wrong.dtype, wrong.tolist())

# %% [markdown]
# **The symptom.** Ids became floating-point numbers. They look right until $2^{24}$, where two ids become one; and a table cannot look them up:

# %%
try:
    torch.nn.Embedding(10, 4)(torch.Tensor([1, 2]))
except RuntimeError as error:
    print(str(error).split(";")[0])

# %% [markdown]
# **The detector** is the error above, if you are lucky, and `ids.dtype` otherwise. A second switch makes no error at all: predict a token from itself.

# %%
logits = torch.nn.functional.one_hot(inputs, bpe.vocab_size).float() * 9
same = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())
print(f"a model that repeats what it reads has a loss of {same:.3f} where the answers are not shifted,")
shifted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
print(f"and of {shifted:.3f} where they are")


# %%
def unshifted(logits, ids):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0)


print(ch.check.loss(unshifted))

# %% [markdown]
# **The mend** is its last line.
#
# ## Exercises
#
# **1 · The loss of a language model (5 minutes, easy).** `logits` are `[batch, tokens, vocabulary]`, `ids` are `[batch, tokens]`, and id 0 is padding, which does not count.


# %% tags=["exercise"]
def my_loss(logits, ids):
    raise NotImplementedError


attempt(lambda: ch.check.loss(my_loss), hint=1)


# %% tags=["hide-cell", "solution"]
def solved(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


assert ch.check.loss(solved).ok

# %% [markdown]
# **2 · Count them (2 minutes, easy).** A text has 100 ids. How many windows of 10 are there, if each begins one id later than the one before?

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
# **3 · One merge (10 minutes, medium).** Return the most frequent pair of neighbours in lists of pieces; of equal ones, the first that occurs. That is one step of byte-pair encoding.


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
def solved_pair(words):
    counts = {}
    for word in words:
        for pair in itertools.pairwise(word):
            counts[pair] = counts.get(pair, 0) + 1
    return max(counts, key=counts.get)


assert check_pair(solved_pair) == "right"
