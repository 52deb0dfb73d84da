"""Training, decoding and embedding while another program runs, with and without threads that adapt how they wait.

    python benchmarks/beside_load.py --tokenizer ../shared/data/gpt2-tokenizer --texts train.en

Work: training steps of the 10.7M decoder of `train_speed.py` in bf16, and of a decoder with 4 layers and width 128.
GPT-2 124M decodes one text in int8, and MiniLM embeds 200 texts. Load: none, an empty loop, a loop of low priority, or
a loop while the work itself has low priority. Each pair is measured twice: as the OpenMP library waits by default, and
with `clearhead.fast.busy_waiting`, which has two seconds to choose. Printed are the work per second (median and spread
of alternating turns) and the ratio of the second to the first with its 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inference_models import gpt2, in_8_bits, minilm
from pairing import Ratio, Spread
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
    """Return the work per second, without the first two seconds, in which the thread adapts how it waits."""
    run, amount = work
    done, began = 0, time.perf_counter() + 2.0
    while time.perf_counter() - began < seconds:
        run()
        done += amount if time.perf_counter() > began else 0
    return done / (time.perf_counter() - began)


def measure(tokenizer: Path, texts: list[str], seconds: float, adapts: bool) -> dict[tuple[str, str], float]:
    """Return the work per second of each job under each load, in this process."""
    if adapts:
        adapt_waiting()
    else:
        # The loaded OpenMP library no longer reads this variable; `adapt_waiting` does.
        os.environ["OMP_WAIT_POLICY"] = "active"
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, work in all_work(Path(folder), tokenizer, texts).items():
            for load in LOADS:
                with beside(load):
                    rates[name, load] = rate(work, seconds)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="GPT-2's vocab.json and merges.txt")
    parser.add_argument("--texts", type=Path, required=True, help="file with one text per line")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    texts = args.texts.read_text("utf-8").splitlines()[:200]
    rates: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    # A process cannot stop adapting how it waits, so each variant has its own process, and both take turns.
    for _ in range(args.rounds):
        for side, adapts in enumerate((False, True)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                turn = pool.apply(measure, (args.tokenizer, texts, args.seconds, adapts))
            for key, figure in turn.items():
                rates.setdefault(key, ([], []))[side].append(figure)
    for (name, load), (before, now) in rates.items():
        print(f"{name}, {load}: {Spread.of(before)}, adapting {Spread.of(now)}, ratio {Ratio.of(now, before)}")


if __name__ == "__main__":
    main()
