"""Weights read row by row equal those of loading, and memory does not grow with the size of a tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.checkpoints.hf.loading import load_module, open_checkpoint
from clearhead.checkpoints.hf.saving import save_module
from clearhead.checkpoints.stored_weights import CheckpointWeights, matrix_shape, open_weights
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.conftest import ROOT
from tests.parity.architectures.harness import Pair, all_cases

# Rules that split, turn, group, reorder and stack, and vectors that are stored as matrices.
NAMES = ("gpt2", "bart", "gpt_neox", "gptj", "gpt_oss", "mixtral")
CASES = {case.name: case for case in all_cases() if case.name in NAMES}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_checkpoint_are_those_of_the_loaded_module(name: str, tmp_path: Path) -> None:
    state = Pair.of(CASES[name], tmp_path).ours.state_dict()
    weights = CheckpointWeights(name, open_checkpoint(tmp_path))
    assert {address: tuple(tensor.shape) for address, tensor in state.items()} == dict(weights.shapes)
    for address, tensor in state.items():
        num_rows, num_columns = matrix_shape(tensor.shape)
        blocks = [range(start, min(start + 5, num_rows)) for start in range(0, num_rows, 5)]
        read = torch.cat([weights.read_rows(address, rows) for rows in blocks])
        assert torch.equal(read, tensor.reshape(num_rows, num_columns)), address


def test_rows_of_int8_weights_are_widened(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("word", ["a b c d e f g h"], vocab_size=50)
    size = tokenizer.vocab_size
    module = build(build_spec(Hyperparameters(layers=2, width=14, heads=2), source_vocab=size, target_vocab=size))
    ch.Model(module.eval(), TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="translate")).save(
        tmp_path / "a"
    )
    ch.load(tmp_path / "a", precision="int8").save(tmp_path / "b")
    weights, loaded = open_weights(str(tmp_path / "b")), ch.load(tmp_path / "b", precision="fp32").module.state_dict()
    assert set(weights.shapes) == set(loaded)
    for address, tensor in loaded.items():
        num_rows, num_columns = matrix_shape(tensor.shape)
        assert torch.equal(weights.read_rows(address, range(num_rows)), tensor.reshape(num_rows, num_columns))
    assert 0.0 < ch.diff(tmp_path / "a", tmp_path / "b").largest < 0.02


JOB = """
import json, sys
from pathlib import Path
import clearhead as ch

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

tiny, a, b = sys.argv[1:]
ch.diff(tiny, tiny)  # libraries are loaded, and threads have their buffers
Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
before = peak()
difference = ch.diff(a, b)
print(json.dumps({"bytes": peak() - before, "largest": difference.largest, "tensors": len(difference.weights.changes)}))
"""


def write_checkpoint(folder: Path, sizes: tuple[int, int, int, int], factor: float = 1.0) -> Path:
    """Write a sharded checkpoint; its weights are a ramp times a factor."""
    rows, width, feedforward, layers = sizes
    hparams = Hyperparameters(
        family="decoder", layers=layers, width=width, heads=4, feedforward=feedforward, positions="learned",
        max_positions=11, norm_place="pre", activation="gelu_tanh", embedding_scale=1.0, tie="decoder",
    )  # fmt: skip
    module = build(build_spec(hparams, source_vocab=rows, target_vocab=rows), device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(factor * torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight))
    save_module(module, folder, model_type="gpt2", max_shard_size=2**24)
    return folder


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system counts no peaks of memory")
@pytest.mark.parametrize("sizes", [(2**15, 512, 2048, 6), (101, 1024, 2**14, 1)], ids=["table", "turned-matrix"])
def test_two_sharded_checkpoints_take_less_than_twice_their_largest_tensor(
    sizes: tuple[int, int, int, int], tmp_path: Path
) -> None:
    tiny = write_checkpoint(tmp_path / "tiny", (23, 16, 24, 1))
    folders = [write_checkpoint(tmp_path / name, sizes, factor) for name, factor in (("a", 1.0), ("b", 1.01))]
    assert len(list(folders[0].glob("*.safetensors"))) > 2
    largest = max(tensor.nbytes for tensor in load_module(folders[0]).module.state_dict().values())
    assert largest == 2**26
    words = [sys.executable, "-c", JOB, *map(str, (tiny, *folders))]
    # The C library returns large blocks at once, so that the peak is what is in use; what it keeps differs by run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["bytes"] < 2 * largest, measured
    assert measured["largest"] == pytest.approx(0.01, rel=1e-3)
