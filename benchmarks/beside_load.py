"""Training, decoding and embedding beside another program, with threads that adapt how they wait and without.

    python benchmarks/beside_load.py --tokenizer ../shared/data/gpt2-tokenizer --texts train.en

Work: steps of the 10.7M decoder of `train_speed.py` in bf16, and of one of 4 layers and width 128; GPT-2 of 124M in 8
bits, one text; MiniLM, 200 texts. Beside nothing, beside a loop that does nothing, beside one of low priority, and with
low priority itself beside a loop: first as the OpenMP library waits by itself, then with `clearhead.fast.busy_waiting`,
which has two seconds each time to find out. Work per second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inference_models import gpt2, in_8_bits, minilm
from train_speed import DECODERS, decoder, our_step

import clearhead as ch
from clearhead.fast.busy_waiting import adapt_waiting

LOADS = ("alone", "a loop", "a loop of low priority", "a loop, itself of low priority")
Work = tuple[Callable[[], object], int]


def training(layers: int, width: int, heads: int, rows: int, length: int) -> Work:
    DECODERS["own"] = (layers, width, heads, rows, length, 65)
    work = decoder(argparse.Namespace(work="own", steps=1, nanogpt=None))
    step, batch = our_step(work.spec, "bf16", 0.0), work.batches[0]
    return lambda: step(batch), batch.num_tokens


def all_work(folder: Path, tokenizer: Path, texts: list[str]) -> dict[str, Work]:
    decoding = ch.load(in_8_bits(gpt2(folder / "gpt2", tokenizer), folder / "8"), precision="int8")
    embedding = ch.load(minilm())
    return {
        "training 10.7M, tokens": training(6, 384, 6, 16, 256),
        "training 0.8M, tokens": training(4, 128, 4, 8, 256),
        "decoding, tokens": (lambda: decoding.generate("The quick brown fox", max_new_tokens=16, temperature=0), 16),
        "embedding, texts": (lambda: embedding.embed(texts), len(texts)),
    }


def set_priority(value: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), value)


@contextlib.contextmanager
def beside(load: str) -> Iterator[None]:
    if load == LOADS[0]:
        yield
        return
    prefix = ["nice", "-n", "19"] if load == LOADS[2] else []
    with subprocess.Popen([*prefix, sys.executable, "-c", "while True: pass"]) as loop:
        set_priority(19 if load == LOADS[3] else 0)
        try:
            yield
        finally:
            set_priority(0)
            loop.kill()


def rate(work: Work, seconds: float) -> float:
    """Return the work of a second; the first two seconds do not count, in which the way to wait is chosen."""
    run, amount = work
    done, began = 0, time.perf_counter() + 2.0
    while time.perf_counter() - began < seconds:
        run()
        done += amount if time.perf_counter() > began else 0
    return done / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="GPT-2's vocab.json and merges.txt")
    parser.add_argument("--texts", type=Path, required=True, help="one text in a line")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    texts = args.texts.read_text("utf-8").splitlines()[:200]
    # The OpenMP library is loaded already, and reads it no more; `adapt_waiting` does.
    os.environ["OMP_WAIT_POLICY"] = "active"
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = all_work(Path(folder), args.tokenizer, texts)
        for adapts in (False, True):
            if adapts:
                del os.environ["OMP_WAIT_POLICY"]
                adapt_waiting()
            for name, work in made.items():
                for load in LOADS:
                    with beside(load):
                        found.setdefault((name, load), []).append(rate(work, args.seconds))
    for (name, load), (before, now) in found.items():
        print(f"{name:24} {load:32} {before:10.1f} {now:10.1f}")


if __name__ == "__main__":
    main()
