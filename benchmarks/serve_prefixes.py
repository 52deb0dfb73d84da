"""Chats with one long system prompt, with and without shared beginnings: seconds until the first token, in one process.

python benchmarks/serve_prefixes.py [--system 400] [--chats 16]

GPT-2 of 124M parameters with random weights in 8 bits; each chat has a question of 16 words behind the system prompt.
The two engines take turns.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from pathlib import Path

import torch
from inference_models import gpt2, in_8_bits, one_token_words
from pairing import Ratio, Spread
from side_by_side import describe, machine

import clearhead as ch
from clearhead.apps.serve.api.engine import EngineJob, TokenEvent
from clearhead.apps.serve.api.served import ServedModel

QUESTION_WORDS = 16


def seconds_to_first(served: ServedModel, prompt: str) -> tuple[float, int]:
    """Return the seconds until the first token of a prompt, and that token."""
    received: queue.SimpleQueue[object] = queue.SimpleQueue()
    request = served.request(prompt, served.model.generate_options(max_new_tokens=1, temperature=0))
    begun = time.perf_counter()
    job = EngineJob.of_request(served.engine, request)
    job.deliver = received.put
    served.engine.submit([job])
    event = received.get()
    assert isinstance(event, TokenEvent), event
    return time.perf_counter() - begun, event.token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path("../shared/data/gpt2-tokenizer"))
    parser.add_argument("--system", type=int, default=400, help="words of the system prompt")
    parser.add_argument("--chats", type=int, default=16)
    options = parser.parse_args()
    print(describe(machine(torch.get_num_threads())), flush=True)
    with tempfile.TemporaryDirectory() as name:
        plain = gpt2(Path(name) / "gpt2", options.tokenizer)
        words, draw = one_token_words(plain), random.Random(1)
        model = ch.load(in_8_bits(plain, Path(name) / "int8"))
        sides = {"read": ServedModel("read", model, shares_prefixes=False), "shared": ServedModel("shared", model)}
        system = " " + " ".join(draw.choices(words, k=options.system))
        prompts = [f"{system} {' '.join(draw.choices(words, k=QUESTION_WORDS))}" for _ in range(options.chats)]
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for prompt in [prompts[0], *prompts]:
            first_token_seconds = {side: seconds_to_first(served, prompt) for side, served in sides.items()}
            assert first_token_seconds["read"][1] == first_token_seconds["shared"][1]
            for side, (taken, _) in first_token_seconds.items():
                seconds[side].append(taken)
        read, shared = ([1000 * value for value in seconds[side][1:]] for side in ("read", "shared"))
        engine = sides["shared"].engine
        print(f"first token: {Spread.of(read)} ms read, {Spread.of(shared)} ms shared")
        print(f"read / shared: {Ratio.of(read, shared)}")
        print(f"tokens read {engine.num_read}, shared {engine.num_shared}")
        for served in sides.values():
            served.engine.join()


if __name__ == "__main__":
    main()
