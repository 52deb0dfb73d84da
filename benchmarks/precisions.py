"""Check that int8 and "auto" are fast enough on this machine, with kernels or without a compiler.

    python benchmarks/precisions.py [--rounds 7] [--new 16]
    CXX=no-compiler python benchmarks/precisions.py
    python benchmarks/precisions.py --threads 1 --processor-time    # while other programs run

The rule: int8 is never slower than fp32, and the choice of "auto" (fp32 or products in bf16) is within 5 % of the
better one. Models with random weights: GPT-2 of 124M parameters, a Transformer of 6 + 6 layers, a model of BERT's size,
and small ones. The precisions take turns. The rule is broken if the 95 % interval of a ratio lies wholly below its
bound. Fewer than six rounds give no interval; then the median counts. Exit code 1: the rule is broken for some work.
CLEARHEAD_HIDE_ISA and ONEDNN_MAX_CPU_ISA hide instructions of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pairing import Ratio, Spread

from clearhead import presets, spec
from clearhead.core import Transformer, build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.native.load import isa, library
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.runner import Runner, multiplies_in_bf16
from clearhead.fast.stored import INT8, store
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS

Work = Callable[[Transformer], int]
"""Runs a tree, and returns how many tokens it made or read."""
SPREAD = 0.05
"""Tolerance of ratios: "auto" may lose this much; for int8 it covers the noise of the clock."""


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
    """Yield models with their work, by name."""
    decode = {f"batch {rows}": decoding(rows, new) for rows in (1, 8, 32)}
    yield "GPT-2 124M", lambda: build(presets.gpt2()), decode | {"prompt of 512": reading(1, 512)}
    translate = {f"batch {rows}": translation(rows, new) for rows in (1, 64)}
    yield "translation 6+6", lambda: build(presets.transformer_base()), translate
    read = {"32 texts of 64": reading(32, 64)}
    yield "BERT", lambda: build(presets.bert_base()), read
    yield "MiniLM", lambda: build(resize("bert", width=384, layers=6, feedforward=1536)), read
    small = resize("gpt2", width=256, heads=4, layers=8, feedforward=1024)
    yield "decoder 11M", lambda: build(small), decode | {"prompt of 512": reading(1, 512)}


def resize(name: str, **sizes: Any) -> spec.Model:
    return build_spec(replace(PRESETS[name], **sizes), source_vocab=30_522, target_vocab=30_522)


def speeds(
    make: Callable[[], Transformer], works: dict[str, Work], rounds: int, clock: Callable[[], float]
) -> Iterator[tuple[str, dict[str, list[float]], str]]:
    """Yield the tokens a second of each round in each precision, and the precision that "auto" chooses."""
    torch.manual_seed(1)
    plain = make().eval()
    runners = {"fp32": Runner(plain)}
    if has_fast_bf16(torch.device("cpu")):
        runners["bf16"] = Runner(plain, in_bf16=True)
    torch.manual_seed(1)
    runners["int8"] = Runner(store(make().eval(), INT8))
    for name, work in works.items():
        rates: dict[str, list[float]] = {precision: [] for precision in runners}
        for turn in range(rounds + 1):
            for precision, runner in runners.items():
                began = clock()
                done = work(runner.tree())
                if turn:  # the first use builds the module
                    rates[precision].append(done / (clock() - began))
        yield name, rates, "bf16" if multiplies_in_bf16(plain) else "fp32"


def is_lawful(rates: dict[str, list[float]], chosen: str) -> bool:
    """Return whether int8 is as fast as fp32, and "auto" as fast as the precisions that it chooses from."""
    ratios = [Ratio.of(rates["int8"], rates["fp32"])]
    ratios += [Ratio.of(rates[chosen], rates[name]) for name in ("fp32", "bf16") if name in rates and name != chosen]
    return all((ratio.median if ratio.high is None else ratio.high) >= 1 - SPREAD for ratio in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=16, help="number of tokens to decode")
    parser.add_argument("--only", default="", help="measure only models whose name begins with this")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--processor-time", action="store_true", help="measure processor time instead of elapsed time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results, broken = {}, []
    kernels = library()
    clock = time.process_time if options.processor_time else time.perf_counter
    print(f"kernels for {' '.join(sorted(isa(kernels)))}" if kernels else "no kernels", flush=True)
    with torch.inference_mode():
        for model, make, works in cases(options.new):
            if not model.startswith(options.only):
                continue
            for work, rates, chosen in speeds(make, works, options.rounds, clock):
                print(f"{model}, {work}: tokens/s; auto is {chosen}")
                for name, figures in rates.items():
                    beside = "" if name == "fp32" else f", {Ratio.of(figures, rates['fp32'])} of fp32"
                    print(f"    {name:5} {Spread.of(figures)}{beside}", flush=True)
                results[f"{model}, {work}"] = {**rates, "auto": rates[chosen]}
                if not is_lawful(rates, chosen):
                    broken.append(f"{model}, {work}")
    print("broken: " + "; ".join(broken) if broken else "int8 and auto keep the rule")
    if options.json:
        print(json.dumps(results))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
