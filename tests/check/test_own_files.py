"""`clearhead check FILE.py`: files of users, in a child process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clearhead.check.handwritten import child
from clearhead.check.handwritten.files import KINDS, compare_file, python_file
from clearhead.cli.main import main
from clearhead.errors import InputError, RunFailure

MINE = """
import helper
import torch
from torch import nn

class MyAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory=None, mask=None):
        print("noise of a student")
        memory = query if memory is None else memory
        projected = self.q(query), self.k(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in projected)
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    raise NotImplementedError
"""


def test_a_file_and_its_hints(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("helper.py").write_text("")
    assert main(["check", "mine.py:MyAttention", "--hint", "1", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out.splitlines()[-1])["reports"]
    (finding,) = report["findings"]
    assert report["verdict"] == "wrong" and finding["where"] == "the scores, before the softmax"
    assert not finding["mend"] and not finding["mathematics"] and finding["cause"] is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("import time\ntime.sleep(60)", "did not end"), ("import os\nos._exit(3)", "exit code 3")],
)
def test_files_that_hang_or_exit(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(RunFailure, match=sentence):
        compare_file(path, "", kind=None, width=12, heads=3, seconds=20.0 if "exit" in text else 1.0)


def test_only_an_existing_python_file_is_imported(tmp_path: Path) -> None:
    assert python_file("gpt2") is None and python_file("owner/name") is None
    assert python_file("a/mine.py:Mine") == (Path("a/mine.py"), "Mine")
    with pytest.raises(InputError, match="no such file"):
        compare_file(tmp_path / "mine.py", "", kind=None, width=12, heads=3, seconds=5.0)
    assert main(["check", "nowhere.py"]) == 2
    assert main(["check", "runs/nope", "--hint", "1"]) == 2


def answer(tmp_path: Path, text: str, name: str = "") -> dict:
    path, out = tmp_path / f"file_{abs(hash(text))}.py", tmp_path / "out.json"
    path.write_text(text)
    child.main([str(path), name, "", "12", "3", str(out)])
    return json.loads(out.read_text())


ADAPTERS = """
import torch
def run_softmax(in_features, dim):
    return torch.exp(in_features) / torch.exp(in_features).sum(dim, keepdim=True)
def run_silu(in_features):
    return in_features * torch.sigmoid(in_features)
def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    raise NotImplementedError
def run_rmsnorm(d_model, eps, weights, in_features):
    return in_features / (in_features.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weights
"""


def test_adapters(tmp_path: Path) -> None:
    reports = {one["subject"]: one for one in answer(tmp_path, ADAPTERS)["reports"]}
    assert {name: one["verdict"] for name, one in reports.items()} == {
        "run_softmax": "wrong", "run_silu": "right", "run_rope": "not written yet", "run_rmsnorm": "wrong",
    }  # fmt: skip
    assert reports["run_rmsnorm"]["findings"][0]["cause"] == "eps_outside_root"


def test_faults_of_a_file(tmp_path: Path) -> None:
    assert "ValueError: no" in answer(tmp_path, "raise ValueError('no')")["fault"]
    assert "did you mean 'MyNorm'" in answer(tmp_path, "class MyNorm: pass", "MyNrm")["fault"]
    assert "--as" in answer(tmp_path, "def f(x): return x", "f")["fault"]
    assert "no class or function" in answer(tmp_path, "x = 1")["fault"]
    assert tuple(child.CHECKS) == KINDS
