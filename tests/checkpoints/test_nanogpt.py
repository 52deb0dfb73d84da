"""nanoGPT's `ckpt.pt` gives the logits and texts of an independent implementation; its pickles execute nothing."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.checkpoints.hf.files.from_bin import read_plain_pickle

CHARACTERS = "\nadehilmnortuüж"
SIZES = {"n_layer": 3, "n_head": 2, "n_embd": 22, "block_size": 19, "vocab_size": len(CHARACTERS), "dropout": 0.1}
COMPILED = "_orig_mod."


def random_weights(sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return random tensors under nanoGPT's names."""
    draw, width = torch.Generator().manual_seed(5), sizes["n_embd"]
    tensors = {}

    def add(name: str, *shape: int, scale: float, center: float = 0.0) -> None:
        tensors[name] = center + scale * torch.randn(*shape, generator=draw)

    def add_linear(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns, scale=columns**-0.5)
        if sizes["bias"]:
            add(f"{name}.bias", rows, scale=0.3)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", width, scale=0.2, center=1.0)
        if sizes["bias"]:
            add(f"{name}.bias", width, scale=0.3)

    add("transformer.wte.weight", sizes["vocab_size"], width, scale=0.7)
    add("transformer.wpe.weight", sizes["block_size"], width, scale=0.5)
    for layer in range(sizes["n_layer"]):
        block = f"transformer.h.{layer}"
        add_norm(f"{block}.ln_1")
        add_linear(f"{block}.attn.c_attn", 3 * width, width)
        add_linear(f"{block}.attn.c_proj", width, width)
        add_norm(f"{block}.ln_2")
        add_linear(f"{block}.mlp.c_fc", 4 * width, width)
        add_linear(f"{block}.mlp.c_proj", width, 4 * width)
    add_norm("transformer.ln_f")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    return tensors


def logits_of(tensors: Mapping[str, Tensor], ids: list[int], num_heads: int) -> Tensor:
    """Compute the logits [tokens, vocabulary] of one text from nanoGPT's tensors, in float64 and without clearhead."""

    def linear(name: str, x: Tensor) -> Tensor:
        y = x @ tensors[f"{name}.weight"].double().T
        return y + tensors[f"{name}.bias"].double() if f"{name}.bias" in tensors else y

    def norm(name: str, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensors[f"{name}.weight"].double()
        return y + tensors[f"{name}.bias"].double() if f"{name}.bias" in tensors else y

    count, table = len(ids), tensors["transformer.wte.weight"].double()
    x = table[ids] + tensors["transformer.wpe.weight"].double()[:count]
    future = torch.ones(count, count).triu(1).bool()
    layer = 0
    while f"transformer.h.{layer}.ln_1.weight" in tensors:
        block = f"transformer.h.{layer}"
        fused = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        query, key, value = (part.reshape(count, num_heads, -1).transpose(0, 1) for part in fused.chunk(3, dim=-1))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + linear(f"{block}.attn.c_proj", mixed.transpose(0, 1).reshape(count, -1))
        inner = linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x))
        x = x + linear(f"{block}.mlp.c_proj", inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
        layer += 1
    return norm("transformer.ln_f", x) @ table.T


def write(folder: Path, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor], *, prefix: str = "") -> Path:
    """Write a `ckpt.pt` as nanoGPT writes it: with the optimizer, the settings and the step."""
    folder.mkdir(exist_ok=True)
    optimizer = {"state": {0: {"step": torch.tensor(9.0), "exp_avg": torch.ones(99_991)}}, "param_groups": [{"lr": 1}]}
    content = {
        "model": {prefix + name: tensor for name, tensor in tensors.items()}, "optimizer": optimizer,
        "model_args": dict(sizes), "iter_num": 9, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "letters"},
    }  # fmt: skip
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def write_meta(path: Path, ids: Mapping[Any, Any]) -> None:
    content = {"vocab_size": len(ids), "itos": {index: text for text, index in ids.items()}, "stoi": dict(ids)}
    path.write_bytes(pickle.dumps(content))


IDS = {character: index for index, character in enumerate(CHARACTERS)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", COMPILED])
def test_logits_and_texts_are_those_of_an_independent_implementation(tmp_path: Path, bias: bool, prefix: str) -> None:
    sizes = SIZES | {"bias": bias}
    tensors = random_weights(sizes)
    path = write(tmp_path / "out", sizes, tensors, prefix=prefix)
    write_meta(tmp_path / "out" / "meta.pkl", IDS)
    assert main(["convert", str(path), str(tmp_path / "converted"), "--from-bin"]) == 0
    model = ch.load(tmp_path / "converted", precision="fp32")
    text = "the norm\nüж"
    ids = model.tokenizer.encode(text.replace(" ", ""))
    assert ids == [IDS[character] for character in text if character != " "]
    logits = model.module(torch.tensor([ids])).logits[0].double()
    expected = logits_of(tensors, ids, sizes["n_head"])
    shown = logits[:, : len(IDS)]
    assert (shown - expected).abs().max() / expected.abs().max() < 1e-5
    # The two added rows have no probability: the loss of every text is nanoGPT's.
    assert torch.allclose(logits.log_softmax(-1)[:, : len(IDS)], shown.log_softmax(-1), rtol=0, atol=1e-12)
    prompt, written = [IDS["a"], IDS["d"]], []
    for _ in range(12):
        written.append(int(logits_of(tensors, [*prompt, *written], sizes["n_head"])[-1].argmax()))
    (generation,) = model.generate("ad", temperature=0, max_new_tokens=12)
    assert generation.text == "".join(CHARACTERS[index] for index in written)
    # The model has the sizes of the file, its dropout rate, and no state of the optimizer.
    assert model.spec.decoder is not None and model.spec.decoder.embedding.dropout == 0.1
    size = (tmp_path / "converted" / "weights.safetensors").stat().st_size
    assert size < 4 * sum(tensor.numel() for tensor in tensors.values()) + 20_000


def test_more_rows_than_tokens(data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = data_dir / "gpt2-tokenizer"
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 23, "vocab_size": 50_304, "bias": True}
    tensors = random_weights(sizes)
    path = write(tmp_path / "out", sizes, tensors)
    assert main(["convert", str(path), str(tmp_path / "converted"), "--from-bin"]) == 2
    assert "name the tokenizer with --tokenizer PATH" in capfd.readouterr().err
    command = ["convert", str(tmp_path / "out"), str(tmp_path / "converted"), "--from-bin", "--tokenizer", str(data)]
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["format"] == "clearhead"
    model = ch.load(tmp_path / "converted", precision="fp32")
    assert model.tokenizer.vocab_size == 50_257
    (generation,) = model.generate("Hello", temperature=5.0, top_p=1.0, max_new_tokens=20, seed=1)
    assert generation.tokens and generation.text
    # With biases and without added rows, the model is a GPT-2 of transformers.
    assert main(["convert", str(tmp_path / "converted"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ids = model.tokenizer.encode("Hello world, and more.")
    expected = logits_of(tensors, ids, 2)
    for logits in (theirs(torch.tensor([ids])).logits, model.module(torch.tensor([ids])).logits):
        assert (logits[0] - expected).abs().max() / expected.abs().max() < 1e-5
    assert model.module(torch.tensor([ids])).logits.shape[-1] == 50_304


def test_older_files_have_masks_and_biases(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "dropout"}
    tensors = random_weights(sizes | {"bias": True})
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 19, 19).tril() for layer in range(3)}
    path = write(tmp_path / "out", sizes, tensors | masks)
    write_meta(tmp_path / "elsewhere.pkl", IDS)
    command = ["convert", str(path), str(tmp_path / "new"), "--from-bin", "--tokenizer"]
    assert main([*command, str(tmp_path / "elsewhere.pkl")]) == 0
    ids = [3, 1, 2]
    logits = ch.load(tmp_path / "new", precision="fp32").module(torch.tensor([ids])).logits[0, :, : len(IDS)]
    assert torch.allclose(logits.double(), logits_of(tensors, ids, 2), atol=1e-4)


def test_files_that_do_not_fit_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = SIZES | {"bias": False}
    tensors = random_weights(sizes)
    write_meta(tmp_path / "meta.pkl", IDS)

    def message(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        path = write(tmp_path, sizes, tensors)
        assert main(["convert", str(path), str(tmp_path / "new"), "--from-bin"]) == 2
        assert not (tmp_path / "new").exists()
        return capfd.readouterr().err

    missing = {name: tensor for name, tensor in tensors.items() if name != "transformer.h.1.ln_2.weight"}
    assert "lacks the tensor transformer.h.1.ln_2.weight" in message(sizes, missing)
    assert "lm_head.bias belongs to no module of nanoGPT" in message(sizes, tensors | {"lm_head.bias": torch.ones(5)})
    untied = tensors | {"lm_head.weight": torch.zeros(len(IDS), 22)}
    assert "lm_head.weight differs from transformer.wte.weight" in message(sizes, untied)
    assert "transformer.wpe.weight does not fit model_args" in message(sizes | {"block_size": 23}, tensors)
    assert "n_kv_head" in message(sizes | {"n_kv_head": 1}, tensors)
    assert "must be a dict of numbers" in message(sizes | {"n_head": "2"}, tensors)
    write_meta(tmp_path / "meta.pkl", {"ab": 0})
    assert "must have single characters, got 'ab'" in message(sizes, tensors)
    write_meta(tmp_path / "meta.pkl", {"a": 15})
    assert "the id of 'a' must be 0 to 14, got 15" in message(sizes, tensors)
    write_meta(tmp_path / "meta.pkl", {"a": 3, "b": 3})
    assert "two characters of 'stoi' have one id" in message(sizes, tensors)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_nothing_in_a_pickle_is_executed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = SIZES | {"bias": False}
    path, ran = write(tmp_path, sizes, random_weights(sizes)), tmp_path / "ran"
    for protocol in range(6):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": Hostile(ran)}, protocol))
        assert main(["convert", str(path), str(tmp_path / "new"), "--from-bin"]) == 2
        assert "is refused: its pickle has the instruction" in capfd.readouterr().err
    # An index of 2^31 - 1 would reserve 32 GB.
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    assert main(["convert", str(path), str(tmp_path / "new"), "--from-bin"]) == 2
    assert "has the instruction LONG_BINPUT" in capfd.readouterr().err
    torch.save({"model_args": sizes, "model": {}, "config": Hostile(ran)}, path)
    assert main(["convert", str(path), str(tmp_path / "new"), "--from-bin"]) == 2
    assert "cannot be read as weights only" in capfd.readouterr().err
    assert not ran.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickles_are_read(tmp_path: Path, protocol: int) -> None:
    content = {
        "vocab_size": 3000,
        "itos": {},
        "stoi": {chr(index): index for index in range(3000)},
        "more": [1.5, None],
    }
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content, protocol))
    assert read_plain_pickle(tmp_path / "meta.pkl") == content


def test_files_of_nanochat_are_refused_with_the_missing_modules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["transformer.wte.weight", "transformer.h.0.attn.c_q.weight", "lm_head.weight"]
    newer = ["resid_lambdas", "x0_lambdas", "smear_lambda", "smear_gate.weight", "backout_lambda",
             "value_embeds.0.weight", "transformer.h.0.attn.ve_gate.weight"]  # fmt: skip
    for step, more in ((100, newer), (200, [])):
        torch.save({COMPILED + name: torch.ones(2, 3) for name in [*names, *more]}, tmp_path / f"model_{step:06d}.pt")
        assert main(["convert", str(tmp_path), str(tmp_path / "new"), "--from-bin"]) == 2
        message = capfd.readouterr().err
        assert f"model_{step:06d}.pt is a checkpoint of nanochat" in message
        for part in ("value_embeds", "ve_gate", "resid_lambdas", "x0_lambdas", "smear_gate", "backout_lambda"):
            assert (part in message) == bool(more)
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pt")
    assert main(["convert", str(tmp_path / "other.pt"), str(tmp_path / "new"), "--from-bin"]) == 2
    assert "has no entry 'model_args'" in capfd.readouterr().err
