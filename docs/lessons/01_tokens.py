# %% [markdown]
# # 1. Tokens
#
# **Needs:** nothing. **Gives:** the ids that every other lesson reads.
#
# A Transformer reads numbers. A tokenizer cuts your text into tokens and gives each token the number of its row in a table: its id.
#
# $$ \text{text} \to (t_1, \ldots, t_n) \to (i_1, \ldots, i_n), \qquad 0 \le i < V $$

# %%
import shared
import torch

model = shared.dates_model()
model.tokenizer

# %% [markdown]
# ## The id table
#
# This model translates dates and reads characters, so every character is a token. You see the text of each token beside its id, with the special tokens that the model was trained with.

# %%
maps = model.attention("5. Januar 1998", "1998-01-05")
print(maps.tokens)
print(maps.target_tokens)

# %% [markdown]
# ## Subwords
#
# Most models cut words into frequent pieces: byte pair encoding joins the most frequent pair of neighbours again and again. One join by hand:

# %%
from collections import Counter
from itertools import pairwise

words = [list("lower"), list("lowest"), list("low"), list("slow")]


def most_frequent_pair(words: list[list[str]]) -> tuple[str, str]:
    pairs = Counter(pair for word in words for pair in pairwise(word))
    return max(pairs, key=lambda pair: (pairs[pair], pair))


def join(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return joined


for _ in range(3):
    pair = most_frequent_pair(words)
    words = [join(word, pair) for word in words]
    print(pair, words)

# %% [markdown]
# ## Windows and shift
#
# A decoder learns to predict the next token, so its labels are its inputs shifted by one. From a long text you cut windows, and from each window the pair of input and label:
#
# $$ x = (i_1, \ldots, i_n), \qquad y = (i_2, \ldots, i_{n+1}) $$

# %%
ids = torch.arange(14)  # the ids of a text of 14 tokens
windows = ids.unfold(0, 6, 5)  # six ids each; neighbours share one, so that no label is lost
inputs, labels = windows[:, :-1], windows[:, 1:]
print(inputs, labels, sep="\n")
assert torch.equal(inputs[0, 1:], labels[0, :-1])

# %% [markdown]
# A window of the source text, moved by one token at a time, has N - 9 positions for a length of ten:

# %%
print(torch.arange(30).unfold(0, 10, 1).shape)  # 30 - 9 windows
assert len(torch.arange(30).unfold(0, 10, 1)) == 30 - 9

# %% [markdown]
# ## A special token that you type is text
#
# The end of a text is a token, too. Were the letters `</s>` in your text read as that token, everybody could end your model's input. clearhead reads them as four characters; this model never saw three of them, so they are its token for the unknown.

# %%
typed = model.attention("</s>", "1998").tokens
print(typed)
assert typed.count("</s>") == 1 and len(typed) == 5, "the typed letters became the special token"

# %% [markdown]
# ## Break it: ids as floats
#
# `torch.Tensor([[id]])` makes floats. It prints `50256.`, and past 2^24 two ids become one. Set the switch and look.
#
# - **Symptom:** rare tokens get the vector of a neighbour.
# - **Detector:** compare with the ids as `torch.long`.
# - **Mend:** `torch.tensor([[id]])`, lower case, which keeps integers.

# %%
BROKEN = True
big = [2**24, 2**24 + 1]
ids = torch.Tensor(big) if BROKEN else torch.tensor(big)
print(ids, "distinct ids:", len(ids.unique()))
assert len(ids.unique()) == (1 if BROKEN else 2)

# %% [markdown]
# ## Exercise 1 (5 minutes, easy): labels
#
# Return inputs and labels of next-token prediction, with `start` in front so that the first token is predicted as well. Ids `[7, 8, 9]` and start `0` give inputs `[0, 7, 8]` and labels `[7, 8, 9]`.


# %%
def shifted(ids: list[int], start: int) -> tuple[list[int], list[int]]:
    raise NotImplementedError


def check_shifted(answer) -> None:
    inputs, labels = answer([7, 8, 9], 0)
    assert len(inputs) == len(labels), f"one label for each input; you have {len(inputs)} and {len(labels)}"
    assert inputs != labels, "input and label are the same token: the model would learn to copy, so shift the inputs"
    assert inputs[:1] == [0], "the first input is the start token: without it nothing predicts the first token"
    assert labels == [7, 8, 9], f"every token of the text is predicted once; your labels are {labels}"
    assert inputs == [0, 7, 8], f"before token n the model has read start and the n - 1 before it; you have {inputs}"


shared.exercise(lambda: check_shifted(shifted))


# %% tags=["hide-cell"]
def shifted_solution(ids: list[int], start: int) -> tuple[list[int], list[int]]:
    return [start, *ids[:-1]], list(ids)


shared.solved(lambda: check_shifted(shifted_solution))
shared.wrong(lambda: check_shifted(lambda ids, start: (ids, ids)), "copy")

# %% [markdown]
# ## Exercise 2 (10 minutes, medium): a stride that loses nothing
#
# With windows of `length` + 1 ids, which stride gives every label exactly once? Return it.


# %%
def stride(length: int) -> int:
    raise NotImplementedError


def check_stride(answer) -> None:
    step, text = answer(5), torch.arange(26)
    labels = text.unfold(0, 6, step)[:, 1:].flatten().tolist()
    twice = len(labels) - len(set(labels))
    assert not twice, f"{twice} labels come twice: the windows overlap by more than one id"
    lost = sorted(set(range(1, 26)) - set(labels))
    assert not lost, f"the labels {lost} are lost: the last id of a window must be the first of the next"


shared.exercise(lambda: check_stride(stride))


# %% tags=["hide-cell"]
shared.solved(lambda: check_stride(lambda length: length))
shared.wrong(lambda: check_stride(lambda length: length + 1), "are lost")
