"""Faults of a checkpoint's folder are named in one report, and no file outside the folder is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.core import build
from clearhead.fast.stored import WeightForm
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests import hf_models

SMALL = Hyperparameters(
    family="decoder", layers=2, width=14, heads=2, feedforward=19, positions="learned", max_positions=11,
    norm_place="pre", activation="gelu_tanh", dropout=0.1, attention_dropout=0.1, embedding_scale=1.0, tie="decoder",
    initialization="normal",
)  # fmt: skip
TENSORS, SETTINGS, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    module = build(build_spec(SMALL, source_vocab=23, target_vocab=23))
    save_module(module, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def report(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_module(folder)
    return str(caught.value)


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files and write the index."""
    tensors = load_file(folder / TENSORS)
    names = sorted(tensors)
    table = {}
    for number, file_keys in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in file_keys}, folder / f"part-{number}.safetensors")
        table |= dict.fromkeys(file_keys, f"part-{number}.safetensors")
    (folder / TENSORS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))
    return table


def test_a_model_made_here_is_saved_as_a_family_that_can_say_it_and_comes_back(folder: Path) -> None:
    loaded = load_module(folder)
    assert loaded.task.kind == "generate" and not loaded.notes
    again = folder.parent / "again"
    save_module(loaded.module, again, loaded=loaded)
    first, second = load_file(folder / TENSORS), load_file(again / TENSORS)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (folder / SETTINGS).read_text() == (again / SETTINGS).read_text()


def test_a_model_that_no_family_can_say_names_what_is_in_the_way(tmp_path: Path) -> None:
    module = build(
        build_spec(Hyperparameters(layers=1, width=14, heads=2, positions="alibi"), source_vocab=23, target_vocab=23)
    )
    with pytest.raises(InputError, match=r"function\.score_bias\.kind: alibi in this model, null in the family"):
        save_module(module, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_give_the_same_as_one_file(folder: Path) -> None:
    ids = torch.randint(23, (2, 7))
    expected = load_module(folder).module(ids).logits
    shard(folder)
    assert torch.equal(load_module(folder).module(ids).logits, expected)


def test_every_fault_of_tensors_is_in_one_report(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.wpe.wieght"] = tensors.pop("transformer.wpe.weight")
        tensors["transformer.ln_f.bias"] = torch.zeros(13)
        tensors["transformer.ln_f.weight"] = torch.zeros(14, dtype=torch.int8)

    change_tensors(folder, change)
    text = report(folder)
    assert "'transformer.wpe.weight' is missing" in text
    assert "'transformer.wpe.wieght' is not a tensor of GPT2LMHeadModel" in text
    assert "'transformer.ln_f.bias' has the shape [13], the config needs [14]" in text
    assert "'transformer.ln_f.weight' holds I8" in text


def test_every_fault_of_the_config_is_in_one_report(folder: Path) -> None:
    change_config(
        folder, n_head="two", activation_function="geluu", add_cross_attention=True, n_hed=3, auto_map={"a": 1}
    )
    text = report(folder)
    for sentence in (
        "n_head must be a whole number, got two", "'geluu' is not supported", "add_cross_attention = true",
        "gpt2 has no key 'n_hed'", "did you mean 'n_head'", "auto_map",
    ):  # fmt: skip
        assert sentence in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gtp2"}, "did you mean 'gpt2'"),
        ({"model_type": None}, "no model_type"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "supported are GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"n_head": 5}, "needs"),
    ],
)
def test_a_config_that_cannot_be_honoured(folder: Path, changes: dict[str, Any], words: str) -> None:
    change_config(folder, **changes)
    assert words in report(folder)


def test_the_file_decides_whether_words_are_tied(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1.0

    change_tensors(folder, change)
    loaded = load_module(folder)
    assert "not tied" in loaded.notes[0]
    table, words = loaded.module.decoder.embedding.table.weight, loaded.module.head.projection().weight_VD
    assert torch.equal(words, table + 1.0)
    save_module(loaded.module, folder.parent / "again", loaded=loaded)
    assert not load_module(folder.parent / "again").notes


def test_names_without_the_prefix_are_read_too(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.1.attn.bias"] = torch.ones(1, 1, 11, 11)

    expected = load_module(folder).module.state_dict()
    change_tensors(folder, change)
    state = load_module(folder).module.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_half_precision_becomes_float32_unless_asked(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    change_tensors(folder, change)
    kinds = {tensor.dtype for tensor in load_module(folder).module.state_dict().values()}
    requested = {
        tensor.dtype for tensor in load_module(folder, form=WeightForm(torch.float16)).module.state_dict().values()
    }
    assert (kinds, requested) == ({torch.float32}, {torch.float16})


def truncate(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:-100])


def lying(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def outside(folder: Path) -> None:
    shutil.move(folder / TENSORS, folder.parent / "elsewhere.safetensors")
    (folder / TENSORS).symlink_to(folder.parent / "elsewhere.safetensors")


def climbing(folder: Path) -> None:
    table = shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(table, "../part-0.safetensors")}))


def absent(folder: Path) -> None:
    shard(folder)
    (folder / "part-1.safetensors").unlink()


def disagreeing(folder: Path) -> None:
    shard(folder)
    first = load_file(folder / "part-0.safetensors")
    save_file(load_file(folder / "part-1.safetensors") | first, folder / "part-1.safetensors")


def pickle_weights(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "pytorch_model.bin")


def without(folder: Path) -> None:
    (folder / TENSORS).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "damaged or not a safetensors file"),
        (lying, "damaged or not a safetensors file"),
        (outside, "a link out of the folder is not followed"),
        (climbing, "is not the name of a file in this folder"),
        (absent, "names part-1.safetensors, which is missing"),
        (disagreeing, "is in both"),
        (pickle_weights, "--from-bin"),
        (without, "has no weights"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_files_that_are_not_what_they_should_be(folder: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(folder)
    assert words in report(folder)


def test_links_into_the_store_of_the_same_repository_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in (TENSORS, SETTINGS):
        shutil.copy(folder / name, blobs / name)
        (snapshot / name).symlink_to(blobs / name)
    assert load_module(snapshot).module.num_source_ids == 23


@pytest.mark.parametrize("shape", [(), (3,), (2**17, 22)])
def test_a_computed_table_of_another_size(shape: tuple[int, ...], tmp_path: Path) -> None:
    translator = hf_models.translator(tmp_path / "model")
    tensors = load_file(translator / TENSORS)
    save_file(tensors | {"model.encoder.embed_positions.weight": torch.zeros(shape)}, translator / TENSORS)
    assert report(translator) == "'model.encoder.embed_positions.weight' differs from the table that clearhead computes"
