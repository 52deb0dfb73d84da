"""Kill trainings at random moments, resume them, and compare what is left with a training that nobody disturbed.

    python benchmarks/sigkill.py
    python benchmarks/sigkill.py --kinds translate lora --kills 20 --seed 7

Five kinds of runs on data made on the spot: a language model, a translation model with accumulation, averages and an
early stop, a masked language model, a classifier, and a language model trained further with LoRA. A run is killed
(SIGKILL) so many times, each at a random moment after its start, and resumed; then it may end. Every weight, every
state of the optimizer, the averaged weights, the choice of the best checkpoint and the metrics must be those of the
undisturbed run, bit by bit; times may differ. The exit code is 1 where something does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]
MODEL = "[model]\nlayers = 1\nwidth = 16\nheads = 2\nfeedforward = 32\ndropout = 0.1\n"
TRAIN = (
    "[train]\nsteps = 240\nvalidate_every = 20\nbatch_tokens = 200\nkeep = 2\nseed = 3\n"
    'precision = "fp32"\nthreads = 1\n'
)
MORE = {
    "translate": 'accumulate = 2\naverage = 3\nearly_stop = { metric = "loss", patience = 50 }\n',
    "classify": "learning_rate = 1e-3\n",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["generate", "translate", "fill", "classify", "lora"])
    parser.add_argument("--kills", type=int, default=20, help="of each run")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for kind in given.kinds:
            draw = random.Random(f"{seed} {kind}")
            file = write_run_file(folder, kind)
            begun = time.monotonic()
            train(file, folder / kind / "whole", None)
            seconds = time.monotonic() - begun
            kills = killed_run(file, folder / kind / "killed", given.kills, seconds, draw)
            found = differences(folder / kind / "whole", folder / kind / "killed")
            print(f"{kind:10} {kills} kills, {len(found)} differences", *found, sep="\n  ", flush=True)
            faults += len(found) + (kills == 0)
    return 1 if faults else 0


def write_data(folder: Path) -> None:
    """Write texts that are reversed for the translation, with the first letter as a label."""
    draw = random.Random(1)
    for name, count in (("train", 600), ("valid", 60)):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]
        (folder / f"{name}.source").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"{name}.target").write_text("".join(f"{' '.join(reversed(line.split()))}\n" for line in lines))
        rows = [f"{line}\t{'early' if line < 'l' else 'late'}\n" for line in lines]
        (folder / f"{name}.tsv").write_text("".join(["text\tlabel\n", *rows]))


def write_run_file(folder: Path, kind: str) -> Path:
    """Write the run file of one kind."""
    task, init = ("generate", f'init = "{folder}/generate/whole"\n') if kind == "lora" else (kind, "")
    if kind == "lora" and not (folder / "generate" / "whole").exists():
        train(write_run_file(folder, "generate"), folder / "generate" / "whole", None)
    columns = {
        "translate": 'source = "{0}/{1}.source", target = "{0}/{1}.target"',
        "classify": 'text = "{0}/{1}.tsv", labels = "label"',
    }.get(task, 'text = "{0}/{1}.source", document = "line"')
    data = "".join(f"{name} = {{ {columns.format(folder, name)} }}\n" for name in ("train", "valid"))
    family = {"translate": "encoder-decoder", "generate": "decoder"}.get(task, "encoder")
    parts = [f'[task]\nkind = "{task}"\n{init}[data]\n{data}max_length = 32\n']
    if kind == "lora":
        parts.append("[lora]\nrank = 2\n")
    else:
        parts.append(f'[tokenizer]\nkind = "word"\n{MODEL}family = "{family}"\n')
    file = folder / f"{kind}.toml"
    file.write_text("".join([*parts, TRAIN, MORE.get(kind, "")]))
    return file


def train(file: Path, run: Path, kill_after: float | None) -> bool:
    """Train, or go on; return whether the training ended by itself.

    Args:
        file: the run file.
        run: the run directory.
        kill_after: seconds after the run was locked; None: it may end.
    """
    resume = ["--resume"] if list((run / "checkpoints").glob("step-*")) else []
    command = [sys.executable, "-m", "clearhead", "train", str(file), f"train.run={run}", *resume]
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    if kill_after is not None:
        stale = (run / "lock").stat().st_mtime_ns if (run / "lock").exists() else None
        while process.poll() is None and not _is_locked(run, stale):
            time.sleep(0.005)
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
    _, messages = process.communicate()
    if process.returncode not in (0, -9):
        sys.exit(f"{' '.join(command)}\n{messages.decode()}")
    return process.returncode == 0


def _is_locked(run: Path, stale: int | None) -> bool:
    """Whether another process than that of a stale lock holds a run."""
    try:
        return (run / "lock").stat().st_mtime_ns != stale
    except OSError:
        return False


def killed_run(file: Path, run: Path, kills: int, seconds: float, draw: random.Random) -> int:
    """Kill a training so many times while it trains, let it end, and return how often it was killed."""
    for count in range(kills):
        # Long enough to get on by a few checkpoints, so that the kills fall on the whole of the run.
        if train(file, run, draw.uniform(0, 2 * seconds / kills)):
            return count
    train(file, run, None)
    return kills


def differences(whole: Path, killed: Path) -> list[str]:
    """Return what differs between two run directories, but for times."""
    names = sorted({path.relative_to(run).as_posix() for run in (whole, killed) for path in run.rglob("*")})
    found = []
    for name in names:
        first, second = (run / name for run in (whole, killed))
        if name.startswith("plots/") or name in ("run.toml", "lock", "manifest.json"):
            continue
        if first.exists() != second.exists():
            found.append(f"{name} is in one of them only")
        elif first.is_file() and content(first) != content(second):
            found.append(f"{name} differs")
    return found


def content(path: Path) -> Any:
    """Return the content of a file without times: digests of files with times are left out with their manifest."""
    if path.name == "metrics.jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == "manifest.json":
        return sorted(json.loads(path.read_text())["files"])
    return _timeless(json.loads(path.read_text())) if path.name == "state.json" else path.read_bytes()


def _timeless(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: _timeless(value) for key, value in content.items() if "second" not in key and key != "environment"}


if __name__ == "__main__":
    sys.exit(main())
