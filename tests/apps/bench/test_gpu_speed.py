"""The benchmark of GPUs runs all its groups on a CPU in tiny sizes, names what it skips, and checks its targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

PROGRAM = ROOT / "benchmarks" / "gpu_speed.py"
NANOGPT = '''
import torch
from torch import nn
from torch.nn import functional as F


class GPTConfig:
    def __init__(self, **values):
        vars(self).update(values)


class GPT(nn.Module):
    """A model with the interface of nanoGPT's."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids, labels):
        logits = F.linear(self.table(ids), self.table.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())
'''


def run(*words: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "CI": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_all_groups_run_on_a_cpu(tmp_path: Path) -> None:
    """Groups that are left out: small and prompt run the same code again, and first and demo only run commands."""
    (tmp_path / "model.py").write_text(NANOGPT, encoding="utf-8")
    groups = ["step", "ablation", "command", "decode", "marian", "embed", "translate"]
    record, table = run("--groups", *groups, "--nanogpt", str(tmp_path))
    assert not any("failure" in figures for sides in record["cases"].values() for figures in sides.values()), table
    assert set(record["skipped"]) <= {"sentence-transformers: left out: not installed"}
    expected = {
        "train-124M", "ablation-124M", "command-124M", "decode-4", "sample-1", "translate-4x2", "embed",
        "train-translate",
    }  # fmt: skip
    assert record["cases"].keys() == expected
    assert record["cases"]["decode-4"].keys() == {"clearhead", "transformers"}
    assert "nanoGPT compiled" in record["cases"]["train-124M"]
    for sides in record["cases"].values():
        for figures in sides.values():
            assert min(figures["seconds"]) > 0 and figures["amount"] > 0 and figures["launches"] > 0
    # The first of the new tokens comes from the prompt, and the steps of all rows are common.
    assert record["cases"]["decode-4"]["clearhead"]["steps"] == 3
    reading, late = (record["cases"]["ablation-124M"][name] for name in ("clearhead, loss read at once", "clearhead"))
    assert reading["host_reads"] == late["host_reads"] + 1
    assert record["machine"]["cpu"]["bytes_per_second"] > 0
    assert record["notes"]["train-translate"] == ["2 graphs for 1 shapes"]


def test_what_does_not_fit_into_the_time_is_named() -> None:
    record, table = run("--groups", "step", "--seconds", "0")
    assert not record["cases"].get("train-124M") and record["skipped"]
    assert "skipped:" in table
    assert all(target["is_reached"] is None for target in record["targets"])
