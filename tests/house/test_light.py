"""Loading a model and generating text imports no module for other jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

OTHER_JOBS = (
    "clearhead.apps.",
    "clearhead.fast.device_",
    "clearhead.interpret.explain",
    "clearhead.training",
    "clearhead.tasks.generate.train",
)
COMMAND_LINE = "clearhead.apps.cli"
LIBRARIES = {
    *("babel", "datasets", "fastapi", "huggingface_hub", "lxml", "matplotlib", "pandas", "PIL", "pyarrow"),
    *("rich", "sacrebleu", "sentencepiece", "sklearn", "tensorboard", "transformers", "uvicorn"),
}
TELL = """
import sys
print(*sorted(name for name in sys.modules if name.split(".")[0] == "clearhead" or "." not in name), file=sys.stderr)
"""
WAYS = {
    "python": """
import clearhead

model = clearhead.load("model")
assert model.generate("Ada", max_new_tokens=3, temperature=0)[0].tokens
""",
    "command": """
from clearhead.apps.cli.main import main

assert main(["generate", "model", "--prompt", "Ada", "--max-new-tokens", "3", "--greedy"]) == 0
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved tiny model."""
    text = train_tokenizer("byte", ["Ada sleeps here"], vocab_size=300)
    hyperparameters = Hyperparameters(family="decoder", layers=1, width=16, heads=2, feedforward=16)
    module = build(build_spec(hyperparameters, source_vocab=text.vocab_size, target_vocab=text.vocab_size))
    parent = tmp_path_factory.mktemp("light")
    ch.Model(module.eval(), TokenizerPair(text, text, joint=True), TaskRecord(kind="generate")).save(parent / "model")
    return parent


@pytest.mark.parametrize("program", WAYS)
def test_load_and_generate_import_no_other_job(program: str, folder: Path) -> None:
    job = [sys.executable, "-c", WAYS[program] + TELL]
    done = subprocess.run(job, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.splitlines()[-1].split()
    assert "clearhead.model.facade" in loaded and "torch" in loaded
    assert (COMMAND_LINE in loaded) == (program == "command")
    others = [name for name in loaded if name.startswith(OTHER_JOBS) and not name.startswith(COMMAND_LINE)]
    assert others == []
    assert {*loaded} & LIBRARIES == set()
