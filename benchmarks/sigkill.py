"""Kill trainings at random moments and inside writes, damage checkpoints, resume, and compare the results bit for bit.

    python benchmarks/sigkill.py
    python benchmarks/sigkill.py --kinds translate lora --kills 20 --seed 7

Five kinds of runs use generated data. Four are a language model with averaged weights, a masked language model, a
classifier, and a language model fine-tuned with LoRA. The fifth one is a translation model with gradient accumulation,
averaged checkpoints and an early stop. The check of a job (`clearhead check RUN.toml`) kills and resumes each of them.
Afterwards the newest checkpoint of the undisturbed run is damaged in four ways. A bit is flipped, or a file is
truncated, removed, or replaced by that of an earlier checkpoint. The resumed training must name the file and continue
from the checkpoint before. The exit code is 1 if a bit differs.

The kind "machines" kills either process of two torchrun agents three times before the first checkpoint, in a step and
inside a save. It does so with a shared folder, with separate disks, and with separate disks under one name if mount
namespaces allow it. All runs must continue within 60 s.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from two_machines import kill_matrix

from clearhead.apps.check.job.differences import find_differences
from clearhead.apps.check.job.forecast import CheckedJob, examine
from clearhead.apps.check.job.job import find_faults, train_undisturbed, train_with_kills
from clearhead.checkpoints.runs.checkpoint import checkpoint_folder, checkpoint_steps

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]
MODEL = "[model]\nlayers = 1\nwidth = 16\nheads = 2\nfeedforward = 32\ndropout = 0.1\n"
TRAIN = (
    "[train]\nsteps = 160\nvalidate_every = 10\nbatch_tokens = 200\nkeep = 2\nseed = 3\n"
    'precision = "fp32"\nthreads = 1\n'
)
MORE = {
    "generate": "ema = 0.9\n",
    "translate": 'accumulate = 2\naverage = 3\nearly_stop = { metric = "bleu", patience = 5 }\n',
    "classify": "learning_rate = 1e-3\n",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["generate", "translate", "fill", "classify", "lora", "machines"])
    parser.add_argument("--kills", type=int, default=20, help="number of kills per run")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for kind in options.kinds:
            if kind == "machines":
                begun = time.monotonic()
                kills, kind_faults = kill_matrix(write_run_file(folder, "generate"), folder / kind, 3, steps=60)
                print(
                    f"{kind:10} {kills} kills in {time.monotonic() - begun:.0f} s", *kind_faults, sep="\n  ", flush=True
                )
                faults += len(kind_faults)
                continue
            draw, begun = random.Random(f"{seed} {kind}"), time.monotonic()
            job = examine(write_run_file(folder, kind), folder / kind, steps=160, kills=options.kills)
            whole, seconds = train_undisturbed(job)
            runs = train_with_kills(job, options.kills, draw, seconds)
            kills = sum(len(run.kills) for run in runs)
            kind_faults = [fault for run in runs for fault in find_faults(job, whole, run)]
            kind_faults += [fault for damage in DAMAGES for fault in resume_damaged(job, whole, damage, draw)]
            print(
                f"{kind:10} {kills} kills and {len(DAMAGES)} damages in {time.monotonic() - begun:.0f} s, "
                f"{len(kind_faults)} differences",
                *kind_faults, sep="\n  ", flush=True,
            )  # fmt: skip
            faults += len(kind_faults) + (kills < options.kills)
    return 1 if faults else 0


def write_data(folder: Path) -> None:
    """Write texts, their reversals as translations, and their first letters as labels."""
    draw = random.Random(1)
    for name, count in (("train", 600), ("valid", 30)):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]
        (folder / f"{name}.source").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"{name}.target").write_text("".join(f"{' '.join(reversed(line.split()))}\n" for line in lines))
        rows = [f"{line}\t{'early' if line < 'l' else 'late'}\n" for line in lines]
        (folder / f"{name}.tsv").write_text("".join(["text\tlabel\n", *rows]))


def write_run_file(folder: Path, kind: str) -> Path:
    """Write the run file of one kind."""
    task, init = ("generate", f'init = "{folder}/start"\n') if kind == "lora" else (kind, "")
    if kind == "lora":
        train(write_run_file(folder, "generate"), f"train.run={folder}/start", "train.early_stop={}")
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


def train(file: Path, *overrides: str) -> None:
    """Train a run file to the end by the command line."""
    subprocess.run([sys.executable, "-m", "clearhead", "train", str(file), *overrides], capture_output=True, check=True)


def _flip(path: Path, earlier: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut_off(path: Path, earlier: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _exchange(path: Path, earlier: Path, draw: random.Random) -> None:
    shutil.copyfile(earlier, path)


def _remove(path: Path, earlier: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = (_flip, _cut_off, _exchange, _remove)


def resume_damaged(
    job: CheckedJob, whole: Path, damage: Callable[[Path, Path, random.Random], None], draw: random.Random
) -> list[str]:
    """Damage a file of a run's newest checkpoint, resume, and return the faults."""
    run = job.folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    earlier, newest = (checkpoint_folder(run, step) for step in sorted(checkpoint_steps(run))[-2:])
    path = draw.choice(sorted(newest.iterdir()))
    damage(path, earlier / path.name, draw)
    with job.train(run) as process:
        process.wait_until(lambda: process.popen.poll() == 0)
        process.last_words()
    faults = [str(difference) for difference in find_differences(whole, run, job.steps, job.names)]
    if not any(path.name in line and "damaged" in line for line in process.messages):
        faults.append("no message names the damaged file")
    return [f"{newest.name}/{path.name} after {damage.__name__[1:]}: {fault}" for fault in faults]


if __name__ == "__main__":
    sys.exit(main())
