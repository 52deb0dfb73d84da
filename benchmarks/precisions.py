"""Whether int8 is as fast as fp32 on this machine, as the library runs here: with kernels, or without a compiler.

    python benchmarks/precisions.py [--rounds 3] [--new 16]
    CXX=no-compiler python benchmarks/precisions.py

Models of random weights: GPT-2 of 124M parameters, a Transformer of 6 + 6 layers and one of BERT's size. The precisions
take turns; the best of the rounds counts. CLEARHEAD_HIDE_ISA and ONEDNN_MAX_CPU_ISA hide what the processor has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator

import torch

from clearhead import presets
from clearhead.core import Transformer, build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.int8 import to_int8
from clearhead.fast.native.load import isa, library
from clearhead.fast.runner import Runner

Work = Callable[[Transformer], int]
"""Runs a tree, and returns how many tokens it made or read."""


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 20_000, (rows, length), generator=torch.Generator().manual_seed(rows))


def decoding(rows: int, new: int) -> Work:
    def run(tree: Transformer) -> int:
        cache = IndexedCache()
        tree.decode(ids(rows, 16), cache=cache)
        for _ in range(new):
            tree.decode(ids(rows, 1), cache=cache)
        return rows * new

    return run


def translation(rows: int, new: int) -> Work:
    def run(tree: Transformer) -> int:
        memory, cache = tree.encode(ids(rows, 20)).memory, IndexedCache()
        for _ in range(new):
            tree.decode(ids(rows, 1), memory=memory, cache=cache)
        return rows * new

    return run


def reading(rows: int, length: int) -> Work:
    def run(tree: Transformer) -> int:
        if tree.encoder is not None:
            tree.encode(ids(rows, length))
        else:
            tree.decode(ids(rows, length), cache=IndexedCache())
        return rows * length

    return run


def cases(new: int) -> Iterator[tuple[str, Callable[[], Transformer], dict[str, Work]]]:
    """Yield models with their work."""
    decode = {f"batch {rows}": decoding(rows, new) for rows in (1, 8, 32)}
    yield "GPT-2 124M", lambda: build(presets.gpt2()), decode | {"prompt of 512": reading(1, 512)}
    translate = {f"batch {rows}": translation(rows, new) for rows in (1, 64)}
    yield "translation 6+6", lambda: build(presets.transformer_base()), translate
    yield "BERT", lambda: build(presets.bert_base()), {"32 texts of 64": reading(32, 64)}


def speeds(make: Callable[[], Transformer], works: dict[str, Work], rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yield tokens a second in fp32 and in int8."""
    torch.manual_seed(1)
    plain = make().eval()
    runners = [Runner(plain)]
    torch.manual_seed(1)
    runners.append(Runner(to_int8(make().eval())))
    for name, work in works.items():
        best = [0.0, 0.0]
        for turn in range(rounds + 1):
            for place, runner in enumerate(runners):
                began = time.perf_counter()
                done = work(runner.tree())
                if turn:  # the first makes the tree
                    best[place] = max(best[place], done / (time.perf_counter() - began))
        yield name, best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=16, help="tokens that are decoded")
    parser.add_argument("--only", default="", help="the beginning of a model's name")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {}
    kernels = library()
    print(f"kernels for {' '.join(sorted(isa(kernels)))}" if kernels else "no kernels", flush=True)
    with torch.inference_mode():
        for model, make, works in cases(options.new):
            if not model.startswith(options.only):
                continue
            for work, fp32, int8 in speeds(make, works, options.rounds):
                print(
                    f"{model:16} {work:16} fp32 {fp32:9.1f}  int8 {int8:9.1f} tokens/s  x {int8 / fp32:.2f}", flush=True
                )
                found[f"{model}, {work}"] = fp32, int8
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
