"""Cost of unwatched hook points: decoding steps that pass every point once, and twice, in turns.

    python benchmarks/hook_points.py

The calls cannot be removed from the code, so they are doubled. The additional time of a step is then an upper bound for
the cost of all points, since doubling adds a call. The model is a small decoder, so that the overhead of Python counts;
a step decodes one token with a cache. Blocks of steps alternate between both variants, so that a change of the
machine's load affects both.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pairing import Ratio, Spread
from torch import Tensor

import clearhead as ch
from clearhead.base.hooks import HookPoints


@contextmanager
def points_twice() -> Iterator[None]:
    """Context manager in which every activation passes through its hook point twice."""
    point = HookPoints.point
    HookPoints.point = lambda self, name, x: point(self, name, point(self, name, x))  # type: ignore[method-assign]
    try:
        yield
    finally:
        HookPoints.point = point  # type: ignore[method-assign]


@contextmanager
def points_once() -> Iterator[None]:
    yield


def seconds_of(step: Callable[[], Tensor], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="number of steps in a block")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    module = ch.build(ch.presets.llama_tiny(layers=args.layers)).eval()
    token = torch.tensor([[7]])
    forms = {"once": points_once, "twice": points_twice}
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for block in range(args.blocks):
        spent = {}
        for name in sorted(forms, reverse=bool(block % 2)):
            cache = ch.Cache()
            with forms[name]():
                seconds_of(lambda: module.decode(token, cache=cache).logits, 10)  # noqa: B023
                spent[name] = seconds_of(lambda: module.decode(token, cache=cache).logits, args.steps)  # noqa: B023
        for name, seconds in spent.items():
            taken[name].append(seconds)
    if args.json:
        print(json.dumps(taken))
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} threads, fp32")
    print(f"{args.layers} layers, {args.blocks} blocks of {args.steps} cached steps of one token")
    for name, seconds in taken.items():
        print(f"points passed {name}: {Spread.of(seconds)} s")
    print(f"twice / once: {Ratio.of(taken['twice'], taken['once'])}")


if __name__ == "__main__":
    main()
