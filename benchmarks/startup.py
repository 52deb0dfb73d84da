"""Seconds until clearhead answers: its import, its help, and the first token from a checkpoint of 124M parameters.

    python benchmarks/startup.py --tokenizer ../shared/data/gpt2-tokenizer

Each is a process of its own, started when the files it reads are in the page cache; medians. transformers generates the
same token from the same checkpoint by its plain calls. The first line of generation is that with an empty cache, where
the kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inference_models import gpt2
from side_by_side import describe, machine

IMPORT = "import clearhead, sys; sys.exit('torch' in sys.modules)"
PEER = """
import sys, transformers
from pairing import Ratio, Spread
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]), flush=True)
"""


def first_output(command: list[str], cache: Path) -> float:
    """Return the seconds until a process ends, or writes its first bytes."""
    began = time.perf_counter()
    environment = {**os.environ, "CLEARHEAD_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken = time.perf_counter() - began
        _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with the files of GPT-2's tokenizer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    facts = machine(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as name:
        folder, cache = gpt2(Path(name) / "gpt2", options.tokenizer), Path(name) / "cache"
        program = [sys.executable, "-m", "clearhead"]
        generate = [*program, "generate", str(folder), "--prompt", "The", "--max-new-tokens", "1", "--temperature", "0"]
        commands = {
            "import clearhead, without torch": [sys.executable, "-c", IMPORT],
            "clearhead --help": [*program, "--help"],
            "clearhead generate, first token": generate,
            "transformers, first token": [sys.executable, "-c", PEER, str(folder)],
        }
        taken: dict[str, list[float]] = {"clearhead generate, kernels compiled": [first_output(generate, cache)]}
        for command in commands.values():
            first_output(command, cache)
        for _ in range(options.rounds):
            for what, command in commands.items():
                taken.setdefault(what, []).append(first_output(command, cache))
    print(describe(facts), file=sys.stderr)
    for what, seconds in taken.items():
        print(f"{what:38} {Spread.of(seconds)} s", file=sys.stderr)
    ours, theirs = taken["clearhead generate, first token"], taken["transformers, first token"]
    print(f"first token, transformers / clearhead: {Ratio.of(theirs, ours)}", file=sys.stderr)
    if options.json:
        print(json.dumps({"machine": facts, "rounds": options.rounds, "seconds": taken}))


if __name__ == "__main__":
    main()
