"""Speed of two checkouts of clearhead, in turns in child processes.

    python benchmarks/two_versions.py ../before . --rows help load generate-1

A is the first checkout, B the second. Each row prints the number of turns and both medians with their spread. The ratio
of speeds B / A from paired turns follows, with its 95 % interval. A row falls short if that interval lies wholly below
0.98; then the exit code is 1. Models have random weights, which transformers writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_cases import texts_of
from inference_models import gpt2, marian, minilm, one_token_words
from pairing import Ratio, Spread
from side_by_side import Side, Work, alternate, describe, machine, serve

LEAST_RATIO = 0.98
COMMANDS: Mapping[str, Sequence[str]] = {
    "import": ("-c", "import clearhead"),
    "help": ("-m", "clearhead", "--help"),
    "help-new": ("-m", "clearhead", "new", "--help"),
    "help-evaluate": ("-m", "clearhead", "evaluate", "--help"),
}
"""Rows that start a process in every turn."""
RUN_FILE = {
    "task": {"kind": "generate"},
    "data": {"valid": 0.1, "max_length": 128},
    "tokenizer": {"kind": "character"},
    "model": {"family": "decoder", "layers": 4, "width": 128, "heads": 4, "feedforward": 512, "dropout": 0.1},
    "train": {"steps": 30, "batch_tokens": 1024, "precision": "fp32", "validate_every": 30},
}
TRANSLATE_FILE = {
    "task": {"kind": "translate"},
    "data": {"valid": 0.1, "max_length": 64},
    "tokenizer": {"kind": "word"},
    "model": {
        "family": "encoder-decoder", "layers": 3, "width": 256, "heads": 8, "feedforward": 512, "dropout": 0.1,
    },
    "train": {"steps": 6, "batch_tokens": 4096, "precision": "fp32", "validate_every": 6},
}  # fmt: skip
LARGE_FILE = {
    "task": {"kind": "generate"},
    "data": {"valid": 0.1, "max_length": 256},
    "tokenizer": {"kind": "character"},
    "model": {"family": "decoder", "preset": "gpt2", "layers": 6, "width": 384, "heads": 6, "feedforward": 1536,
              "dropout": 0.0, "attention_dropout": 0.0},
    "train": {"steps": 4, "batch_tokens": 4096, "precision": "fp32", "validate_every": 4},
}  # fmt: skip


def prepare_load(folder: Path) -> Work:
    """Load GPT-2 of 124M parameters."""
    import clearhead as ch

    return Work(lambda: ch.load(folder / "gpt2", precision="fp32"))


def prepare_generate(folder: Path, rows: int, precision: str) -> Work:
    """Continue prompts of 32 tokens by 32 tokens, greedily."""
    import clearhead as ch

    model = ch.load(folder / "gpt2", precision=precision)
    prompts = texts_of(f"decode-{rows}", one_token_words(folder / "gpt2"), "")
    return Work(lambda: model.generate(prompts, max_new_tokens=32, temperature=0))


def prepare_prompt(folder: Path) -> Work:
    """Read a prompt of 512 tokens."""
    import clearhead as ch

    model = ch.load(folder / "gpt2", precision="fp32")
    prompts = texts_of("prompt-512", one_token_words(folder / "gpt2"), "")
    return Work(lambda: model.generate(prompts, max_new_tokens=1, temperature=0))


def prepare_translate(folder: Path, rows: int) -> Work:
    """Translate sentences with four beams."""
    import clearhead as ch

    model = ch.load(folder / "marian", precision="fp32")
    texts = texts_of(f"translate-{rows}x4", one_token_words(folder / "marian"), "")
    return Work(lambda: model.translate(texts, beam_size=4))


def prepare_embed(folder: Path) -> Work:
    """Embed 200 sentences with MiniLM."""
    import clearhead as ch

    model = ch.load(minilm(), precision="fp32")
    texts = texts_of("embed", [], "")[:200]
    return Work(lambda: model.embed(texts))


def prepare_train(file: Mapping[str, Mapping[str, Any]], texts: Sequence[Any]) -> Work:
    """Train from a run file to its last checkpoint."""
    import clearhead as ch

    def train() -> None:
        with tempfile.TemporaryDirectory() as run:
            tables: dict[str, Any] = {**file, "train": {**file["train"], "run": f"{run}/run"}}
            ch.train(tables, data={"train": texts})

    return Work(train)


def long_texts() -> list[str]:
    """Return texts of about 320 characters."""
    sentences = texts_of("embed", [], "")
    return [" ".join(sentences[start : start + 5]) for start in range(0, len(sentences), 5)]


def sentence_pairs() -> list[tuple[str, str]]:
    """Return sentences with their words in reverse order."""
    return [(text, " ".join(reversed(text.split()))) for text in texts_of("embed", [], "")]


WORK: Mapping[str, Callable[[Path], Work]] = {
    "load": prepare_load,
    "generate-1": lambda folder: prepare_generate(folder, 1, "fp32"),
    "generate-8": lambda folder: prepare_generate(folder, 8, "fp32"),
    "generate-1-int8": lambda folder: prepare_generate(folder, 1, "int8"),
    "prompt-512": prepare_prompt,
    "translate": lambda folder: prepare_translate(folder, 8),
    "translate-64": lambda folder: prepare_translate(folder, 64),
    "embed": prepare_embed,
    "train": lambda _: prepare_train(RUN_FILE, texts_of("embed", [], "")),
    "train-translate": lambda _: prepare_train(TRANSLATE_FILE, sentence_pairs()),
    "train-10.7M": lambda _: prepare_train(LARGE_FILE, long_texts()),
}
"""Rows whose process stays, and works once per turn."""


def time_commands(row: str, checkouts: Sequence[Path], rounds: int) -> list[list[float]]:
    """Return the seconds of each checkout's process in every turn, after one turn that does not count."""
    taken: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for side in order:
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, *COMMANDS[row]], check=True, stdout=subprocess.DEVNULL, cwd=checkouts[side],
                env={**os.environ, "PYTHONPATH": str(checkouts[side])},
            )  # fmt: skip
            if number:
                taken[side].append(time.perf_counter() - began)
    return taken


def time_work(row: str, checkouts: Sequence[Path], folder: Path, rounds: int, threads: int) -> list[list[float]]:
    """Return the seconds of each checkout's work in every turn, after one turn that does not count.

    Raises:
        SystemExit: a side fails.
    """
    sides = [
        Side(
            name,
            ["env", f"PYTHONPATH={checkout}", sys.executable, __file__, "--side", row, str(checkout), str(folder)],
            threads,
        )
        for name, checkout in zip("AB", checkouts, strict=True)
    ]
    alternate(sides, rounds)
    for side in sides:
        side.close()
        if side.failure:
            raise SystemExit(f"{row}, side {side.name}: {side.failure}")
    return [side.seconds for side in sides]


def be_side(row: str, checkout: Path, folder: Path) -> None:
    """Run the work of one checkout once per input line."""
    import clearhead

    assert Path(clearhead.__file__).is_relative_to(checkout), f"{clearhead.__file__} is not in {checkout}"
    serve(lambda: WORK[row](folder))


def compare(row: str, seconds: Sequence[Sequence[float]]) -> tuple[Ratio, str]:
    """Return the ratio of speeds B / A, and the row's line."""
    before, after = seconds
    ratio = Ratio.of(before, after)
    verdict = "falls short" if ratio.falls_short(LEAST_RATIO) else ""
    return ratio, f"{row:16} A {Spread.of(before)} s   B {Spread.of(after)} s   B/A {ratio} {verdict}".rstrip()


def main() -> None:
    """Compare two checkouts on the chosen rows."""
    if sys.argv[1:2] == ["--side"]:
        row, checkout, folder = sys.argv[2:]
        be_side(row, Path(checkout), Path(folder))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--rows", nargs="+", choices=[*COMMANDS, *WORK], default=[*COMMANDS, *WORK])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each checkout; six give an interval")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, default=Path("../shared/data/gpt2-tokenizer"))
    parser.add_argument("--json", action="store_true", help="write all seconds as JSON to stdout")
    chosen = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in chosen.checkouts]
    facts = machine(chosen.threads)
    print(describe(facts), file=sys.stderr)
    falls_short, taken = False, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"load", "prompt-512", *(row for row in WORK if row.startswith("generate"))} & {*chosen.rows}:
            gpt2(folder / "gpt2", chosen.tokenizer.resolve())
        if {"translate", "translate-64"} & {*chosen.rows}:
            marian(folder / "marian")
        for row in chosen.rows:
            if row in COMMANDS:
                taken[row] = time_commands(row, checkouts, chosen.rounds)
            else:
                taken[row] = time_work(row, checkouts, folder, chosen.rounds, chosen.threads)
            ratio, line = compare(row, taken[row])
            print(line, file=sys.stderr, flush=True)
            falls_short |= ratio.falls_short(LEAST_RATIO)
    if chosen.json:
        print(json.dumps({"machine": facts, "rounds": chosen.rounds, "seconds": taken}))
    sys.exit(1 if falls_short else 0)


if __name__ == "__main__":
    main()
