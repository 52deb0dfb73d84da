"""Throughput of two threads that generate with one model, compared with one thread.

    python benchmarks/two_callers.py FOLDER [--precision int8] [--turns 5]

One thread generates all texts, then two threads generate half of them each, in turns. Printed are the tokens per second
and the ratio of each turn.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import torch
from pairing import Ratio, Spread

import clearhead as ch

PROMPT = "The cat sat on the mat and"
NEW_TOKENS, TEXTS = 40, 6


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a decoder")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = ch.load(options.folder, device="cpu", precision=options.precision)

    def generate(count: int) -> None:
        for _ in range(count):
            model.generate(PROMPT, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, temperature=0)

    def generate_together() -> None:
        callers = [threading.Thread(target=generate, args=(TEXTS // 2,)) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()

    generate(2)
    taken: list[tuple[float, float]] = []
    for _ in range(options.turns):
        alone, together = (NEW_TOKENS * TEXTS / seconds(work) for work in (lambda: generate(TEXTS), generate_together))
        taken.append((alone, together))
    alone_rates, rates_together = zip(*taken, strict=True)
    print(f"one caller {Spread.of(alone_rates)} tokens/s, two callers {Spread.of(rates_together)}")
    print(f"ratio {Ratio.of(rates_together, alone_rates)}")


if __name__ == "__main__":
    main()
