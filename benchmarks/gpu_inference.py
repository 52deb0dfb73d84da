"""Groups of `gpu_speed.py` that generate, translate and embed, and those that start a fresh process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_counts import Run
from gpu_models import make_captions, make_prompts, make_sources, write_gpt2, write_marian, write_minilm
from gpu_sides import Bench, Case, Side, measure_case, report_failure
from inference_cases import TARGET, Job, read_tokens
from inference_sides import SIDES

STATIC_SECONDS = 60.0
"""Seconds that transformers needs to compile a static cache for one batch size."""
PEER_BATCH = 256
FIRST_TOKENS = 20
UNCAPTURED = {"CLEARHEAD_KERNELS": "plain"}
"""Environment in which nothing is captured or compiled."""


class StepCount:
    """Number of decoding steps of the running batches since the last reset.

    A step of a batch that calls the step of its base class counts once.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_inside = False

    def read(self) -> int:
        """Return the number of steps."""
        return self.number

    def wrap(self, run: Run) -> Run:
        """Return work that resets the number before it runs."""

        def run_counted() -> None:
            self.number = 0
            run()

        return run_counted


@contextmanager
def count_steps(count: StepCount) -> Iterator[None]:
    """Count the steps of every running batch inside the context."""
    from clearhead.generate.running import RunningBatch
    from clearhead.generate.slots.batch import SlotBatch

    before = [(batch_class, batch_class.step) for batch_class in (RunningBatch, SlotBatch)]
    for batch_class, step in before:
        batch_class.step = _wrap_step(step, count)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for batch_class, step in before:
            batch_class.step = step  # type: ignore[method-assign]


def _wrap_step(step: Any, count: StepCount) -> Any:
    def run_counted(self: Any, *arguments: Any, **keys: Any) -> Any:
        if count.is_inside:
            return step(self, *arguments, **keys)
        count.number += 1
        count.is_inside = True
        try:
            return step(self, *arguments, **keys)
        finally:
            count.is_inside = False

    return run_counted


def is_installed(module: str) -> bool:
    """Return whether this environment has a module."""
    return importlib.util.find_spec(module) is not None


def job_of(bench: Bench, library: str, case: str, folder: str, texts: list[str], **fields: Any) -> Job:
    """Return the job of a side: a library on the device of the benchmark, in bf16."""
    import torch

    job = Job(library, "bf16", False, case, folder, folder, texts, torch.get_num_threads(), bench.device.type)
    return replace(job, **fields)


def prepare_job(job: Job, count: StepCount | None = None) -> Run:
    """Load the model of a job and return its work; with a count, the steps of each run are counted anew."""
    run = SIDES[job.library](job).run
    return run if count is None else count.wrap(run)


def sides_of(bench: Bench, job: Job, count: StepCount) -> list[Side]:
    """Return the sides of a case of generation or translation: clearhead, and transformers if it is installed."""
    sides = [Side("clearhead", partial(prepare_job, job, count), 5.0, count.read)]
    if not is_installed("transformers"):
        bench.leave_out("transformers", "left out: not installed")
        return sides
    peer = replace(job, library="transformers")
    sides.append(Side("transformers", partial(prepare_job, peer), 8.0))
    rows = len(job.texts)
    if bench.is_slow and job.kind == "decode" and job.top_p is None and rows in (1, 64):
        compiled = replace(peer, compiled=True)
        sides.append(Side("transformers static, compiled", partial(prepare_job, compiled), STATIC_SECONDS))
    return sides


def measure_decoding(bench: Bench) -> None:
    """Measure greedy decoding and sampling with top-p after short prompts."""
    size, new = bench.sizes.gpt2, bench.sizes.new_tokens
    folder = str(write_gpt2(bench.folder / "gpt2", size))
    cases = [(rows, None) for rows in bench.sizes.decode_rows] + [(rows, 0.9) for rows in bench.sizes.sampled_rows]
    for rows, top_p in cases:
        name = f"decode-{rows}"
        job = job_of(bench, "clearhead", name, folder, make_prompts(name, rows), count=new, top_p=top_p)
        count = StepCount()
        least = bench.seconds_of_step(size.bytes_of_step(rows, read_tokens(name) + new / 2), 0.0)
        case = Case(
            name if top_p is None else f"sample-{rows}", "tokens", rows * new, new,
            None if least is None else rows / least, names_functions=top_p is None,
        )  # fmt: skip
        with count_steps(count):
            measure_case(bench, case, sides_of(bench, job, count))


def measure_prompt(bench: Bench) -> None:
    """Measure the time from a long prompt to its first new token."""
    size, length = bench.sizes.gpt2, bench.sizes.long_prompt
    folder = str(write_gpt2(bench.folder / "gpt2", size))
    name = f"prompt-{length}"
    job = job_of(bench, "clearhead", name, folder, make_prompts(name, 1))
    least = bench.seconds_of_step(size.bytes_of_step(1, 0), size.flops_of_tokens(1, length, 1))
    count = StepCount()
    case = Case(name, "tokens", length, 1, None if least is None else length / least)
    sides = [replace(side, steps=None) for side in sides_of(bench, job, count)]
    measure_case(bench, case, sides)


def measure_marian(bench: Bench) -> None:
    """Measure translation with a Marian, greedily and with beams."""
    size = bench.sizes.marian
    folder = write_marian(bench.folder / "marian", size)
    for rows, beams in bench.sizes.translations:
        name = f"translate-{rows}x{beams}"
        job = job_of(bench, "clearhead", name, str(folder), make_sources(folder, rows))
        count = StepCount()
        least = bench.seconds_of_step(size.bytes_of_step(rows * beams, TARGET / 2, TARGET), 0.0)
        limit = None if least is None else rows / least
        with count_steps(count):
            case = Case(name, "tokens", rows * TARGET, TARGET, limit, names_functions=True)
            measure_case(bench, case, sides_of(bench, job, count))


def measure_embedding(bench: Bench) -> None:
    """Measure the embedding of captions, in batches by number of texts and by tokens."""
    size = bench.sizes.minilm
    folder, texts = str(write_minilm(bench.folder / "minilm", size)), make_captions(bench.sizes.captions)
    sides = []
    for batch in bench.sizes.caption_batches:
        job = job_of(bench, "clearhead", "embed", folder, texts, batch_size=batch)
        label = "clearhead" if batch is None else f"clearhead, batches of {batch}"
        sides.append(Side(label, partial(prepare_job, job), 5.0))
    if is_installed("sentence_transformers"):
        job = job_of(bench, "sentence-transformers", "embed", folder, texts, batch_size=PEER_BATCH)
        sides.append(Side("sentence-transformers", partial(prepare_job, job), 15.0))
    else:
        bench.leave_out("sentence-transformers", "left out: not installed")
    tokens = count_tokens(folder, texts)
    least = bench.seconds_of_step(0.0, size.flops_of_tokens(len(texts), tokens / len(texts), 0))
    limit = None if least is None else len(texts) / least
    measure_case(bench, Case("embed", "sentences", len(texts), 1, limit, names_functions=True), sides)


def count_tokens(folder: str, texts: list[str]) -> int:
    """Return the number of tokens of all texts, without padding."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))


def measure_first_answer(bench: Bench) -> None:
    """Measure a fresh process that answers one prompt, by default and with eager steps."""
    folder = str(write_gpt2(bench.folder / "gpt2", bench.sizes.gpt2))
    words = [
        "generate", folder, "--prompt", make_prompts("decode-1", 1)[0], "--max-new-tokens", str(FIRST_TOKENS),
        "--greedy", "--device", bench.device.type,
    ]  # fmt: skip
    sides = [
        Side("clearhead", partial(prepare_command, words, {}), 40.0, is_profiled=False),
        Side("clearhead eager", partial(prepare_command, words, UNCAPTURED), 40.0, is_profiled=False),
    ]
    measure_case(bench, Case("first", "answers", 1, 1), sides)


def measure_demo(bench: Bench) -> None:
    """Measure the training of `clearhead demo`, by default and with eager steps."""
    for label, environment in (("clearhead", {}), ("clearhead eager", UNCAPTURED)):
        if bench.seconds_left() < 60:
            bench.report("demo", label, skipped="too little time is left")
            continue
        with report_failure(bench, "demo", label):
            folder = bench.folder / f"demo-{label}"
            began = time.perf_counter()
            prepare_command([*bench.sizes.demo, "--out", str(folder)], environment)()
            whole = time.perf_counter() - began
            last = json.loads((folder / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
            bench.report(
                "demo", label, unit="trainings", amount=1, steps=last["step"], seconds=[last["seconds"]],
                ready_seconds=whole - last["seconds"], limit=None,
            )  # fmt: skip


def prepare_command(words: list[str], environment: dict[str, str]) -> Run:
    """Return work that runs a command of clearhead in a new process."""

    def run() -> None:
        command = [sys.executable, "-m", "clearhead", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])

    return run
