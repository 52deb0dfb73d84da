"""`clearhead check FILE.py`: files of users, in a child process."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from clearhead.apps.check.handwritten import child, files
from clearhead.apps.check.handwritten.files import KINDS, compare_file, python_file
from clearhead.apps.check.handwritten.report import Report
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError, RunFailure
from clearhead.training.random_state import preserve_threads

pytestmark = pytest.mark.slow
SETTINGS = {"width": 12, "heads": 3}
MINE = """
import helper
import random
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
    assert not finding["fix"] and not finding["mathematics"] and finding["cause"] is None


def compare(path: Path, text: str | None = None, seconds: float = 120.0, **settings: object) -> list[Report]:
    if text is not None:
        path.write_text(text)
    return [*compare_file(path, "", kind=None, settings={**SETTINGS, **settings}, seconds=seconds)]


FORGED = "import os\nfor number in range(3, 30):\n  try: os.{}\n  except OSError: pass\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import time\ntime.sleep(60)", "did not end .*put it below `if __name__ == '__main__':`"),
        ("import os\nos._exit(3)", "exit code 3"),
        # In the pipe of the answers: junk, an answer of other types, and a line without an end.
        (FORGED.format("write(number, b'{]\\n')"), "write only to file descriptors"),
        (FORGED.format("write(number, b'{\"parts\": 1}\\n')"), "write only to file descriptors"),
        (FORGED.format("write(number, b'[' * 2**22)"), "write only to file descriptors"),
        (FORGED.format("close(number)") + "os._exit(4)", "exit code 4"),
    ],
)
def test_files_that_hang_exit_or_forge_answers(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(RunFailure, match=sentence):
        compare(tmp_path / "mine.py", text, 3.0 if "sleep" in text else 120.0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
@pytest.mark.parametrize("end", ["time.sleep(600)", "os._exit(3)", "raise ValueError"])
def test_processes_that_a_file_started_end_with_it(tmp_path: Path, end: str) -> None:
    start = f"child = subprocess.Popen(['sleep', '500'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    text = f"import os, subprocess, time\n{start}\n"
    with pytest.raises((RunFailure, InputError)):
        compare(tmp_path / "mine.py", text + end, 5.0)
    number = int((tmp_path / "pid").read_text())
    for _ in range(600):
        if not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError("the process lives on")


def test_output_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    text = "import os\nfor _ in range(300):\n    os.write(1, b'x' * 2**20)\n    os.write(2, b'y' * 2**20)\nos._exit(5)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunFailure, match="exit code 5: y"):
        compare(tmp_path / "mine.py", text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("name", ["random", "torch", "typing"])
def test_neighbours_are_imported_and_shadow_nothing(tmp_path: Path, monkeypatch, name: str) -> None:
    """A file is found with its neighbours from any folder; a random.py in either folder breaks nothing."""
    folder, elsewhere = tmp_path / "course", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
        (each / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    (elsewhere / "helper.py").write_text("raise RuntimeError('of the working directory')")
    (folder / "helper.py").write_text("")
    monkeypatch.chdir(elsewhere)
    for each in ("mine", name):
        assert [report.verdict for report in compare(folder / f"{each}.py", MINE)] == ["not written yet"]


SLOW = """
import time
from torch import nn
class FirstNorm(nn.LayerNorm):
    pass
class SlowNorm(nn.LayerNorm):
    def forward(self, x):
        time.sleep(600)
class ThirdNorm(nn.LayerNorm):
    pass
"""


def test_a_time_limit_loses_only_the_rest(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SLOW)
    assert main(["check", str(path), "--time-limit", "30"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("FirstNorm, width 24: right") and "SlowNorm" not in out
    assert "the comparison of SlowNorm did not end" in err and "not compared: ThirdNorm" in err
    assert main(["check", str(path), "--time-limit", "30", "--json"]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not record["ok"] and [report["verdict"] for report in record["reports"]] == ["right"]


def test_each_report_comes_when_it_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SLOW)
    reports = compare_file(path, "", kind=None, settings=SETTINGS, seconds=600.0)
    assert next(reports).ok
    reports.close()


def test_threads(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\nraise ValueError(f'{torch.get_num_threads()} threads')")
    for options, number in (((), 1), (("--threads", "2"), 2)):
        with preserve_threads():
            assert main(["check", str(path), *options]) == 2
        assert f"ValueError at mine.py:2: {number} threads" in capsys.readouterr().err


def test_only_an_existing_python_file_is_imported(tmp_path: Path) -> None:
    assert python_file("gpt2") is None and python_file("owner/name") is None
    assert python_file("a/mine.py:Mine") == (Path("a/mine.py"), "Mine")
    with pytest.raises(InputError, match="no such file"):
        compare(tmp_path / "mine.py")
    assert main(["check", "nowhere.py"]) == 2
    assert main(["check", "runs/nope", "--hint", "1"]) == 2


def answer(tmp_path: Path, text: str, name: str = "") -> dict:
    path = tmp_path / f"file_{abs(hash(text))}.py"
    path.write_text(text)
    answers = [*child.answers(path, name, "", SETTINGS)]
    return {"reports": [line["report"] for line in answers if "report" in line], **answers[0]}


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
    reports = {report["subject"]: report for report in answer(tmp_path, ADAPTERS)["reports"]}
    assert {name: report["verdict"] for name, report in reports.items()} == {
        "run_softmax": "wrong", "run_silu": "right", "run_rope": "not written yet", "run_rmsnorm": "wrong",
    }  # fmt: skip
    assert reports["run_rmsnorm"]["findings"][0]["cause"] == "eps_outside_root"


def test_faults_of_a_file(tmp_path: Path) -> None:
    assert "ValueError at" in answer(tmp_path, "raise ValueError('no')")["fault"]
    assert "did you mean 'MyNorm'" in answer(tmp_path, "class MyNorm: pass", "MyNrm")["fault"]
    assert "--as" in answer(tmp_path, "def f(x): return x", "f")["fault"]
    assert "no class or function" in answer(tmp_path, "x = 1")["fault"]
    assert tuple(child.CHECKS) == KINDS


def notebook(path: Path, *cells: str) -> Path:
    """Write a notebook, whose lines are in lists as Jupyter writes them."""
    texts = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": ["class"]}, *texts]}))
    return path


def test_notebooks(tmp_path: Path, capsys) -> None:
    """Magic lines and cells in other languages are left out; a remainder inside brackets is no magic line."""
    (tmp_path / "helper.py").write_text("")
    magic = "%matplotlib inline\n!pip install torch\nif True:\n    !ls\nnumber = (7\n    % 4)\nassert number == 3"
    cells = magic, "%%bash\nls | wc\n", "%%time\nassert True", MINE, "if __name__ == '__main__':\n    1 / 0"
    path = notebook(tmp_path / "mine.ipynb", *cells)
    assert python_file(f"{path}:MyAttention") == (path, "MyAttention")
    assert main(["check", f"{path}:MyAttention"]) == 1
    assert "the scores are not divided by" in capsys.readouterr().out
    assert main(["check", str(notebook(path, MINE.split("class")[0], "x = 1\ny = = 2\n"))]) == 2
    assert re.search(r"code cell 2 \(x = 1\) does not parse: .*line 2", capsys.readouterr().err)
    assert main(["check", str(notebook(path, "x = 1", "\n\n1 / 0"))]) == 2
    assert "ZeroDivisionError at mine.ipynb, code cell 2:3: 1 / 0" in capsys.readouterr().err
    for text in ("{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "[" * 5000):
        path.write_text(text)
        assert main(["check", str(path)]) == 2
        assert "no notebook" in capsys.readouterr().err


RECOMMENDED = re.compile(r"check it with (\w+=(?:'\w+'|\w+))")
FUNCTIONS = {"mask": "MyAttention", "batch_first": "MyAttention", "pairs": "rope", "token_axis": "rope",
             "norm_place": "MyLayer"}  # fmt: skip
OTHERS = """
from torch.nn import TransformerEncoderLayer
def rope(x):
    raise NotImplementedError
class MyLayer(TransformerEncoderLayer):
    def __init__(self, d_model, nhead):
        super().__init__(d_model, nhead, batch_first=True)
"""


def test_every_recommended_argument_can_be_typed(tmp_path: Path, capsys) -> None:
    """Messages recommend arguments as Python has them; the command takes them too, also without quotation marks."""
    sources = [*Path(files.__file__).parent.glob("*.py")]
    recommended = {*RECOMMENDED.findall(" ".join(source.read_text() for source in sources))}
    assert {word.split("=")[0] for word in recommended} == FUNCTIONS.keys()
    path = tmp_path / "mine.py"
    (tmp_path / "helper.py").write_text("")
    path.write_text(MINE.split("def run_rope")[0] + OTHERS)
    for word in sorted(recommended):
        arguments = [f"{path}:{FUNCTIONS[word.split('=')[0]]}", word if "True" in word else word.replace("'", "")]
        assert main(["check", *arguments]) in (0, 1), capsys.readouterr()
    assert main(["check", f"{path}:MyAttention", "mask='block'"]) == 1
    assert main(["check", f"{path}:MyAttention", "msk=block"]) == 2
    assert "did you mean 'mask'" in capsys.readouterr().err
    assert main(["check", f"{path}:MyAttention", "mask=blok"]) == 2
    assert "'block'" in capsys.readouterr().out
    assert main(["check", f"{path}:MyAttention", "block"]) == 2
    assert "expected name=value" in capsys.readouterr().err
    assert main(["check", str(tmp_path), "mask=block"]) == 2


def test_the_command_itself_finds_no_modules_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "mine.py").write_text("x = 1")
    command = [sys.executable, "-P", "-m", "clearhead", "check", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no class or function" in done.stderr
