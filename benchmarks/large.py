"""Large checkpoints: load time, memory and tokens per second, compared with transformers and llama.cpp.

    python benchmarks/large.py --billions 1 --folder /tmp/large
    python benchmarks/large.py --billions 3 --folder /tmp/large --sides clearhead --commands

The checkpoint has the shape of Llama 3.2 1B, Llama 3.2 3B or Llama 2 7B, with random bf16 weights. It has several
shards and a tokenizer with one token per byte; nothing is downloaded. It stays in --folder for later runs. The sides
run one after the other, each in its own process, since several would not fit into memory. A limit of the address space
(--cap) makes a side fail before it fills the machine.

A load is measured with a cold file cache (the system is asked to drop the pages of each file) and with a warm one.
"Peak" is the maximum resident memory above the imported libraries, including mapped files. "Private" is the memory that
no other process can share. The number "decode-N" is the tokens per second of N texts after prompts of 32 tokens,
without the time for the prompts. Likewise, "prompt-512" is the prompt tokens per second. "Of limit" is the share of the
speed at which every step reads each weight once, with the bandwidth measured in the same run.

llama.cpp may be in another environment (--llama PYTHON); its files need the package gguf here. The option --commands
measures the peaks of inspect, view, heads, check and bench, for the checkpoint and for the same model in int8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from inference_speed import is_installed
from large_models import BYTES, SHAPES, Shape, write_checkpoint, write_gguf
from pairing import Spread
from side_by_side import describe, machine

from clearhead.apps.bench.limits import fast_precisions, measure_limits
from clearhead.base.machine import total_memory

CASES = ("decode-1", "decode-8", "prompt-512")
SIDES = {
    "clearhead": ("auto", "bf16", "int8", "saved int8"),
    "transformers": ("bf16",),
    "llama.cpp": ("BF16", "Q8_0", "Q4_0"),
}
"""Precisions of each library; "saved" is a folder that `convert` wrote."""
MODULES = {"clearhead": "clearhead", "transformers": "transformers", "llama.cpp": "llama_cpp"}
WORKER = Path(__file__).with_name("large_sides.py")


def run_worker(python: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Return the answer of a worker process, or its failure."""
    done = subprocess.run(
        [python, str(WORKER), json.dumps(job)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    if done.returncode or not done.stdout:
        lines = done.stderr.strip().splitlines()
        return {"failure": lines[-1] if lines else f"exit code {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"said": done.stderr.strip().splitlines()[-1:]}


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def drop_cache(path: Path) -> None:
    """Ask the system to drop the pages of the files of a checkpoint."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    """Read the files of a checkpoint into the page cache."""
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.read(2**24):
                pass


def in_saved_form(folder: Path, precision: str, options: argparse.Namespace) -> Path:
    """Return the folder of the model converted to a precision, and convert it if it is missing."""
    saved = folder.with_name(f"{folder.name}-{precision}")
    if not saved.exists():
        words = ["convert", str(folder), str(saved), "--precision", precision]
        answer = run_worker(sys.executable, {"words": words, "cap": options.cap}, options.threads)
        print_command(" ".join(words[:1] + words[3:]), answer)
    return saved


def jobs_of(shape: Shape, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the Python and the job of each side."""
    for side in options.sides:
        python = options.llama if side == "llama.cpp" else sys.executable
        if not is_installed(python, MODULES[side]):
            print(f"{side} is not installed: left out", file=sys.stderr)
            continue
        for named in SIDES[side]:
            if options.precisions and named not in options.precisions:
                continue
            path, precision = folder, named
            if named.startswith("saved "):
                precision = named.removeprefix("saved ")
                path = in_saved_form(folder, precision, options)
            if side == "llama.cpp":
                path = write_gguf(shape, folder, folder.with_name(f"{folder.name}-{named}.gguf"), named)
            cases = [case for case in options.cases if side != "llama.cpp" or case != "decode-8"]
            yield f"{side} {named}", python, {
                "side": side, "precision": precision, "folder": str(path), "cases": cases, "rounds": options.rounds,
                "new_tokens": options.new_tokens, "threads": options.threads, "cap": options.cap,
            }  # fmt: skip


def measure_side(python: str, job: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loading of a side with a cold and a warm cache, and its speeds; return the figures."""
    path, loads = Path(job["folder"]), {}
    for cache, prepare in (("cold", drop_cache), ("warm", fill_cache)):
        answers = []
        for _ in range(options.rounds):
            prepare(path)
            answers.append(run_worker(python, job | {"cases": []}, options.threads))
            if "failure" in answers[-1]:
                return answers[-1]
        loads[cache] = [answer["load_seconds"] for answer in answers]
    return run_worker(python, job, options.threads) | {"loads": loads}


def print_side(name: str, answer: dict[str, Any], numbers: float, bytes_per_second: float) -> None:
    """Print the figures of a side.

    Args:
        name: the name in the table.
        answer: the result of `measure_side`.
        numbers: the bytes that a step reads.
        bytes_per_second: the memory bandwidth of this machine.
    """
    if "failure" in answer:
        print(f"{name:24} failed: {answer['failure'][:100]}", flush=True)
        return
    peaks = f"peak {answer['load_peak'] / 1e9:.2f} GB, private {answer['private'] / 1e9:.2f} GB after loading"
    loads = ", ".join(f"{cache} {Spread.of(seconds)} s" for cache, seconds in answer["loads"].items())
    print(f"{name:24} load {loads}; {peaks}")
    for case in CASES:
        if case in answer:
            rate = statistics.median(answer[case])
            rows = float(case.partition("-")[2])
            share = f", {rate / rows * numbers / bytes_per_second:.0%} of limit" if case.startswith("decode") else ""
            print(f"{'':24} {case:10} {Spread.of(answer[case])} tokens/s{share}", flush=True)


def print_command(name: str, answer: dict[str, Any]) -> None:
    """Print the seconds and the peak memory of a command."""
    if "failure" in answer:
        print(f"{name:24} failed: {answer['failure'][:100]}", flush=True)
        return
    last_words = f": {answer['said'][0][:100]}" if answer["code"] and answer["said"] else ""
    print(
        f"{name:24} {answer['seconds']:6.1f} s, peak {answer['peak'] / 1e9:.2f} GB, "
        f"exit code {answer['code']}{last_words}",
        flush=True,
    )


def measure_commands(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peaks of the inspecting commands, for the checkpoint and for the model in int8."""
    record = {}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        text = Path(temporary) / "text.txt"
        text.write_text("A model reads its weights one layer at a time.\n", encoding="utf-8")
        for model in (folder, in_saved_form(folder, "int8", options)):
            page = str(Path(temporary) / f"{model.name}.html")
            commands = {
                "inspect": [], "view": ["A small text.", "-o", page], "heads": [str(text)], "check": [],
                "bench": ["--batch-size", "2"],
            }  # fmt: skip
            for name, words in commands.items():
                job = {"words": [name, str(model), *words], "cap": options.cap}
                key = f"{name} {model.name}"
                record[key] = run_worker(sys.executable, job, options.threads)
                print_command(key, record[key])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", choices=list(SHAPES), default="3")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints, which stay; default: a temporary one")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--precisions", nargs="+", help="measure only these precisions")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--commands", action="store_true", help="also measure inspect, view, heads, check, bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cap", type=float, help="maximum GB of address space per process; default: 0.9 of the memory")
    parser.add_argument("--llama", default=sys.executable, help="the Python that has llama-cpp-python")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object at the end")
    options = parser.parse_args()
    options.cap = int(1e9 * options.cap) if options.cap else int(0.9 * total_memory())
    torch.set_num_threads(options.threads)
    facts, device = machine(options.threads), torch.device("cpu")
    limits = measure_limits(device, fast_precisions(device))
    print(f"{describe(facts)}\nlimits: {limits.bytes_per_second / 1e9:.1f} GB/s")
    shape, record = SHAPES[options.billions], {"machine": facts, "bytes_per_second": limits.bytes_per_second}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint(shape, (options.folder or Path(temporary)) / f"llama-{options.billions}b")
        numbers = shape.numbers_of_a_step()
        for name, python, job in jobs_of(shape, folder, options):
            record[name] = measure_side(python, job, options)
            print_side(name, record[name], numbers * BYTES.get(job["precision"], 2), limits.bytes_per_second)
        if options.commands:
            record["commands"] = measure_commands(folder, options)
    if options.json:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
