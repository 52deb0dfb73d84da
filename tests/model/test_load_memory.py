"""Peak memory of loading, in a child process: the weights in their precision, and little more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers

from tests import hf_models
from tests.conftest import ROOT

CHILD = """
import gc, json, sys
from pathlib import Path
import torch
import clearhead as ch
from clearhead.base.machine import give_memory_back

def status(name):
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def mapped(folder):
    sizes = dict.fromkeys(("Rss", "Private_Dirty"), 0)
    is_ours = False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if "-" in line.split()[0]:
            is_ours = str(folder) in line
        elif is_ours and name in sizes:
            sizes[name] += int(rest.split()[0]) * 1024
    return sizes

torch.set_num_threads(1)
tiny, big, half, saved = map(Path, sys.argv[1:])
for precision in ("auto", "int8"):
    ch.load(tiny, device="cpu", precision=precision).generate("the cat", max_new_tokens=2)
peaks = {}
for name, folder, precision in (
    ("auto", big, "auto"), ("fp16", half, "auto"), ("bf16", big, "bf16"), ("int8", big, "int8"),
    ("saved int8", saved, "auto"), ("fp32", big, "fp32"),
):
    gc.collect()
    give_memory_back()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    model = ch.load(folder, device="cpu", precision=precision)
    load = status("VmHWM") - before
    if name == "int8":
        model.save(saved)
    elif name != "fp32":
        model.generate("the cat", max_new_tokens=2)
    peaks[name] = {"load": load, "use": status("VmHWM") - before, **mapped(folder)}
    del model
print(json.dumps(peaks))
"""
ROWS, WIDTH = 8_000, 768


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return the memory that a child process measures for each precision, with 63 million random weights in 16 bits."""
    root = tmp_path_factory.mktemp("peaks")
    tiny, big = hf_models.rotary_model(root / "tiny"), hf_models.rotary_model(root / "big")
    config = transformers.LlamaConfig(
        vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        max_position_embeddings=61, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    half = hf_models.rotary_model(root / "half")
    for folder, dtype in ((half, torch.float16), (big, torch.bfloat16)):
        hf_models.save(transformers.LlamaForCausalLM(config).to(dtype), folder)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny), str(big), str(half), str(root / "saved")],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return report | {"file": {"bytes": (big / "model.safetensors").stat().st_size}}


@pytest.mark.parametrize(
    ("precision", "share"), [("auto", 1.0), ("fp16", 1.0), ("bf16", 1.0), ("int8", 0.5), ("saved int8", 0.5)]
)
def test_a_load_takes_its_weights_and_little_more(
    peaks: dict[str, dict[str, int]], precision: str, share: float
) -> None:
    weights = peaks["file"]["bytes"] * share
    largest = 2 * ROWS * WIDTH
    assert peaks[precision]["load"] <= 1.1 * weights + 2 * largest, peaks
    if precision != "int8":
        # The file is mapped: its pages count as memory, and no other process needs a copy of them.
        assert peaks[precision]["Rss"] >= 0.9 * weights and peaks[precision]["Private_Dirty"] == 0, peaks
        # One fp32 layer or more would show: generating multiplies with the mapped bytes.
        assert peaks[precision]["use"] <= 1.1 * weights + 2 * largest, peaks


def test_fp32_takes_no_second_tree(peaks: dict[str, dict[str, int]]) -> None:
    assert peaks["fp32"]["load"] <= 1.1 * 2 * peaks["file"]["bytes"] + 2 * 4 * ROWS * WIDTH, peaks
