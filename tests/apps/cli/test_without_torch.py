"""Wrong input that can be refused without torch is refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WRONG = (
    "compare runs/nope",
    "average runs/nope --last 2",
    "inspect nosuchpreset",
    "generate runs/nope --prompt a",
    "view no/such/run a",
    "bench runs/nope",
    "convert runs/nope out --to hf",
    "generate model --prompt a --device gpu",
    "generate model --prompt a --precision fp8",
    "classify model lines --device gpu",
    "train nope.toml",
    "check runs/nope",
    "check runs/nope --against transformers",
    "heads runs/nope lines",
    "diff runs/nope runs/neither",
    "diff model model --device cpu",
)
JOB = """
import sys
from clearhead.apps.cli.main import main

for line in sys.argv[1:]:
    assert main(line.split()) == 2, line
    assert "torch" not in sys.modules, line
"""


def test_torch_is_not_loaded_for_what_is_refused_without_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "lines").write_text("a\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", JOB, *WRONG], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(WRONG), "one sentence each"


def test_a_preset_that_there_is_not_is_refused_without_the_specs_of_those_that_there_are() -> None:
    job = JOB + 'assert "clearhead.spec.nodes" not in sys.modules'
    done = subprocess.run(
        [sys.executable, "-c", job, "inspect gpt-2"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0 and "a preset (did you mean 'gpt2'?)" in done.stderr, done.stderr
