"""Inspection reads headers only, and conversion one tensor at a time: bits, memory in child processes, full disks."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles
from clearhead.checkpoints.weights.writer import TensorWriter
from clearhead.fast.memory import FORMATS
from clearhead.model.loading import load_as_stored, load_exact
from tests import hf_models
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

# A language model with stacked and turned matrices (GPT-2), and one with rotary positions.
MODELS = {"gpt2": hf_models.language_model, "llama": hf_models.endless_model}
PEAK = """
import json, sys
from pathlib import Path
import clearhead, torch
from clearhead.apps.cli import convert, generate, inspect, main
from clearhead.model import facade, loading, opening, saving
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
main.main(["inspect", "gpt2"])
for words in json.loads(sys.argv[1]):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    code = main.main(words)
    print("\\n" + json.dumps([code, status("VmHWM:") - before]))
"""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_converted_model_is_the_one_that_is_loaded_and_saved(name: str, precision: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "model")
    assert main(["convert", str(folder), str(tmp_path / "streamed"), "--precision", precision]) == 0
    ch.load(folder, device="cpu", precision=precision).save(tmp_path / "saved")
    streamed, saved = (
        load_file(tmp_path / folder_name / "weights.safetensors") for folder_name in ("streamed", "saved")
    )
    assert streamed.keys() == saved.keys()
    assert all(streamed[key].dtype == saved[key].dtype and torch.equal(streamed[key], saved[key]) for key in saved)
    # Again, from our own layout: no bit changes.
    assert main(["convert", str(tmp_path / "streamed"), str(tmp_path / "again"), "--precision", precision]) == 0
    again = load_file(tmp_path / "again" / "weights.safetensors")
    assert all(torch.equal(again[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hubs_layout_is_written_back_bit_by_bit(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MODELS[name](tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    load_as_stored(folder).save(tmp_path / "loaded", format="hf", max_shard_size=20_000)
    monkeypatch.setattr("clearhead.model.loading.load_as_stored", None)  # the path without a whole model
    arguments = ["--to", "hf", "--max-shard-size", "20KB"]
    assert main(["convert", str(folder), str(tmp_path / "streamed"), *arguments]) == 0
    first, second = (TensorFiles(tmp_path / folder_name) for folder_name in ("loaded", "streamed"))
    assert {key: header.file for key, header in first.headers.items()} == {
        key: header.file for key, header in second.headers.items()
    }
    assert len({header.file for header in second.headers.values()}) > 2
    original = load_file(file)
    for key in second:
        assert second[key].dtype == dtype and torch.equal(second[key], original[key])


def test_a_disk_without_space_is_one_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = hf_models.language_model(tmp_path / "model")
    capfd.readouterr()
    before, count = sorted(tmp_path.iterdir()), 0
    write = TensorWriter.write

    def fill_disk(self: TensorWriter, name: str, tensor: Tensor) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(TensorWriter, "write", fill_disk)
    for options in (["--precision", "int8"], ["--to", "hf"]):
        count = 0
        assert main(["convert", str(folder), str(tmp_path / "out"), *options]) == 1
        message = capfd.readouterr().err
        assert "could not be saved" in message and message.count("\n") == 1 and "Traceback" not in message
        assert sorted(tmp_path.iterdir()) == before


def test_weights_that_are_no_numbers_are_not_converted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = hf_models.language_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for options in (["--precision", "int8"], ["--to", "hf"]):
        assert main(["convert", str(folder), str(tmp_path / "out"), *options]) == 2
        assert "are NaN or infinite" in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_inspect_needs_no_weight(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = hf_models.endless_model(tmp_path / "model")
    saved = tmp_path / "saved"
    ch.load(folder, device="cpu", precision="int8").save(saved)
    (saved / "manifest.json").unlink()
    for model_folder, file, kind in ((folder, "model.safetensors", "float32"), (saved, "weights.safetensors", "int8")):
        records = []
        for _ in range(2):
            capfd.readouterr()
            assert main(["inspect", str(model_folder), "--json"]) == 0
            records.append(json.loads(capfd.readouterr().out))
            content = (model_folder / file).read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            # Every number becomes NaN, or -1.
            (model_folder / file).write_bytes(content[:start] + b"\xff" * (len(content) - start))
        assert records[0] == records[1]
        assert {entry["why"] for entry in records[0]["served"]} == {kind}
        assert [entry["precision"] for entry in records[0]["precisions"]] == [choice.precision for choice in FORMATS]
        assert main(["generate", str(model_folder), "--prompt", "a"]) == 2


def test_an_exact_model_of_quantized_weights_computes_with_the_widened_ones(tmp_path: Path) -> None:
    folder = hf_models.language_model(tmp_path / "model")
    ch.load(folder, device="cpu", precision="int8").save(tmp_path / "saved")
    exact, widened = (
        load_exact(tmp_path / "saved", device="cpu"),
        ch.load(tmp_path / "saved", device="cpu", precision="fp32"),
    )
    ids = torch.tensor([[1, 5, 9, 2, 7]])
    with torch.no_grad():
        assert torch.equal(exact.module(ids).logits, widened.module(ids).logits)
    first, second = (model.attention("the cat", generate=3) for model in (exact, widened))
    assert first.written_tokens == second.written_tokens


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be reset")
def test_the_peak_of_each_command(tmp_path: Path) -> None:
    """0.3 billion weights in bf16: 569 MB in all, and the largest tensor has 66 MB."""
    from large_models import SHAPES, write_checkpoint  # type: ignore[import-not-found]

    model = str(write_checkpoint(SHAPES["0.3"], tmp_path / "model"))
    # Two tensors, beside tokenizers and pages of code.
    converted = 2 * 66 + 100
    bounds = {
        ("inspect", model): 100,
        ("convert", model, str(tmp_path / "bf16"), "--precision", "bf16"): converted,
        ("convert", model, str(tmp_path / "int8"), "--precision", "int8"): converted,
        ("convert", model, str(tmp_path / "hf"), "--to", "hf"): converted,
        ("generate", model, "--prompt", "a", "--max-new-tokens", "2"): int(1.1 * 569) + converted,
    }
    command = [sys.executable, "-c", PEAK, json.dumps([*bounds])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (words, most), (code, peak) in zip(bounds.items(), answers[-len(bounds) :], strict=True):
        assert code == 0 and peak < 1e6 * most, f"{' '.join(words)}: {peak / 1e6:.0f} MB, at most {most}; {done.stderr}"
