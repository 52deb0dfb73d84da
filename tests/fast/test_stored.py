"""Matrices in the 16 bits of their checkpoint: fp32 results keep their bits, and saving loses nothing."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead import surgery
from clearhead.base.errors import InputError
from clearhead.fast import stored
from clearhead.fast.runner import Runner
from clearhead.fast.stored import BF16, FP16, Stored, stored_matrices
from clearhead.interpret.maps.attention_maps import in_precision
from tests import hf_models

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IDS = torch.arange(1, 20)[None] % 17


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LEAST_WEIGHTS", 1)


@pytest.fixture(params=["bf16", "fp16", "gpt2", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Checkpoints in 16 bits: with two dtypes, with transposed matrices, and with stacked experts."""
    if request.param == "gpt2":
        folder = hf_models.language_model(tmp_path / "model")
    elif request.param == "experts":
        folder = hf_models.rotary_model(tmp_path / "model")
        vocabulary = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
        config = transformers.MixtralConfig(
            vocab_size=vocabulary, hidden_size=26, intermediate_size=29, num_hidden_layers=2, num_attention_heads=2,
            head_dim=14, num_key_value_heads=1, num_local_experts=3, max_position_embeddings=61, sliding_window=None,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        hf_models.save(transformers.MixtralForCausalLM(config), folder)
    else:
        folder = hf_models.rotary_model(tmp_path / "model")
    dtype = DTYPES.get(request.param, torch.bfloat16)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_promises_fp32_has_the_bits_of_an_fp32_load(folder: Path) -> None:
    short, wide = ch.load(folder, device="cpu"), ch.load(folder, device="cpu", precision="fp32")
    formats = set(stored_matrices(short.module).values())
    assert formats in ({BF16}, {FP16}) and not stored_matrices(wide.module)
    assert {served.detail for served in short.runner.report() if served.backend == "kernels"} == {"mixed"}
    exact = short.runner.exact
    assert [(entry.backend, entry.detail) for entry in exact.report() if entry.backend == "kernels"] == [
        (entry.backend, entry.detail) for entry in wide.runner.exact.report() if entry.backend == "kernels"
    ]
    with torch.inference_mode():
        for ours, theirs in ((short.module, wide.module), (exact.tree(), wide.runner.exact.tree())):
            assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    assert short.score(["the cat sat"]) == wide.score(["the cat sat"])
    maps, again = (model.attention("the cat sat").to_json() for model in (short, wide))
    assert maps == again
    assert in_precision(short.module, "fp32") is short.module
    with torch.inference_mode():
        half = in_precision(short.module, "bf16")
        assert half(IDS).logits.dtype == torch.bfloat16
    edited, plain = (surgery.keep_layers(model.module, [1]).model for model in (short, wide))
    assert {tensor.dtype for tensor in edited.state_dict().values()} == {torch.float32}
    assert all(map(torch.equal, edited.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_stored_models_are_copied_and_pickled(precision: str, tmp_path: Path) -> None:
    folder = hf_models.rotary_model(tmp_path / "model")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    model = ch.load(folder, device="cpu", precision=precision)
    for other in (pickle.loads(pickle.dumps(model.runner)), copy.deepcopy(model.runner)):
        assert stored_matrices(other.module) == stored_matrices(model.module)
        with torch.inference_mode():
            assert torch.equal(other.module(IDS).logits, model.module(IDS).logits)
            assert torch.equal(other.tree()(IDS).logits, model.runner.tree()(IDS).logits)


def test_mapped_and_copied_weights_give_equal_bits(folder: Path) -> None:
    model = ch.load(folder, device="cpu")
    copied = Runner(copy.deepcopy(model.module), in_bf16=True)
    entries, copies = (
        [entry for submodule in module.modules() if isinstance(submodule, Stored) for entry in submodule.entries()]
        for module in (model.module, copied.module)
    )
    assert any(entry.data_ptr() % 64 for entry in entries) and not any(entry.data_ptr() % 64 for entry in copies)
    with torch.inference_mode():
        for rows in (1, 3, 20):
            ids = IDS.repeat(rows, 1)
            assert torch.equal(model.runner.tree()(ids).logits, copied.tree()(ids).logits)


def test_a_save_writes_what_the_file_has(folder: Path, tmp_path: Path) -> None:
    model = ch.load(folder, device="cpu")
    model.save(tmp_path / "hf", format="hf")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: before_tensor.dtype for name, before_tensor in before.items()
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    model.save(tmp_path / "own")
    again = ch.load(tmp_path / "own", device="cpu")
    assert stored_matrices(again.module) == stored_matrices(model.module)
    assert all(map(torch.equal, again.module.state_dict().values(), model.module.state_dict().values()))
    wide = ch.load(tmp_path / "own", device="cpu", precision="fp32").module
    with torch.inference_mode():
        assert torch.equal(wide(IDS).logits, model.module(IDS).logits)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_module_replica_and_file_share_one_copy(kind: str, tmp_path: Path) -> None:
    folder = hf_models.rotary_model(tmp_path / "model")
    dtype = DTYPES.get(kind, torch.bfloat16)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    if kind == "int8":
        ch.load(folder, device="cpu", precision="int8").save(tmp_path / "int8")
        folder = tmp_path / "int8"
    model = ch.load(folder, device="cpu")
    parts = [submodule for submodule in model.module.modules() if isinstance(submodule, Stored)]
    twins = [submodule for submodule in model.runner.tree().modules() if isinstance(submodule, Stored)]
    addresses = [entry.data_ptr() for submodule in parts for entry in submodule.entries()]
    assert addresses == [entry.data_ptr() for submodule in twins for entry in submodule.entries()]
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    places = [line.split()[0].split("-") for line in lines if str(folder) in line]
    spans = [range(int(start, 16), int(end, 16)) for start, end in places]
    assert all(any(address in span for span in spans) for address in addresses)
    for stack in (submodule for submodule in model.runner.tree().modules() if hasattr(submodule, "plan")):
        taken = {tensor.data_ptr() for tensor in stack.plan._tensors if tensor.dim() == 2}
        assert taken and taken <= set(addresses), "the kernels read the same bytes"


def test_dtypes_that_differ_over_shards_stay_as_they_are(tmp_path: Path) -> None:
    folder = hf_models.rotary_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    shards = [{name: tensors[name].to(kind) for name in list(tensors)[number::3]} for number, kind in enumerate(kinds)]
    (folder / "model.safetensors").unlink()
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), "utf-8")
    short, wide = ch.load(folder, device="cpu"), ch.load(folder, device="cpu", precision="fp32")
    assert {BF16, FP16} <= set(stored_matrices(short.module).values())
    assert short.score(["the cat sat"]) == wide.score(["the cat sat"])
    assert short.generate("the cat", max_new_tokens=3)
    # A truncated shard and a missing shard: one message.
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    for _ in range(2):
        with pytest.raises(InputError, match=r"model-1\.safetensors"):
            ch.load(folder, device="cpu")
        path.unlink(missing_ok=True)
