"""Texts of mixed length: one running batch compared with fixed batches, in turns.

python benchmarks/mixed_lengths.py MODEL [--precision int8] [--prompts 128] [--rounds 3]

Prompts have 4 to 128 random tokens. About every fiftieth id ends a sequence, so that lengths have a geometric
distribution with a mean near 50 and at most 400 tokens. A fixed batch has as many prompts as the running one. The next
batch begins when all sequences of the batch have ended.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace

import torch
from pairing import Ratio, Spread

import clearhead
from clearhead.generate.batching import CPU_CACHE_TOKENS, batches_by_cost
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions

LIMIT, SHARE_OF_ENDS = 400, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    model, draw = clearhead.load(arguments.model, precision=arguments.precision), random.Random(1)
    ids = range(5, model.spec.num_outputs)
    prompts = [draw.choices(ids, k=draw.choice([4, 8, 16, 64, 128])) for _ in range(arguments.prompts)]
    ends = tuple(draw.sample(ids, len(ids) // SHARE_OF_ENDS))
    options = GenerateOptions(max_new_tokens=LIMIT, temperature=1.0, seed=1)
    request = GenerateRequest(prompts, options, ends[0], 0, config=GenerationConfig(eos_ids=ends))
    costs, tree = [len(prompt) + LIMIT for prompt in prompts], model.runner.tree()
    fixed = [
        replace(request, prompts=[prompts[number] for number in batch])
        for batch in batches_by_cost(costs, budget=CPU_CACHE_TOKENS, most_rows=None)
    ]
    rates: dict[str, list[float]] = {"fixed batches": [], "running batch": []}
    generate_ids(tree, replace(request, prompts=prompts[:2]))
    for _ in range(arguments.rounds):
        for name, requests in (("fixed batches", fixed), ("running batch", [request])):
            begun = time.perf_counter()
            values = [continuation for some in requests for (continuation,) in generate_ids(tree, some)]
            rates[name].append(sum(len(continuation.ids) for continuation in values) / (time.perf_counter() - begun))
    for name, values in rates.items():
        print(f"{name}: {Spread.of(values)} tokens/s")
    ratio = Ratio.of(rates["running batch"], rates["fixed batches"])
    print(f"ratio {ratio}, {torch.get_num_threads()} threads, {arguments.precision}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
