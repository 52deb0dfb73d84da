"""Loading takes no more memory than the weights: they stay in mapped files, or are copied and the mapping is freed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.base import machine
from clearhead.base.errors import LackOfMemory
from clearhead.checkpoints.hf.files.tensor_files import BLOCK, TensorFiles
from clearhead.checkpoints.hf.loading import load_module, open_checkpoint
from clearhead.checkpoints.hf.saving import save_module
from clearhead.core import build
from clearhead.fast.memory import forecast_memory
from clearhead.fast.stored import WeightForm
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests.conftest import ROOT

TENSORS = "model.safetensors"


def save_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a small decoder as GPT-2, whose matrices are stored transposed."""
    hparams = Hyperparameters(
        family="decoder", layers=2, width=14, heads=2, feedforward=19, positions="learned", max_positions=11,
        norm_place="pre", activation="gelu_tanh", embedding_scale=1.0, tie="decoder",
    )  # fmt: skip
    save_module(build(build_spec(hparams, source_vocab=23, target_vocab=23)).to(dtype), folder, model_type="gpt2")
    return folder


def find_mapped_ranges(folder: Path) -> list[range]:
    """Return the address ranges at which the checkpoint's file is mapped in this process."""
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(folder / TENSORS))]
    return [range(int(start, 16), int(end, 16)) for start, end in ranges]


def inside(tensors: dict[str, Tensor], spans: list[range]) -> list[bool]:
    return [any(tensor.data_ptr() in span for span in spans) for tensor in tensors.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_no_change_stays_in_its_mapped_file(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model", dtype)
    module = load_module(folder, form=WeightForm(dtype)).module
    assert all(inside(module.state_dict(), find_mapped_ranges(folder)))
    assert {tensor.dtype for tensor in module.state_dict().values()} == {dtype}
    feed = module.decoder.layers[0].steps[1].branches[0].function
    assert feed.up.weight.stride() == (1, 19), "turned without a copy"


def test_what_is_converted_leaves_nothing_of_the_file_in_memory(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model", torch.bfloat16)
    module = load_module(folder).module
    assert not any(inside(module.state_dict(), find_mapped_ranges(folder)))
    plain = load_module(folder, form=WeightForm(torch.bfloat16)).module.state_dict()
    assert all(torch.equal(tensor, plain[name].float()) for name, tensor in module.state_dict().items())


def test_what_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_decoder(tmp_path / "model", torch.bfloat16)
    opened = open_checkpoint(folder)
    peaks = {
        forecast.precision: forecast.load_bytes
        for forecast in forecast_memory(opened.loaded.module.spec, opened.dtypes())
    }
    weights = sum(tensor.nbytes for tensor in load_file(folder / TENSORS).values())
    assert peaks["bf16"] == weights, "nothing is copied out of the mapped file"
    monkeypatch.setattr(machine, "free_memory", lambda: peaks["bf16"])
    with pytest.raises(LackOfMemory, match=r"needs about .* but only .* is free: .* the precision bf16 \("):
        load_module(folder)
    load_module(folder, form=WeightForm(torch.bfloat16))
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    with pytest.raises(LackOfMemory, match=r"only 1\.0 kB is free: no precision fits"):
        load_module(folder, form=WeightForm(torch.bfloat16))


def test_a_tensor_larger_than_a_block_is_read_whole(tmp_path: Path) -> None:
    names = {"exact": BLOCK // 2, "more": BLOCK // 2 + 1, "several": BLOCK + 7, "one": 1, "none": 0}
    tensors = {name: torch.randn(size).bfloat16() for name, size in names.items()} | {"zero": torch.tensor(0.5)}
    tensors["twin"], tensors["other"] = tensors["several"].clone(), tensors["several"].clone()
    tensors["other"][-1] += 1.0
    save_file(tensors, tmp_path / TENSORS)
    files = TensorFiles(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name).float(), tensor.float())
        assert torch.equal(files.read(name), tensor)
    assert (
        files.is_same("several", "twin")
        and not files.is_same("several", "other")
        and not files.is_same("more", "exact")
    )


def test_a_file_that_is_cut_off_later_is_said(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model")
    files = TensorFiles(folder)
    name = max(files.headers, key=lambda key: files.headers[key].end)
    copy = tmp_path / "copy"
    save_file(load_file(folder / TENSORS), copy)
    short = copy.read_bytes()[:-4]
    # A new file under the name: the mapped one stays whole.
    (folder / TENSORS).unlink()
    (folder / TENSORS).write_bytes(short)
    with pytest.raises(ValueError, match="was changed on disk"):
        files.read(name)


def test_peak_memory_is_that_of_the_weights(tmp_path: Path) -> None:
    """Test one case of the benchmark: 592 MB of transposed matrices, with query, key and value in one tensor."""
    arguments = ["--cases", "gpt2", "--sides", "clearhead", "--rounds", "1", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "load_checkpoint.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes"] > 500_000_000
    assert report["clearhead"]["load_ratio"] < 1.15 and report["clearhead"]["run_ratio"] < 1.15, report
