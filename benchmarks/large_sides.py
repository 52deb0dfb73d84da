"""One side of `large.py`, in its own process: loads a checkpoint once, runs it, and prints its figures as JSON.

python benchmarks/large_sides.py JOB    # as large.py starts it
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

PROMPT = 32
"""Tokens of a prompt that is continued."""
Generate = Callable[[list[str], int], object]
"""Function that continues prompts by a number of tokens."""


def status(field: str) -> int:
    """Return a field of the memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def of_clearhead(job: dict[str, Any]) -> Callable[[], Generate]:
    import torch

    import clearhead as ch
    from clearhead.model import loading  # noqa: F401 imported before the clock starts

    torch.set_num_threads(job["threads"])

    def load() -> Generate:
        model = ch.load(job["folder"], device="cpu", precision=job["precision"])

        def generate(texts: list[str], count: int) -> object:
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            return model.generate(texts, temperature=0, batch_size=len(texts), **lengths)

        return generate

    return load


def of_transformers(job: dict[str, Any]) -> Callable[[], Generate]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 before the clock

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()

    def load() -> Generate:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job["precision"]]
        module = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(job["folder"])
        tokenizer.pad_token = tokenizer.eos_token

        def generate(texts: list[str], count: int) -> object:
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            return tokenizer.batch_decode(module.generate(**batch, do_sample=False, **lengths))

        return generate

    return load


def of_llama(job: dict[str, Any]) -> Callable[[], Generate]:
    import llama_cpp

    def load() -> Generate:
        threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
        model = llama_cpp.Llama(job["folder"], n_ctx=1024, n_batch=512, verbose=False, **threads)

        def generate(texts: list[str], count: int) -> object:
            (text,) = texts
            model.reset()
            tokens = model.tokenize(text.encode(), add_bos=False)
            return list(islice(model.generate(tokens, top_k=1, temp=0.0, repeat_penalty=1.0), count))

        return generate

    return load


SIDES = {"clearhead": of_clearhead, "transformers": of_transformers, "llama.cpp": of_llama}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint and run the cases of a job."""
    load = SIDES[job["side"]](job)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    before, began = status("VmRSS"), time.perf_counter()
    generate = load()
    result: dict[str, Any] = {
        "load_seconds": time.perf_counter() - began,
        "load_peak": status("VmHWM") - before,
        "private": status("RssAnon"),
        "before": before,
    }
    for case in job["cases"]:
        kind, _, size = case.partition("-")
        letters = int(size) if kind == "prompt" else PROMPT
        texts = ["".join(chr(97 + (row + index) % 26) for index in range(letters)) for row in range(int(size))]
        texts = texts[:1] if kind == "prompt" else texts
        count = 0 if kind == "prompt" else job["new_tokens"]
        generate(texts, 1)
        firsts = [measure_seconds(generate, texts, 1) for _ in range(job["rounds"])]
        if kind == "prompt":
            result[case] = [letters / first for first in firsts]
            continue
        # Every run reads the prompts too: the rest is the time of the steps.
        runs = [measure_seconds(generate, texts, count + 1) - min(firsts) for _ in firsts]
        result[case] = [len(texts) * count / seconds for seconds in runs]
    return result | {"peak": status("VmHWM")}


def measure_seconds(generate: Generate, texts: list[str], count: int) -> float:
    """Return the seconds of a generation."""
    began = time.perf_counter()
    generate(texts, count)
    return time.perf_counter() - began


def command(words: list[str]) -> dict[str, Any]:
    """Run a command of clearhead and return its exit code, seconds and peak."""
    from clearhead.apps.cli.main import main

    began = time.perf_counter()
    code = main(words)
    return {"code": code, "seconds": time.perf_counter() - began, "peak": status("VmHWM")}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (job["cap"], job["cap"]))
    # Libraries and commands print; what they print must not be taken for the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps(command(job["words"]) if "words" in job else measure(job)) + "\n")
    answers.flush()
