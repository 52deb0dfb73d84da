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
# # 9 · Real checkpoints
#
# You need [lesson 3](03_attention.py) and [lesson 5](05_residuals_and_norms.py). After this lesson you can open a checkpoint that somebody else trained and name each of its tensors. You can prove that your model computes the same results, and tell a trained head from a random one.
#
# A checkpoint is a folder with three kinds of files: sizes (`config.json`), named weights (`model.safetensors`), and a tokenizer. It contains no code. The formulas are in your program, and nothing in the folder proves that your formulas are the right ones.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file, save_file
from shared import attempt, dates_model, decoder_model, minilm_folder
from torch.nn.functional import gelu, layer_norm, linear, softmax

import clearhead as ch

torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)
temporary = tempfile.TemporaryDirectory()  # removed at the end
work = Path(temporary.name)

# %% [markdown]
# ## A checkpoint folder
#
# [MiniLM](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) turns a sentence into a vector. It is a BERT of six layers. A Python package on this machine contains it, so you need no network.

# %%
folder = minilm_folder()
config = json.loads((folder / "config.json").read_text())
print({name: config[name] for name in ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads")})
theirs = load_file(folder / "model.safetensors")
for name, tensor in list(theirs.items())[:6]:
    print(f"{name:52} {list(tensor.shape)}")
print("...", len(theirs), "tensors")

# %% [markdown]
# Load the model and use it: sentences of similar meaning have vectors of similar direction.

# %%
model = ch.load(folder)
sentences = ["A dog runs through the snow.", "A puppy plays outside in winter.", "The bank raised its interest rates."]
vectors = model.embed(sentences)
print(model)
print((vectors @ vectors.T).round(2))

# %% [markdown]
# ## Match tensors and parameters
#
# In clearhead the name of a parameter is its address in the spec, for every family. Do not rely on a table of names: compare the **numbers**. Which parameter holds the same numbers as a tensor of the file, unchanged or transposed? The next cell prints layer 0 of the file, with the matching parameters of the model:


# %%
def places(tensor, module):
    addresses = []
    for address, parameter in module.named_parameters():
        if parameter.shape == tensor.shape and torch.equal(parameter, tensor):
            addresses.append(address)
        elif tensor.dim() == 2 and parameter.shape == tensor.T.shape and torch.equal(parameter, tensor.T):
            addresses.append(f"{address} (transposed)")
    return addresses


for name, tensor in theirs.items():
    if "layer.0." in name and name.endswith("weight"):
        addresses = ", ".join(places(tensor, model.module)).removeprefix("encoder.layers.0.")
        print(f"{name.removeprefix('encoder.layer.0.'):34} {list(tensor.shape)!s:13} {addresses}")

# %% [markdown]
# ## The proof
#
# Even if names and shapes fit, the result may be wrong. Only one proof counts: compute the same text in another way, and compare. The next cell computes BERT as in the paper, from the tensors of the file alone. BERT is post-norm, so each norm comes after the sum.

# %%
width, heads, eps = config["hidden_size"], config["num_attention_heads"], config.get("layer_norm_eps", 1e-12)
ids = model.read("I love transformers").source.ids


def by_hand(ids):
    def dense(x, name):
        return linear(x, theirs[f"{name}.weight"], theirs[f"{name}.bias"])

    def norm(x, name):
        return layer_norm(x, (width,), theirs[f"{name}.weight"], theirs[f"{name}.bias"], eps)

    tables = [theirs[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    x = norm(tables[0][ids] + tables[1][: ids.shape[1]] + tables[2][0], "embeddings.LayerNorm")
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}"
        q, k, v = (
            dense(x, f"{at}.attention.self.{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        attended = dense(mixed.transpose(1, 2).flatten(2), f"{at}.attention.output.dense")
        x = norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = gelu(dense(x, f"{at}.intermediate.dense"))
        x = norm(x + dense(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


with torch.no_grad():
    ours = model.module.encode(ids).memory
print(
    "numbers up to", round(float(ours.abs().max()), 2), " largest difference", float((by_hand(ids) - ours).abs().max())
)

# %% [markdown]
# Differences in the sixth digit are rounding. If transformers is installed, `clearhead check FOLDER --against transformers` compares layer by layer. It names the first submodule whose output differs.
#
# ## What MiniLM's heads do
#
# Training does not prescribe what a head does, so measure it. What share of the attention of each head goes to the previous token, to the first token, and to the token itself?

# %%
texts = [
    *sentences,
    "I love transformers",
    "She put the book on the table and left.",
    "It was cold, so we stayed at home.",
]
measured = model.heads(texts)
for name in ("previous_token", "first_token", "diagonal"):
    best = sorted(measured, key=lambda head: -getattr(head, name))[:3]
    print(f"{name:15}", "  ".join(f"layer {head.layer} head {head.head}: {getattr(head, name):.2f}" for head in best))

# %% [markdown]
# The pictures show the head with the largest share for each line above, on one sentence. Rows are queries, columns are keys.

# %%
maps = model.attention("She put the book on the table and left.")
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for axis, name in zip(axes, ("previous_token", "first_token", "diagonal")):
    head = max(measured, key=lambda head: getattr(head, name))
    axis.imshow(maps.weights("encoder.self", layer=head.layer, head=head.head), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"{name}: layer {head.layer}, head {head.head}", fontsize=9)
    axis.set_xticks(range(len(maps.tokens)), maps.tokens, rotation=90, fontsize=7)
    axis.set_yticks(range(len(maps.tokens)), maps.tokens, fontsize=7)
plt.show()

# %% [markdown]
# Here are all heads, on the sentence with which a tutorial shows a model of this size. Heads that attend only to `[CLS]` or `[SEP]` do almost nothing: these tokens take the attention that a head does not need.

# %%
model.attention("I love transformers")

# %% [markdown]
# ## GPT-2's file: transposed and packed
#
# GPT-2 computes $x W + b$, but a linear layer computes $x W^\top + b$. So the matrices in the file are transposed ("Conv1D"). Query, key and value are packed into one matrix: `c_attn` has three times the width. It holds first all queries, then all keys, then all values.
#
# GPT-2 itself has 500 MB. The next cell builds a small random model with the same names and formulas, and with the tokenizer of our decoder:

# %%
decoder = decoder_model()
width, layers, heads, rows = 48, 2, 4, decoder.module.num_source_ids
tiny_llama = decoder.with_module(ch.build(ch.presets.llama_tiny(vocab_size=rows)))
for weight in tiny_llama.module.parameters():
    weight.data += 0.1 * torch.randn_like(weight)  # no two norms alike
shapes = {"ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "ln_2": (width,)}
shapes |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
gpt2 = {"wte.weight": torch.randn(rows, width) * 0.3, "wpe.weight": torch.randn(64, width) * 0.1}
for at in [f"h.{number}.{name}" for number in range(layers) for name in shapes] + ["ln_f"]:
    shape = shapes.get(at.split(".", 2)[-1], (width,))
    gpt2[f"{at}.weight"] = torch.randn(shape) * 0.3 + (len(shape) == 1)
    gpt2[f"{at}.bias"] = torch.randn(shape[-1]) * 0.1
sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 64, "vocab_size": rows}


def write_checkpoint(name, tensors, **config):
    tiny_llama.save(work / name, format="hf")  # for its tokenizer
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, work / name / "model.safetensors")
    (work / name / "config.json").write_text(json.dumps(config))
    return ch.load(work / name)


small = write_checkpoint("gpt2", gpt2, model_type="gpt2", architectures=["GPT2LMHeadModel"], **sizes)
packed = gpt2["h.0.attn.c_attn.weight"]
for name, matrix in zip(("query", "key", "value"), packed.split(width, dim=1)):
    print(f"columns of the {name:5}", list(matrix.shape), *places(matrix, small.module))

# %% [markdown]
# Prove again that the model computes the same as the file, now with GPT-2's layout of the matrices:


# %%
def gpt2_by_hand(ids, unpack):
    def dense(x, name):
        return x @ gpt2[f"{name}.weight"] + gpt2[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, (width,), gpt2[f"{name}.weight"], gpt2[f"{name}.bias"])

    x = gpt2["wte.weight"][ids] + gpt2["wpe.weight"][: len(ids)]
    for at in (f"h.{number}" for number in range(layers)):
        q, k, v = unpack(dense(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn"))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(
            torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf
        )
        x = x + dense((softmax(scores, -1) @ v).transpose(0, 1).flatten(1), f"{at}.attn.c_proj")
        x = x + dense(gelu(dense(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh"), f"{at}.mlp.c_proj")
    return norm(x, "ln_f") @ gpt2["wte.weight"].T


def one_after_another(packed):
    return [piece.unflatten(-1, (heads, -1)).transpose(0, 1) for piece in packed.chunk(3, -1)]


def head_by_head(packed):
    return packed.unflatten(-1, (heads, -1)).transpose(0, 1).chunk(3, -1)


ids = small.read("5. Januar 1998").source.ids
with torch.no_grad():
    expected = small.tree(ids).logits[0]
for unpack in (one_after_another, head_by_head):
    print(f"{unpack.__name__:18}", float((gpt2_by_hand(ids[0], unpack) - expected).abs().max()))

# %% [markdown]
# The second function takes the query, key and value of head 0, then those of head 1, and so on. GPT-NeoX and one well-known tutorial pack their weights in this order. All shapes are the same in both orders. With the wrong order no error appears, but the result is wrong: a converter has to **know** the order.
#
# ## Tied weights
#
# The last line of `gpt2_by_hand` multiplies by `wte` again: GPT-2 has no separate output matrix. Both the file and the model hold this matrix once:

# %%
print([name for name in gpt2 if "wte" in name or "head" in name], list(gpt2["wte.weight"].shape))
print("a separate output matrix:", any("head" in name for name, _ in small.module.named_parameters()))

# %% [markdown]
# ## Llama's file
#
# [stories260K](https://huggingface.co/karpathy/tinyllamas) is a Llama that is small enough for an e-mail. It has five layers of width 64, RMS norms and gated feed-forward layers. Its eight query heads share four key and value heads. The next cell reads it from the folder that the variable `CLEARHEAD_DATA` names. If the checkpoint is not there, the cell uses a small Llama with random weights.

# %%
stories = Path(os.environ.get("CLEARHEAD_DATA", "")) / "stories260K"
if not (stories / "model.safetensors").exists():
    stories = work / "llama"
    tiny_llama.save(stories, format="hf")
llama, tensors = ch.load(stories), load_file(stories / "model.safetensors")
for name, tensor in tensors.items():
    if "layers.0." in name or "layers" not in name:
        addresses = ", ".join(places(tensor, llama.module)).removeprefix("decoder.")
        print(f"{name.removeprefix('model.'):40} {list(tensor.shape)!s:10} {addresses}")

# %% [markdown]
# Keys and values have half the rows of the queries: two query heads share one key and value head. There are no biases and no table of positions: the attention rotates queries and keys instead.
#
# ## Two stacks
#
# A translator has a second attention in each layer of its decoder. The next cell prints the three steps of a layer, for the paper's model and for the translator of the lessons. Each step has a norm and a dropout.

# %%
translator = dates_model()
for name, spec in (("paper", ch.presets.transformer_base()), ("ours", translator.spec)):
    for number, step in enumerate(spec.decoder.layers[0].steps):
        (branch,) = step.branches
        kind = getattr(branch.function, "source", "feed-forward")
        norm_place = "after the sum" if step.out else "before the sub-layer"
        print(f"{name:5}  decoder.layers.0.steps.{number}  {kind:12}  norm {norm_place}, dropout {branch.dropout}")

# %% [markdown]
# In the files of Marian, BART and T5 the middle step is called `encoder_attn` or `EncDecAttention`. Which side gives the queries, and which side the keys? The file does not say, because the query and key matrices have the same shape. So look at the attention weights of a run: the decoder gives the queries, and the encoder gives the keys. One well-known tutorial swaps the two sides, which is a mistake.

# %%
pair = translator.attention("5. Januar 1998", "1998-01-05")
cross = pair.weights("decoder.memory", layer=0, head=0)
print(
    f"{len(pair.target_tokens)} target tokens, {len(pair.tokens)} source tokens; queries and keys: {list(cross.shape)}"
)

# %% [markdown]
# :::{admonition} With a network: GPT-2, BERT and T5 from the hub
# :class: note
#
# This page does not run these commands. Each command downloads its model once.
#
# ```sh
# clearhead inspect gpt2
# clearhead generate gpt2 --prompt "A robot may not" --max-new-tokens 40 --seed 0
# clearhead fill google-bert/bert-base-uncased "I love [MASK]."
# clearhead generate google-t5/t5-small --task translation_en_to_de --prompt "The house is old." --greedy
# clearhead view microsoft/xtremedistil-l12-h384-uncased "I love transformers" -o heads.html
# clearhead check gpt2 --against transformers
# ```
# :::
#
# ## Break it
#
# **The switch.** You want to know whether a text is friendly. MiniLM has no head for that, so a program adds one: two rows of random numbers. Some libraries do so automatically, with a warning that is easy to miss.


# %%
def with_head(name, seed=None):
    target, width = work / name, config["hidden_size"]
    target.mkdir(exist_ok=True)
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        if (folder / file).exists():
            (target / file).write_bytes((folder / file).read_bytes())
    pooler = {"pooler.dense.weight": 2 * torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    tensors = {f"bert.{key}": tensor for key, tensor in {**theirs, **pooler}.items()}
    if seed is not None:
        draw = torch.Generator().manual_seed(seed)
        tensors["classifier.weight"] = torch.randn(2, width, generator=draw) * 0.02
        tensors["classifier.bias"] = torch.zeros(2)
    save_file(tensors, target / "model.safetensors")
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "Negative", "1": "Positive"}}
    (target / "config.json").write_text(json.dumps({**config, **labels}))
    return target


# %% [markdown]
# **The symptom.** The model answers any text with a label and a probability:

# %%
for seed in range(8):
    (prediction,) = ch.load(with_head("untrained", seed)).classify(["I love transformers"])
    print(f"seed {seed}: {prediction.label} {prediction.probability:.2f}")

# %% [markdown]
# The "Positive, 0.55" of a well-known tutorial is such a number. The number depends on the seed of the random weights. It is near one half, because small random weights make small logits.
#
# **The detector.** An untrained head has biases of zero and weights from a normal distribution. `clearhead check` looks for this in any model, among many other faults. The next cell prints the beginning of its report:

# %%
check = [sys.executable, "-m", "clearhead", "check", str(work / "untrained")]
done = subprocess.run(check, check=False, capture_output=True, text=True)
print("\n".join(done.stdout.replace(f"{work}/", "").splitlines()[:6]))
assert done.returncode == 1 and "untrained" in done.stdout

# %% [markdown]
# **The fix.** Refuse the checkpoint, or train the head. When you load a classifier, clearhead refuses a file without the head, and names the missing tensor:

# %%
try:
    ch.load(with_head("missing"))
except ch.InputError as error:
    print(str(error).replace(f"{work}/", ""))

# %% [markdown]
# Training a head on MiniLM, with the weights of MiniLM frozen, takes a moment. Sixteen adjectives are the training set, and eight unseen adjectives are the test set:

# %%
good = "wonderful lovely great perfect kind excellent delightful beautiful brilliant superb pleasant charming".split()
bad = "awful terrible bad ugly boring disgusting horrible rude dreadful nasty poor miserable".split()


def sentences_of(adjectives):
    return [f"The {noun} was {word}." for word in adjectives for noun in ("film", "meal", "day")]


taught, tried = sentences_of(good[:8] + bad[:8]), sentences_of(good[8:] + bad[8:])
classifier = ch.load(work / "untrained")
with classifier.capture("head.layers.2") as seen:
    classifier.classify(taught)
features, truth = seen.tensor("head.layers.2").clone(), torch.tensor([1] * 24 + [0] * 24)

new = torch.nn.Linear(features.shape[-1], 2)
optimizer = torch.optim.AdamW(new.parameters(), lr=0.01, weight_decay=0.1)
for _ in range(200):
    loss = torch.nn.functional.cross_entropy(new(features), truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def right(classifier):
    labels = [prediction.label for prediction in classifier.classify(tried)]
    return sum(label == wanted for label, wanted in zip(labels, ["Positive"] * 12 + ["Negative"] * 12))


before = right(classifier)
with torch.no_grad():
    classifier.module.head.layers[3].weight.copy_(new.weight)
    classifier.module.head.layers[3].bias.copy_(new.bias)
print(f"right of {len(tried)}: {before} before, {right(classifier)} after")

# %% [markdown]
# For your texts, `clearhead new classify --labels FILE --init FOLDER` writes a run file that trains all weights ([guide](../guides/fine-tune.md)).
#
# ## Exercises
#
# **1 · Unpack (15 minutes, medium).** Write the converter of `c_attn`. It turns GPT-2's packed `weight` of shape `[width, 3 · width]` into three matrices in the layout of `torch.nn.Linear`. The three matrices are square, so a transposed matrix also has the right shape.


# %% tags=["exercise"]
def unpack_weight(weight):
    raise NotImplementedError


def check_unpack(function):
    weight = torch.arange(4 * 12).view(4, 12)
    x, matrices = torch.tensor([[1, 2, 3, 4]]), function(weight)
    assert isinstance(matrices, list | tuple), f"return a list of three matrices; yours is {type(matrices).__name__}"
    assert len(matrices) == 3, f"query, key and value are three matrices; you return {len(matrices)}"
    for name, matrix, expected in zip(
        ("query", "key", "value"), matrices, (weight[:, :4], weight[:, 4:8], weight[:, 8:])
    ):
        assert matrix.shape == (4, 4), f"the {name} has shape (4, 4); yours has {tuple(matrix.shape)}"
        assert not torch.equal(matrix, expected), (
            f"the right numbers for the {name}, but a Linear computes x Wᵀ: transpose"
        )
        assert sorted(matrix.flatten().tolist()) == sorted(expected.flatten().tolist()), (
            f"the {name} has other numbers: its columns are {expected[0].tolist()} in the first row, and yours holds "
            f"{sorted(matrix.flatten().tolist())[:4]}"
        )
        assert torch.equal(x @ matrix.T, x @ expected), (
            f"the numbers of the {name} are the right ones, in another order"
        )
    return "right"


attempt(lambda: check_unpack(unpack_weight))


# %% tags=["hide-cell", "solution"]
def unpack_solution(weight):
    return [matrix.T for matrix in weight.chunk(3, dim=1)]


assert check_unpack(unpack_solution) == "right"
attempt(lambda: check_unpack(lambda weight: weight.chunk(3, dim=1)))  # wrong answers
attempt(lambda: check_unpack(lambda weight: weight.T.view(4, 3, 4).unbind(1)))

# %% [markdown]
# **2 · A head of one kind (10 minutes, easy).** Use `model.heads` on three of your texts. Set `mine` to the layer and the head with the largest share of attention on the **previous token**, on average over your texts.

# %% tags=["exercise"]
my_texts, mine = [], None


def check_head(my_texts, mine):
    if mine is None:
        raise NotImplementedError
    assert isinstance(mine, tuple) and len(mine) == 2, f"a layer and a head, such as (0, 3); yours is {mine!r}"
    assert len(my_texts) >= 3, f"three texts at least; yours are {len(my_texts)}"
    share = {(head.layer, head.head): head.previous_token for head in model.heads(my_texts)}
    assert mine in share, f"there is no layer and head {mine}; both count from 0"
    best = max(share, key=share.get)
    assert mine == best, f"{mine} has a share of {share[mine]:.2f}; another head has {share[best]:.2f}"
    return f"right: a share of {share[best]:.2f} of its attention goes to the previous token"


attempt(lambda: check_head(my_texts, mine))

# %% tags=["hide-cell", "solution"]
best = max(model.heads(sentences), key=lambda head: head.previous_token)
print(check_head(sentences, (best.layer, best.head)))
attempt(lambda: check_head(sentences, (1, 0)))  # a wrong answer

# %% [markdown]
# **3 · The savings of tied weights (2 minutes, easy).** stories260K has 512 tokens and width 64. How many parameters would a separate output matrix add? How many parameters would a separate output matrix add to GPT-2, with 50,257 tokens and width 768?

# %% tags=["exercise"]
of_stories, of_gpt2 = None, None


def check_tying(of_stories, of_gpt2):
    if None in (of_stories, of_gpt2):
        raise NotImplementedError
    assert of_stories == 512 * 64, f"one number for each token and each feature; yours is {of_stories:,}"
    assert of_gpt2 == 50257 * 768, f"of GPT-2 the same product; yours is {of_gpt2:,}"
    return f"right: {of_stories:,} and {of_gpt2:,}, of GPT-2 nearly a third of its 124 million"


attempt(lambda: check_tying(of_stories, of_gpt2))

# %% tags=["hide-cell", "solution"]
print(check_tying(512 * 64, 50257 * 768))
