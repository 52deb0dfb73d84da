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
# You need [lesson 3](03_attention.py) and [lesson 5](05_residuals_and_norms.py). Afterwards you can open a folder that somebody else has trained, say what each tensor in it is, prove that your model computes the same as theirs, and tell a trained head from noise.
#
# A checkpoint is a folder of three things: sizes (`config.json`), numbers with names (`model.safetensors`), and a tokenizer. None of it is code. The formulas are in your program, and nothing in the folder says that they are the right ones.

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
# ## A folder
#
# [MiniLM](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) makes a vector of a sentence. It is a BERT of six layers, and it lies in a Python package, so that you need no network.

# %%
folder = minilm_folder()
config = json.loads((folder / "config.json").read_text())
print({name: config[name] for name in ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads")})
theirs = load_file(folder / "model.safetensors")
for name, tensor in list(theirs.items())[:6]:
    print(f"{name:52} {list(tensor.shape)}")
print("...", len(theirs), "tensors")

# %% [markdown]
# Load it, and use it: sentences that mean the same have vectors in the same direction.

# %%
model = ch.load(folder)
sentences = ["A dog runs through the snow.", "A puppy plays outside in winter.", "The bank raised its interest rates."]
vectors = model.embed(sentences)
print(model)
print((vectors @ vectors.T).round(2))

# %% [markdown]
# ## Which tensor is which
#
# Here a tensor is called after its place in the spec, in every family. Do not believe a table of names: look for the **numbers**. For each tensor of the file, which parameter holds the same ones, as they are or transposed? This is layer 0 of the file, and of the model:


# %%
def places(tensor, module):
    found = []
    for address, parameter in module.named_parameters():
        if parameter.shape == tensor.shape and torch.equal(parameter, tensor):
            found.append(address)
        elif tensor.dim() == 2 and parameter.shape == tensor.T.shape and torch.equal(parameter, tensor.T):
            found.append(f"{address} (transposed)")
    return found


for name, tensor in theirs.items():
    if "layer.0." in name and name.endswith("weight"):
        here = ", ".join(places(tensor, model.module)).removeprefix("encoder.layers.0.")
        print(f"{name.removeprefix('encoder.layer.0.'):34} {list(tensor.shape)!s:13} {here}")

# %% [markdown]
# ## The proof
#
# Names fit, shapes fit, and still the result may be wrong. There is one proof: compute the same text in another way, and compare. This is BERT from the paper, with nothing but the tensors of the file: post-norm, so each norm stands behind the sum.

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
# Six digits are rounding. Where transformers is installed, `clearhead check FOLDER --against transformers` does this layer by layer, and names the first submodule that differs.
#
# ## What its heads do
#
# Nobody told a head what to do. Measure it: which share of its weight lies on the token before, on the first one, on the token itself?

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
    print(f"{name:15}", "  ".join(f"layer {one.layer} head {one.head}: {getattr(one, name):.2f}" for one in best))

# %% [markdown]
# As pictures: the first of each row, on one sentence. Rows ask, columns are looked at.

# %%
maps = model.attention("She put the book on the table and left.")
figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
for axis, name in zip(axes, ("previous_token", "first_token", "diagonal")):
    one = max(measured, key=lambda head: getattr(head, name))
    axis.imshow(maps.weights("encoder.self", layer=one.layer, head=one.head), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"{name}: layer {one.layer}, head {one.head}", fontsize=9)
    axis.set_xticks(range(len(maps.tokens)), maps.tokens, rotation=90, fontsize=7)
    axis.set_yticks(range(len(maps.tokens)), maps.tokens, fontsize=7)
plt.show()

# %% [markdown]
# And all of them, on the sentence with which a tutorial shows a model of this size. Heads that look at `[CLS]` or `[SEP]` and nothing else do nothing much: they park their weight there.

# %%
model.attention("I love transformers")

# %% [markdown]
# ## GPT-2's file: transposed and packed
#
# GPT-2 multiplies as $x W + b$ where a linear layer computes $x W^\top + b$, so its matrices lie transposed in the file ("Conv1D"). And query, key and value are one matrix: `c_attn` has three times the width, first all queries, then all keys, then all values.
#
# GPT-2 itself has 500 MB. Here is one of the same names and formulas, small and random, with the tokenizer of our decoder:

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


def written(name, tensors, **config):
    tiny_llama.save(work / name, format="hf")  # for its tokenizer
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, work / name / "model.safetensors")
    (work / name / "config.json").write_text(json.dumps(config))
    return ch.load(work / name)


small = written("gpt2", gpt2, model_type="gpt2", architectures=["GPT2LMHeadModel"], **sizes)
packed = gpt2["h.0.attn.c_attn.weight"]
for name, part in zip(("query", "key", "value"), packed.split(width, dim=1)):
    print(f"columns of the {name:5}", list(part.shape), *places(part, small.module))

# %% [markdown]
# The proof again, in GPT-2's own convention:


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
    return [part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in packed.chunk(3, -1)]


def head_by_head(packed):
    return packed.unflatten(-1, (heads, -1)).transpose(0, 1).chunk(3, -1)


ids = small.read("5. Januar 1998").source.ids
with torch.no_grad():
    expected = small.tree(ids).logits[0]
for unpack in (one_after_another, head_by_head):
    print(f"{unpack.__name__:18}", float((gpt2_by_hand(ids[0], unpack) - expected).abs().max()))

# %% [markdown]
# The second one takes the query, key and value of head 0, then those of head 1, and so on. That is how GPT-NeoX packs, and one of the four tutorials. Each shape is the same. Nothing fails, and nothing is right: a converter has to **know** the order.
#
# ## Tied weights
#
# The last line by hand multiplies by `wte` once more: GPT-2 has no other output matrix. The file has it once, and the model too:

# %%
print([name for name in gpt2 if "wte" in name or "head" in name], list(gpt2["wte.weight"].shape))
print("an output matrix of its own:", any("head" in name for name, _ in small.module.named_parameters()))

# %% [markdown]
# ## Llama's file
#
# [stories260K](https://huggingface.co/karpathy/tinyllamas) is a Llama so small that it fits into a mail: five layers of width 64, eight heads of queries that share four of keys and values, RMS norms, a gate in the feed-forward part. Where `CLEARHEAD_DATA` names a folder that has it, you see it here; else one of its shape with random weights.

# %%
stories = Path(os.environ.get("CLEARHEAD_DATA", "")) / "stories260K"
if not (stories / "model.safetensors").exists():
    stories = work / "llama"
    tiny_llama.save(stories, format="hf")
llama, tensors = ch.load(stories), load_file(stories / "model.safetensors")
for name, tensor in tensors.items():
    if "layers.0." in name or "layers" not in name:
        here = ", ".join(places(tensor, llama.module)).removeprefix("decoder.")
        print(f"{name.removeprefix('model.'):40} {list(tensor.shape)!s:10} {here}")

# %% [markdown]
# Keys and values have half the rows of the queries: two heads of queries share one of keys. There are no biases, and no table of positions: both are rotated in place.
#
# ## Two stacks
#
# A translator has a second attention in each layer of its decoder. These are the three parts of a layer, of the paper's and of ours: each with a norm and a dropout of its own.

# %%
translator = dates_model()
for name, spec in (("paper", ch.presets.transformer_base()), ("ours", translator.spec)):
    for number, step in enumerate(spec.decoder.layers[0].steps):
        (branch,) = step.branches
        kind = getattr(branch.function, "source", "feed-forward")
        place = "behind the sum" if step.out else "in front"
        print(f"{name:5}  decoder.layers.0.steps.{number}  {kind:12}  norm {place}, dropout {branch.dropout}")

# %% [markdown]
# In the files of Marian, BART and T5 the middle one is `encoder_attn` or `EncDecAttention`. Which side asks there, and which one answers? No file can say: its query and key matrices have the same shape. So look at a run. The decoder asks, the encoder's tokens are looked at; the other way round is a mistake that one of the four tutorials makes.

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
# These commands are not run here. Each downloads its model once.
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
# **The switch.** You want to know whether a text is friendly. MiniLM has no head for that, so a program gives it one: two rows of random numbers. Some libraries do so by themselves, with a warning that scrolls by.


# %%
def with_head(name, seed=None):
    place, width = work / name, config["hidden_size"]
    place.mkdir(exist_ok=True)
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        if (folder / file).exists():
            (place / file).write_bytes((folder / file).read_bytes())
    pooler = {"pooler.dense.weight": 2 * torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    tensors = {f"bert.{key}": tensor for key, tensor in {**theirs, **pooler}.items()}
    if seed is not None:
        draw = torch.Generator().manual_seed(seed)
        tensors["classifier.weight"] = torch.randn(2, width, generator=draw) * 0.02
        tensors["classifier.bias"] = torch.zeros(2)
    save_file(tensors, place / "model.safetensors")
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "Negative", "1": "Positive"}}
    (place / "config.json").write_text(json.dumps({**config, **labels}))
    return place


# %% [markdown]
# **The symptom.** It answers, with a label and a probability. It answers anything:

# %%
for seed in range(8):
    (one,) = ch.load(with_head("untrained", seed)).classify(["I love transformers"])
    print(f"seed {seed}: {one.label} {one.probability:.2f}")

# %% [markdown]
# "Positive, 0.55" of a well-known tutorial is such a number. It depends on the seed, and is near one half because small random weights make small logits.
#
# **The detector.** A head that nobody trained has biases of zero and weights of a normal distribution. `clearhead check` looks for that in any model, and for much more; here is the beginning of its report:

# %%
check = [sys.executable, "-m", "clearhead", "check", str(work / "untrained")]
done = subprocess.run(check, check=False, capture_output=True, text=True)
print("\n".join(done.stdout.replace(f"{work}/", "").splitlines()[:6]))
assert done.returncode == 1 and "untrained" in done.stdout

# %% [markdown]
# **The mend.** Refuse, or train. A file without the head is refused here, by the name of what is missing:

# %%
try:
    ch.load(with_head("missing"))
except ch.InputError as error:
    print(str(error).replace(f"{work}/", ""))

# %% [markdown]
# Training a head on a body that stays as it is takes a moment. Sixteen adjectives teach it, eight that it has not seen try it:

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
    found = [one.label for one in classifier.classify(tried)]
    return sum(label == wanted for label, wanted in zip(found, ["Positive"] * 12 + ["Negative"] * 12))


before = right(classifier)
with torch.no_grad():
    classifier.module.head.layers[3].weight.copy_(new.weight)
    classifier.module.head.layers[3].bias.copy_(new.bias)
print(f"right of {len(tried)}: {before} before, {right(classifier)} after")

# %% [markdown]
# With texts of your own, `clearhead new classify --labels FILE --init FOLDER` writes the run file that trains the body as well ([guide](../guides/fine-tune.md)).
#
# ## Exercises
#
# **1 · Unpack (15 minutes, medium).** Write the converter of `c_attn`: from GPT-2's packed `weight` of shape `[width, 3 · width]` to three matrices as `torch.nn.Linear` has them. Their shapes are square, so a wrong one fits as well.


# %% tags=["exercise"]
def unpack_weight(weight):
    raise NotImplementedError


def check_unpack(function):
    weight = torch.arange(4 * 12).view(4, 12)
    x, found = torch.tensor([[1, 2, 3, 4]]), function(weight)
    assert isinstance(found, list | tuple), f"return a list of three matrices; yours is {type(found).__name__}"
    assert len(found) == 3, f"query, key and value are three matrices; you return {len(found)}"
    for name, one, expected in zip(("query", "key", "value"), found, (weight[:, :4], weight[:, 4:8], weight[:, 8:])):
        assert one.shape == (4, 4), f"the {name} has shape (4, 4); yours has {tuple(one.shape)}"
        assert not torch.equal(one, expected), (
            f"the right numbers for the {name}, but a Linear computes x Wᵀ: transpose"
        )
        assert sorted(one.flatten().tolist()) == sorted(expected.flatten().tolist()), (
            f"the {name} has other numbers: its columns are {expected[0].tolist()} in the first row, and yours holds "
            f"{sorted(one.flatten().tolist())[:4]}"
        )
        assert torch.equal(x @ one.T, x @ expected), f"the numbers of the {name} are the right ones, in another order"
    return "right"


attempt(lambda: check_unpack(unpack_weight))


# %% tags=["hide-cell", "solution"]
def solved_unpack(weight):
    return [part.T for part in weight.chunk(3, dim=1)]


assert check_unpack(solved_unpack) == "right"
attempt(lambda: check_unpack(lambda weight: weight.chunk(3, dim=1)))  # wrong answers
attempt(lambda: check_unpack(lambda weight: weight.T.view(4, 3, 4).unbind(1)))

# %% [markdown]
# **2 · A head of one kind (10 minutes, easy).** Use `model.heads` on three texts of your own. Set `mine` to the layer and the head that look most at the **token before**, on average over your texts.

# %% tags=["exercise"]
my_texts, mine = [], None


def check_head(my_texts, mine):
    if mine is None:
        return "not written yet"
    assert isinstance(mine, tuple) and len(mine) == 2, f"a layer and a head, such as (0, 3); yours is {mine!r}"
    assert len(my_texts) >= 3, f"three texts at least; yours are {len(my_texts)}"
    share = {(one.layer, one.head): one.previous_token for one in model.heads(my_texts)}
    assert mine in share, f"there is no layer and head {mine}; both count from 0"
    best = max(share, key=share.get)
    assert mine == best, f"{mine} has {share[mine]:.2f} of its weight there; another head has {share[best]:.2f}"
    return f"right: {share[best]:.2f} of its weight lies on the token before"


attempt(lambda: check_head(my_texts, mine))

# %% tags=["hide-cell", "solution"]
best = max(model.heads(sentences), key=lambda one: one.previous_token)
print(check_head(sentences, (best.layer, best.head)))
attempt(lambda: check_head(sentences, (1, 0)))  # a wrong answer

# %% [markdown]
# **3 · What tying saves (2 minutes, easy).** stories260K has 512 tokens and width 64. How many parameters would an output matrix of its own add? And of GPT-2, with 50,257 tokens and width 768?

# %% tags=["exercise"]
of_stories, of_gpt2 = None, None


def check_tying(of_stories, of_gpt2):
    if None in (of_stories, of_gpt2):
        return "not written yet"
    assert of_stories == 512 * 64, f"one number for each token and each feature; yours is {of_stories:,}"
    assert of_gpt2 == 50257 * 768, f"of GPT-2 the same product; yours is {of_gpt2:,}"
    return f"right: {of_stories:,} and {of_gpt2:,}, of GPT-2 nearly a third of its 124 million"


attempt(lambda: check_tying(of_stories, of_gpt2))

# %% tags=["hide-cell", "solution"]
print(check_tying(512 * 64, 50257 * 768))
