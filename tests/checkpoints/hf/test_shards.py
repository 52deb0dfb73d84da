"""Large checkpoints are several files, as other libraries read them; saving leaves nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import clearhead as ch
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.checkpoints.weights.files import save_shards
from clearhead.checkpoints.weights.writer import TensorWriter
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests import hf_models

INDEX = "model.safetensors.index.json"


def module() -> ch.Transformer:
    hparams = Hyperparameters(
        family="decoder", layers=2, width=14, heads=2, feedforward=19, positions="learned", max_positions=11,
        norm_place="pre", activation="gelu_tanh", embedding_scale=1.0, tie="decoder",
    )  # fmt: skip
    return build(build_spec(hparams, source_vocab=23, target_vocab=23)).eval()


def test_shards_hold_what_one_file_holds_and_both_libraries_read_them(tmp_path: Path) -> None:
    model = module()
    save_module(model, tmp_path / "one", model_type="gpt2")
    save_module(model, tmp_path / "many", model_type="gpt2", max_shard_size=3000)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    whole, names = load_file(tmp_path / "one" / "model.safetensors"), sorted(set(index["weight_map"].values()))
    assert not (tmp_path / "many" / "model.safetensors").exists()
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in whole.values())
    joined: dict[str, Tensor] = {}
    for name in names:
        shard = load_file(tmp_path / "many" / name)
        assert len(shard) == 1 or sum(4 * tensor.numel() for tensor in shard.values()) <= 3000
        joined |= shard
    assert joined.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in whole.items())
    loaded = load_module(tmp_path / "many").module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    ids = torch.randint(23, (2, 7))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "many").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_tensor_with_two_names_is_counted_once(tmp_path: Path) -> None:
    table = torch.randn(5, 7)
    tensors = {"table": table, "again": table, "other": torch.randn(3, 11)}
    assert len(save_shards(tmp_path, tensors, name="model.safetensors", max_size=300)) == 2
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == {"table", "other"} and index["metadata"]["total_size"] == 4 * (35 + 33)
    assert set(TensorFiles(tmp_path)) == {"table", "other"}


@pytest.mark.parametrize("format", ["hf", "clearhead"])
def test_what_is_interrupted_leaves_nothing(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ch.load(hf_models.language_model(tmp_path / "model"), device="cpu", precision="fp32")
    before = sorted(tmp_path.iterdir())
    write = TensorWriter.write

    def write_and_interrupt(self: TensorWriter, name: str, tensor: Tensor) -> None:
        write(self, name, tensor)
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorWriter, "write", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.save(tmp_path / "out", format=format)
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    model.save(tmp_path / "out", format=format)
    assert ch.load(tmp_path / "out", device="cpu").generate("the cat", max_new_tokens=3)
