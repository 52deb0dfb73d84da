"""int4: perplexity of a trained model compared with llama.cpp's Q4_0, and speed compared with int8.

    python benchmarks/four_bits.py --model REF --text FILE      # perplexity
    python benchmarks/four_bits.py --speed [--layers 16] [--rounds 7]   # tokens per second of a random model
    python benchmarks/four_bits.py --products [--rounds 41]   # time of one matrix product, 1 thread

For the perplexity, REF is a run or a checkpoint. Its weights are rounded by the rules of `precision="int8"`,
`precision="int4"` and Q4_0 of llama.cpp. There the scale of a group of 32 is its number of the largest magnitude / -8,
in half precision. Q4_0 rounds the same matrices as int4, so only the rules differ. All three are then multiplied in
fp32. The last line is the model as int4 runs it, with inputs rounded to 8 bits.

For the speed, a decoder has random weights (0.3 billion with 16 layers). It generates at batch sizes 1 and 8, and reads
a prompt of 512 tokens. The precisions take turns; the highest speed of each counts.

For the products, int8 and int4 multiply rows with a matrix of 8,192 x 3,072 in turns. The ratio is the median of the
rounds, followed by its quartiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import clearhead as ch
from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.linear import int4_linear, int8_linear
from clearhead.fast.native.load import isa, library
from clearhead.fast.nibbles import GROUP, quantize_groups
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT4, INT8, choose_formats, choose_int4, quantize, store
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec


def round_as_q4_0(weight: Tensor) -> Tensor:
    """Return a matrix rounded by the rule of llama.cpp's Q4_0."""
    groups = weight.detach().reshape(-1, GROUP)
    scale = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    integers = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (integers * scale.half().float()).view(weight.shape)


def round_as_int8(weight: Tensor) -> Tensor:
    return INT8.widen(*INT8.encode(weight))


def round_as_int4(weight: Tensor) -> Tensor:
    return INT4.widen(*INT4.encode(weight))


def measure_perplexity(ref: str, text: str) -> dict[str, float]:
    """Return the perplexity of a model for each rounding rule."""
    plain = ch.load(ref, device="cpu", precision="fp32")
    formats = choose_int4(plain.module)
    rules: dict[str, Callable[[Tensor], Tensor]] = {
        "fp32": lambda weight: weight,
        "int8, fp32 inputs": round_as_int8,
        "Q4_0, fp32 inputs": round_as_q4_0,
        "int4, fp32 inputs": round_as_int4,
    }
    results = {}
    for name, rule in rules.items():
        module = copy.deepcopy(plain.module)
        for address, kind in formats.items():
            weight = module.get_parameter(f"{address}.weight")
            weight.data = (rule if kind == INT4 else round_as_int8)(weight.data) if name != "fp32" else weight.data
        results[name] = perplexity(plain.with_module(module), text)
    results["int4"] = perplexity(ch.load(ref, device="cpu", precision="int4"), text)
    return results


def perplexity(model: ch.Model, text: str) -> float:
    return math.exp(float(model.evaluate({"text": text})["loss"]))


def random_model(layers: int) -> spec.Model:
    """Return a decoder like Llama with random weights: 17 million per layer, 17 million in table and output."""
    sizes = Hyperparameters(
        family="decoder", layers=layers, width=1024, heads=16, feedforward=4096, activation="silu", gated=True,
        positions="rotary", norm="rms", norm_place="pre", bias=False, tie="none",
    )  # fmt: skip
    return build_spec(sizes, source_vocab=8192, target_vocab=8192)


def decode(tree: Transformer, rows: int, new: int) -> float:
    """Return the decoded tokens per second after a short prompt."""
    cache = IndexedCache()
    tree.decode(torch.randint(1, 8192, (rows, 16)), cache=cache)
    began = time.perf_counter()
    for _ in range(new):
        tree.decode(torch.randint(1, 8192, (rows, 1)), cache=cache)
    return rows * new / (time.perf_counter() - began)


def read_prompt(tree: Transformer, length: int) -> float:
    """Return the prompt tokens per second."""
    began = time.perf_counter()
    tree.decode(torch.randint(1, 8192, (1, length)), cache=IndexedCache())
    return length / (time.perf_counter() - began)


def measure_speed(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the highest of several speeds, by work and precision."""
    torch.manual_seed(0)
    module = build(random_model(layers)).eval().requires_grad_(False)
    trees = {"bf16": Runner(module, in_bf16=True).tree()}
    for name in ("int8", "int4"):
        copied = copy.deepcopy(module)
        formats = choose_int4(copied) if name == "int4" else choose_formats(copied, INT8)
        trees[name] = Runner(store(copied, formats)).tree()
    works: dict[str, Callable[[Transformer], float]] = {
        "batch 1": lambda tree: decode(tree, 1, 16),
        "batch 8": lambda tree: decode(tree, 8, 8),
        "prompt of 512": lambda tree: read_prompt(tree, 512),
    }
    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for work, run in works.items():
            speeds: dict[str, list[float]] = {name: [] for name in trees}
            for _ in range(rounds):
                for name, tree in trees.items():
                    speeds[name].append(run(tree))
            results[work] = {name: max(several) for name, several in speeds.items()}
    return results


def compare_products(rounds: int) -> None:
    """Print the time of a product in int8, and the ratio of int4, for several numbers of rows."""
    torch.set_num_threads(1)
    weight = torch.randn(8192, 3072)
    works = {"int8": int8_linear(*quantize(weight), None), "int4": int4_linear(*quantize_groups(weight), None)}
    for rows in (1, 4, 8, 32, 512):
        x = torch.randn(rows, 3072)
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds + 1):
            for name, multiply in works.items():
                began = time.perf_counter()
                for _ in range(max(1, 64 // rows)):
                    multiply(x)
                seconds[name].append((time.perf_counter() - began) / max(1, 64 // rows))
        int8, int4 = (several[1:] for several in seconds.values())
        low, middle, high = statistics.quantiles([a / b for a, b in zip(int4, int8, strict=True)], n=4)
        milliseconds = statistics.median(int8) * 1000
        print(f"{rows:4} rows  int8 {milliseconds:7.2f} ms  int4 / int8 {middle:.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    kernels = library()
    print("kernels:", "none" if kernels is None else ", ".join(sorted(isa(kernels))))
    if options.model and options.text:
        results = measure_perplexity(options.model, options.text)
        for name, value in results.items():
            print(f"{name:18}  perplexity {value:8.4f}  {value / results['fp32'] - 1:+.2%}")
        print(json.dumps(results))
    if options.products:
        compare_products(options.rounds)
    if options.speed:
        speeds = measure_speed(options.layers, options.rounds)
        for work, by_precision in speeds.items():
            cells = [
                f"{name} {value:8.1f} ({value / by_precision['int8']:.2f})" for name, value in by_precision.items()
            ]
            print(f"{work:14}", "  ".join(cells), " tokens/s (ratio to int8)")
        print(json.dumps(speeds))


if __name__ == "__main__":
    main()
