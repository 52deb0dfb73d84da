"""Write one folder or file of every format that later versions read.

    python -m tests.formats.make_samples FOLDER

The samples in `tests/formats/samples` were written so, from made data. A change of a format raises its number and gets
new samples. Those of earlier numbers stay, to test that they are read or refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from clearhead.apps.check.job.job import CERTIFICATE
from clearhead.checkpoints.runs.manifest import sha256_of
from clearhead.data.arrays import Ragged
from clearhead.data.stores.store import ArrayWriter

SENTENCES = ["ein hund bellt", "ein hund", "zwei hunde bellen", "zwei hunde"]
RUN_FILE = """\
[task]
kind = "translate"
[data]
train = { source = "train.de", target = "train.en" }
valid = { source = "train.de", target = "train.en" }
max_length = 24
[tokenizer]
kind = "character"
[model]
layers = 1
width = 4
heads = 2
feedforward = 4
[train]
run = "run"
steps = 2
validate_every = 2
keep = 1
snapshots = 0
threads = 1
seed = 1
"""


def make(folder: Path) -> None:
    """Write every sample into a new folder."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        _run_and_data()
        model = ch.load("run", device="cpu", precision="fp32")
        model.save("saved")
        model.attention("ein hund", target="hund").save("maps.npz")
        _store(Path("store"))
        _certificate(Path("certificate.json"))
        for name in ("train.de", "train.en", "run/plots"):
            path = Path(name)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _run_and_data() -> None:
    Path("train.de").write_text("\n".join(SENTENCES * 4) + "\n", encoding="utf-8", newline="\n")
    Path("train.en").write_text(
        "\n".join(sentence[::-1] for sentence in SENTENCES * 4) + "\n", encoding="utf-8", newline="\n"
    )
    Path("run.toml").write_text(RUN_FILE, encoding="utf-8", newline="\n")
    torch.manual_seed(1)
    ch.train("run.toml")


def _store(folder: Path) -> None:
    folder.mkdir()
    writer = ArrayWriter(folder)
    ids = np.array([5, 6, 7, 8, 5], dtype="<u2")
    writer.append("source", Ragged(ids, np.array([0, 2, 5])))
    writer.append("target", Ragged(ids[::-1].copy(), np.array([0, 4, 5])))
    writer.finish({"dropped": 0})


def _certificate(file: Path) -> None:
    """Write a certificate as the check of a job does, without its trainings."""
    record = {
        **CERTIFICATE.header(), "ok": True, "run_file": "run.toml", "steps": 2, "planned_steps": 2, "validate_every": 2,
        "save_every": 1, "seed": 7, "kills": [{"moment": "saving", "after_step": 1}], "missed_kills": 0, "faults": [],
        "tolerance": 1e-4, "accumulated": {"ok": True, "distance": 1e-6, "where": None, "reason": None},
        "two_processes": {"ok": True, "distance": 1e-6, "where": None, "reason": None},
        "certificate": {
            "versions": "made", "machine": "made", "run file": f"sha256 {sha256_of(Path('run.toml'))}",
            "data": f"sha256 {64 * '0'}", "weights": f"sha256 {64 * '0'} of step 2",
        },
    }  # fmt: skip
    file.write_text(json.dumps(record) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make(Path(sys.argv[1]))
