"""The lines of the guides to many texts and to Slurm do what the pages say, with stand-ins for srun and scontrol.

Training lines run unchanged. Lines that answer texts run with stand-ins for clearhead and torchrun, which record each
process to start. The test then runs the recorded commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from clearhead.checkpoints.runs.metrics import read_metrics
from tests.apps.cli.tiny_run import PAIRS, write_run_file
from tests.house.source import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the lines are for bash")
SRUN = """
import os, signal, subprocess, sys, time
words, count = sys.argv[1:], int(os.environ.get("TASKS", "1"))
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    count = int(value) if name == "--ntasks" else count
variables = {"SLURM_NTASKS": str(count), "SLURM_JOB_ID": "7"}
jobs = [subprocess.Popen(words, env=os.environ | variables | {"SLURM_PROCID": str(n)}) for n in range(count)]
watched = os.environ.get("TERM_AFTER")
while watched and all(job.poll() is None for job in jobs):
    if os.path.exists(watched) and os.path.getsize(watched):
        [job.send_signal(signal.SIGTERM) for job in jobs]
        break
    time.sleep(0.02)
sys.exit(max(abs(job.wait()) for job in jobs))
"""
SCONTROL = """
import sys
print("127.0.0.1") if "hostnames" in sys.argv else open("requeued", "a").write(sys.argv[2])
"""
NOTE = """
import json, os, sys
words, sizes = sys.argv[1:], {"--nnodes": 1, "--nproc-per-node": 1}
name = os.path.basename(sys.argv[0])
while name == "torchrun" and words[0] != "-m":
    option = words.pop(0)
    if option in sizes or option.startswith("--rdzv"):
        sizes[option] = words.pop(0)
words = words[2:] if name == "torchrun" else words
variables = {name: value for name, value in os.environ.items() if name.startswith("SLURM_ARRAY_TASK_")}
size = int(sizes["--nnodes"]) * int(sizes["--nproc-per-node"])
with open("calls", "a") as file:
    for rank in range(size):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(size)} if name == "torchrun" else {}
        file.write(json.dumps([words, {**variables, **ranks}]) + "\\n")
"""


def read_scripts(page: str) -> list[str]:
    """Return the blocks of shell in a guide, with two processes and shares in place of 8 or 16."""
    text = (ROOT / "docs" / "guides" / page).read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for pattern, small in (
        (r"-per-node 8\b", "-per-node 2"),
        (r"\b1 2 3 4 5 6 7 8\b", "1 2"),
        (r"\b3/16\b", "2/2"),
        (r"-of-(8|16)\b", "-of-2"),
        (r"\bseq 16\b", "seq 2"),
    ):
        blocks = [re.sub(pattern, small, block) for block in blocks]
    return blocks


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of stand-ins at the front of PATH, and a working folder without the variables of a cluster."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    add_program(folder / "srun", SRUN)
    add_program(folder / "scontrol", SCONTROL)
    yield folder


def add_program(path: Path, source: str) -> None:
    path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
    path.chmod(0o755)


def run_script(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", script]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("page", ["many-texts.md", "slurm.md"])
def test_every_line_that_answers_texts(
    page: str, programs: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("clearhead", "torchrun"):
        add_program(programs / name, NOTE)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "de-en").symlink_to(trained / "run")
    texts = "".join(f"{source}\n" for source, _ in PAIRS[:23])
    for name in ("large.de", "texts-1.de", "texts-2.de"):
        Path(name).write_text(texts, encoding="utf-8")
    assert main(["translate", "runs/de-en", "large.de", "-o", "expected"]) == 0
    expected = Path("expected").read_bytes()
    num_calls = 0
    for script in (script for script in read_scripts(page) if " train " not in script):
        if "clearhead translate" in script:
            for path in tmp_path.glob("large.en*"):
                path.unlink()
        is_array = "#SBATCH --array" in script or "SLURM_ARRAY" in script
        for task in (1, 2) if is_array else (0,):
            values = {"ID": task, "MIN": 1, "MAX": 2, "COUNT": 2} if is_array else {}
            variables = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
            for line in script.replace("\\\n", " ").splitlines():
                Path("calls").write_text("")
                done = run_script(line, **variables)
                assert done.returncode == 0, (line, done.stderr)
                for call in Path("calls").read_text().splitlines():
                    words, environment = json.loads(call)
                    with monkeypatch.context() as process:
                        for name, value in environment.items():
                            process.setenv(name, value)
                        assert main(words) == 0, (line, words)
                    num_calls += 1
        shares = sorted(tmp_path.glob("large.en.*"), key=lambda path: int(path.name.split(".")[2].partition("-")[0]))
        # A line that names a single share writes no more than that.
        is_whole = Path("large.en").exists() or len(shares) > 1
        answers = Path("large.en").read_bytes() if Path("large.en").exists() else b"".join(map(Path.read_bytes, shares))
        assert answers == expected or (not is_whole and expected.endswith(answers)), script
    assert num_calls >= 9


def test_every_line_that_trains(programs: Path, tmp_path: Path) -> None:
    file = write_run_file(tmp_path, train="steps = 60\nvalidate_every = 30\nkeep = 2\nthreads = 1\n")
    text = file.read_text("utf-8").replace(f'run = "{tmp_path}/run"', 'run = "runs/de-en"')
    file.write_text(text, encoding="utf-8")
    one_box, boxes, requeue = (script for script in read_scripts("slurm.md") if " train " in script)
    assert one_box.splitlines()[-1] in requeue, "the command of one box is that of a job that is requeued"

    metrics = Path("runs/de-en/metrics.jsonl")
    done = run_script(requeue, TERM_AFTER=str(metrics), SECONDS="14200", SLURM_JOB_ID="7")
    assert Path("requeued").read_text() == "7", done.stderr
    assert "everything is saved in " in done.stderr
    stopped_at = read_metrics(metrics)[-1].step
    done = run_script(requeue, SLURM_JOB_ID="7")
    assert done.returncode == 0 and Path("requeued").read_text() == "7", done.stderr
    assert read_metrics(metrics)[-1].step == 60 > stopped_at

    shutil.rmtree("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        script = boxes.replace("29400", str(free.getsockname()[1])).replace("-per-node 2", "-per-node 1")
    done = run_script(script, TASKS="2", SLURM_NNODES="2", SLURM_JOB_NODELIST="box[1-2]", SLURM_JOB_ID="7")
    assert done.returncode == 0, done.stderr
    assert read_metrics(metrics)[-1].step == 60
