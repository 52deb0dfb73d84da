"""Memory of training: what the forecast says before the first step, and what the run then takes.

    python benchmarks/train_memory.py --data ../shared/data --steps 2000

All numbers are resident memory above that after the imports; "growth" compares the memory in use at the last step with
that after 100 steps, imports included. Translations are of Multi30k, the language model reads its English captions, and
the classifier SST-2. Each run has a process of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from clearhead.training.assemble import train_run
from clearhead.training.memory import peak_memory
from clearhead.training.progress.reports import StepReport, TrainingProgress
from clearhead.training.runfile.read import parse_run_file

SIDES = (("source", "de"), ("target", "en"))
FAMILIES = {"translate": "encoder-decoder", "generate": "decoder", "classify": "encoder"}


class Watch(TrainingProgress):
    """Keeps the forecast, and the memory at some steps."""

    def __init__(self) -> None:
        self.forecast = ""
        self.memory: dict[int, int] = {}

    def message(self, text: str) -> None:
        """Keep the line about memory."""
        if text.startswith("memory"):
            self.forecast = text

    def step(self, report: StepReport) -> None:
        """Keep the memory in use."""
        self.memory[report.step] = psutil.Process().memory_info().rss


def run_file(folder: Path, data: Path, task: str, precision: str, *, examples: int, steps: int, layers: int) -> str:
    """Write the data of a task into a folder, and return its run file."""

    def head(name: str, source: str, count: int) -> str:
        lines = (data / source).read_text(encoding="utf-8").splitlines()[:count]
        if task == "classify":
            lines = ["label\ttext", *(line.replace(" ", "\t", 1) for line in lines)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f'"{folder / name}"'

    tables = []
    for split, other, count in (("train", "train", examples), ("val", "dev", 300)):
        if task == "translate":
            sides = (f"{side} = {head(f'{split}.{end}', f'multi30k/{split}.{end}', count)}" for side, end in SIDES)
            tables.append(", ".join(sides))
        elif task == "generate":
            tables.append(f'text = {head(f"{split}.txt", f"multi30k/{split}.en", count)}, document = "line"')
        else:
            tables.append(f'text = {head(f"{split}.tsv", f"sst2/{other}.txt", count)}, labels = "label"')
    return (
        f'[task]\nkind = "{task}"\n[data]\ntrain = {{ {tables[0]} }}\nvalid = {{ {tables[1]} }}\nmax_length = 64\n'
        f'[tokenizer]\nkind = "bpe"\nvocab_size = 3950\n'
        f'[model]\nfamily = "{FAMILIES[task]}"\nlayers = {layers}\nwidth = 192\nheads = 4\nfeedforward = 512\n'
        'norm = "rms"\npositions = "rotary"\n'
        f'[train]\nrun = "{folder / "run"}"\nbatch_tokens = 1024\noptimizer = "muon"\nlearning_rate = 0.005\nkeep = 1\n'
        f'validate_every = 500\nsteps = {steps}\nprecision = "{precision}"\n'
    )


def measure(args: argparse.Namespace) -> None:
    """Train in this process and print its line."""
    imports = psutil.Process().memory_info().rss
    watch, (task, precision) = Watch(), args.one.split()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"examples": args.examples, "steps": args.steps, "layers": args.layers}
        text = run_file(Path(folder), args.data, task, precision, **sizes)
        train_run(parse_run_file(text, "run.toml"), resume=False, progress=watch)
    match = re.search(r"about ([\d.]+) ([MG])B", watch.forecast)
    assert match is not None, watch.forecast
    forecast = float(match[1]) * (1e9 if match[2] == "G" else 1e6)
    # The forecast resets the peak of the process; what follows is higher than what was before.
    peak = peak_memory(torch.device("cpu")) - imports
    early, last = watch.memory[min(100, args.steps)], watch.memory[args.steps]
    print(
        f"{args.one:16s} forecast {forecast / 1e6:5.0f} MB   peak {peak / 1e6:5.0f} MB ({forecast / peak - 1:+.0%})   "
        f"at 100 {(early - imports) / 1e6:5.0f} MB   at {args.steps} {(last - imports) / 1e6:5.0f} MB "
        f"(growth {last / early:.2f})",
        flush=True,
    )


def main() -> None:
    """Run every task in both precisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tasks", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args)
        return
    for task in args.tasks:
        for precision in args.precisions:
            subprocess.run([sys.executable, *sys.argv, "--one", f"{task} {precision}"], check=True)


if __name__ == "__main__":
    main()
