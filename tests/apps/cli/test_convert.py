"""`clearhead convert`: what is written is what others read, and pickled weights meet the strict reader alone."""

from __future__ import annotations

import errno
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead.apps.cli.main import main

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(5, dtype=torch.float16)}


def failing(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capfd.readouterr().err


@pytest.mark.parametrize("is_archive", [True, False])
def test_one_pickled_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], is_archive: bool) -> None:
    source = tmp_path / "in"
    source.mkdir()
    tied = {**TENSORS, "c.weight": TENSORS["a.weight"]}
    torch.save(tied, source / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    (source / "config.json").write_text("{}")
    (source / "source.spm").write_bytes(b"x")
    (source / "run.py").write_text("1")
    assert main(["convert", str(source), str(tmp_path / "out"), "--from-bin", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"path": str(tmp_path / "out"), "format": "safetensors"}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in tensors)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "source.spm"} <= names and not {"run.py", "pytorch_model.bin"} & names


def test_several_pickled_files(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name, (tensor, value) in zip(names, TENSORS.items(), strict=True):
        torch.save({tensor: value}, source / name)
    index = {"weight_map": dict(zip(TENSORS, names, strict=True))}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert main(["convert", str(source), str(tmp_path / "out"), "--from-bin"]) == 0
    placed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert placed == {"a.weight": "model-00001-of-00002.safetensors", "b.bias": "model-00002-of-00002.safetensors"}
    assert torch.equal(load_file(tmp_path / "out" / placed["b.bias"])["b.bias"], TENSORS["b.bias"])


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_what_is_not_weights_is_refused_and_never_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in"
    source.mkdir()
    file = source / "pytorch_model.bin"
    torch.save({"a": Hostile(tmp_path / "ran")}, file)
    assert "cannot be read as weights only" in failing(capfd, source, tmp_path / "out", "--from-bin")
    file.write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    assert "cannot be read as weights only" in failing(capfd, source, tmp_path / "out", "--from-bin")
    torch.save({"a": torch.ones(2), "epoch": 3}, file)
    assert "'epoch' is a int, not a tensor" in failing(capfd, source, tmp_path / "out", "--from-bin")
    file.unlink()
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../pytorch_model.bin"}}')
    assert "names the file '../pytorch_model.bin'" in failing(capfd, source, tmp_path / "out", "--from-bin")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_links_out_of_the_folder_are_not_copied(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, secret = tmp_path / "in", tmp_path / "secret"
    source.mkdir()
    torch.save(TENSORS, source / "pytorch_model.bin")
    secret.write_text("{}")
    (source / "vocab.txt").symlink_to(secret)
    assert "a link out of the folder is not followed" in failing(capfd, source, tmp_path / "out", "--from-bin")
    assert not (tmp_path / "out").exists()


def test_a_compressed_archive_and_an_empty_index_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in"
    source.mkdir()
    stored = tmp_path / "stored.bin"
    torch.save(TENSORS, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(source / "pytorch_model.bin", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    assert "is a compressed archive" in failing(capfd, source, tmp_path / "out", "--from-bin")
    (source / "pytorch_model.bin").unlink()
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    assert "whose weight_map names files" in failing(capfd, source, tmp_path / "out", "--from-bin")
    assert not (tmp_path / "out").exists()


def test_what_to_do_must_be_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for options in ([], ["--to", "hf", "--from-bin"]):
        message = "choose one output: --to hf, --from-bin, or --precision bf16, int8 or int4"
        assert message in failing(capfd, tmp_path, out, *options)
    assert "--to onnx is unknown; expected hf" in failing(capfd, tmp_path, out, "--to", "onnx")
    assert "exists already" in failing(capfd, tmp_path, tmp_path, "--to", "hf")
    for size in ("5", "fiveGB", "-1GB", "1XB"):
        assert f"--max-shard-size {size} is not a size" in failing(
            capfd, tmp_path, out, "--to", "hf", f"--max-shard-size={size}"
        )
    assert "has an effect with --to hf only" in failing(capfd, tmp_path, out, "--from-bin", "--max-shard-size", "5GB")
    assert "has no pickled weights to convert" in failing(capfd, tmp_path, out, "--from-bin")
    missing = failing(capfd, tmp_path / "no" / "such", out, "--from-bin")
    assert f"{tmp_path} has no 'no'; expected a folder that holds" in missing


def test_a_damaged_file_is_refused_without_advice_to_run_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"x\n")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--from-bin"]) == 2
    message = capfd.readouterr().err
    assert "cannot be read as weights only" in message and "weights_only" not in message
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("clearhead.checkpoints.hf.saving.save_shards", full)
    assert main(["convert", str(trained / "run"), str(tmp_path / "out"), "--to", "hf"]) == 1
    message = f"clearhead: {tmp_path}/out could not be saved: the disk is full; the unfinished folder was removed\n"
    assert capfd.readouterr().err == message and not list(tmp_path.iterdir())


def test_a_checkpoint_without_weights_is_not_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert main(["evaluate", str(tmp_path), "--text", "any.txt"]) == 2
    assert "has no weights" in capfd.readouterr().err
