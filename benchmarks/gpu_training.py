"""Groups of `gpu_speed.py` that train: steps compared with nanoGPT, an ablation, the command, and translation."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_counts import Run, count_work
from gpu_models import write_sentence_pairs, write_training_text
from gpu_sides import Bench, Case, Side, measure_case, report_failure
from gpu_sizes import COMMAND_SIDE, STEP_SIDE, DecoderSize
from torch.nn import functional as F
from train_speed import (
    CLIP,
    SMOOTHING,
    TRAIN_TABLE,
    Step,
    decoder_spec,
    load_nanogpt,
    nanogpt_step,
    our_step,
    plain_step,
    random_batch,
    translation,
)

import clearhead as ch
from clearhead.data.batches.base import Batch, count_batch
from clearhead.data.feed import Prepared
from clearhead.fast.training.compiled import count_graphs
from clearhead.fast.training.compiler import find_obstacle
from clearhead.spec.cost import training_flops
from clearhead.training.random_state import deterministic_algorithms

RUN_FILE = (
    """
[task]
kind = "generate"
[data]
train = {{ text = "{folder}/text.txt" }}
valid = 0.01
max_length = {length}
[tokenizer]
kind = "{kind}"
{vocabulary}
[model]
family = "decoder"
layers = {layers}
width = {width}
heads = {heads}
activation = "gelu"
norm_place = "pre"
dropout = 0.0
positions = "learned"
bias = false
"""
    + TRAIN_TABLE
    + """
device = "{device}"
compile = {compiles}
"""
)
COMPILE_SECONDS = 45.0
ABLATION_STEPS = 8


def measure_steps(bench: Bench, name: str) -> None:
    """Measure the training step of a decoder, eager and compiled, compared with nanoGPT."""
    size, device = bench.sizes.decoders[name], bench.device.type
    shape = size.rows, size.length
    spec = decoder_spec(size.layers, size.width, size.heads, size.length, size.vocabulary)
    batches = [random_batch(size.rows, size.length, size.vocabulary).to(bench.device) for _ in range(2)]
    operations = training_flops(spec, count_batch(batches[0])) / batches[0].num_tokens
    case = Case(
        f"train-{name}", "tokens", size.steps * size.rows * size.length, size.steps,
        bench.flops / operations if bench.flops else None,
    )  # fmt: skip

    def repeat(make: Callable[[], Step]) -> Run:
        step = make()
        return lambda: [step(batch) for batch in itertools.islice(itertools.cycle(batches), size.steps)]

    def side(label: str, make: Callable[[], Step], seconds: float = 5.0) -> Side:
        return Side(label, partial(repeat, make), seconds)

    sides = [
        side("clearhead eager", partial(our_step, spec, "bf16", 0.0, device)),
        side(STEP_SIDE, partial(our_step, spec, "bf16", 0.0, device, compiles=True, shape=shape), COMPILE_SECONDS),
        side("clearhead compiled, plain loss", partial(plain_loss_step, spec, bench), COMPILE_SECONDS),
    ]
    if bench.is_slow:
        make = partial(plain_loss_step, spec, bench, is_deterministic=True)
        sides.append(side("clearhead compiled, plain loss, deterministic choice of kernels", make, COMPILE_SECONDS))
    if bench.nanogpt is None:
        bench.leave_out("nanoGPT", "left out: name a checkout with --nanogpt DIR")
    else:
        build_peer = load_nanogpt(bench.nanogpt, size.layers, size.width, size.heads, size.length, size.vocabulary)
        for label, kind, seconds in (("eager", "bf16", 5.0), ("compiled", "bf16 compiled", COMPILE_SECONDS)):
            make = partial(nanogpt_step, build_peer, kind, device)
            sides.append(side(f"nanoGPT {label}", make, seconds))
    measure_case(bench, case, sides)


def plain_loss_step(spec: ch.spec.Model, bench: Bench, *, is_deterministic: bool = False) -> Step:
    """Return a step of the plain core, compiled as a whole with the plain loss over all logits.

    Args:
        spec: the spec of the model.
        bench: the settings.
        is_deterministic: True if the compiler chooses kernels without timing them, as a run does.
    """
    module = ch.build(spec).to(bench.device)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = module(ids).logits
        assert logits is not None
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    called = torch.compile(loss_of, options={"deterministic": True} if is_deterministic else None)
    return plain_step(
        module, lambda batch: called(batch.ids, batch.labels), in_bf16=True, fused=True, device=bench.device.type
    )


def measure_ablation(bench: Bench, name: str) -> None:
    """Measure what each cause costs a step: the vocabulary, reading at once, copies in the step, determinism."""
    size = bench.sizes.decoders[name]
    steps = min(ABLATION_STEPS, size.steps)
    make = partial(prepare_ablation, bench, size, steps)
    tokenizer_vocabulary, deterministic = size.command_vocabulary, "clearhead, deterministic"
    sides = [
        Side("clearhead", make),
        Side("clearhead, vocabulary of the tokenizer", partial(make, vocabulary=tokenizer_vocabulary)),
        Side("clearhead, loss read at once", partial(make, reads_loss=True)),
        Side("clearhead, batch copied in the step", partial(make, copies=True)),
        Side("clearhead, batches from the feed", partial(make, feeds=True)),
        Side(deterministic, partial(make, is_deterministic=True)),
        Side("clearhead, compiled", partial(make, compiles=True), COMPILE_SECONDS),
        Side(f"{deterministic}, compiled", partial(make, is_deterministic=True, compiles=True), COMPILE_SECONDS),
    ]
    measure_case(bench, Case(f"ablation-{name}", "tokens", steps * size.rows * size.length, steps), sides)


def prepare_ablation(
    bench: Bench,
    size: DecoderSize,
    steps: int,
    *,
    vocabulary: int | None = None,
    reads_loss: bool = False,
    copies: bool = False,
    feeds: bool = False,
    is_deterministic: bool = False,
    compiles: bool = False,
) -> Run:
    """Return the steps of one side of the ablation.

    Args:
        bench: the settings.
        size: the sizes of the decoder.
        steps: the number of steps of a turn.
        vocabulary: the vocabulary of the model. None means that of the peers.
        reads_loss: True if the host reads the loss before the backward pass.
        copies: True if each step copies its batch from pageable memory.
        feeds: True if a thread prepares and copies the batches.
        is_deterministic: True for deterministic algorithms, as a run uses them.
        compiles: True for compiled stacks.
    """
    vocabulary, device, shape = vocabulary or size.vocabulary, bench.device, (size.rows, size.length)
    spec = decoder_spec(size.layers, size.width, size.heads, size.length, vocabulary)
    step = our_step(spec, "bf16", 0.0, device.type, compiles=compiles, shape=shape, reads_loss=reads_loss)
    on_host = [random_batch(size.rows, size.length, vocabulary) for _ in range(steps)]
    on_device = [batch.to(device) for batch in on_host]

    def run() -> None:
        with deterministic_algorithms() if is_deterministic else nullcontext():
            if feeds:
                take_from_feed(on_host, device, step)
                return
            for batch in on_host if copies else on_device:
                step(batch.to(device))

    return run


class ListedBatches:
    """Batches of a list, in the form that the feed reads.

    Args:
        batches: the batches of an epoch.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches_per_epoch = len(batches)
        self._batches, self._next = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next == self.batches_per_epoch:
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def state(self) -> dict[str, Any]:
        """Return the number of batches that were taken."""
        return {"next": self._next}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the batches that were taken."""
        self._next = state["next"]


def take_from_feed(batches: Sequence[Batch], device: torch.device, step: Step) -> None:
    """Take one step on each batch, while a thread prepares the next ones."""
    feed = Prepared(ListedBatches(batches), device)
    try:
        for batch in feed:
            step(batch)
    finally:
        feed.close()


def command_file(bench: Bench, size: DecoderSize, folder: Path, steps: int) -> Path:
    """Write the text and the run file of `clearhead train` for a decoder; return the path of the run file.

    The run is compiled if the machine has a GPU and can compile.
    """
    module = ch.build(decoder_spec(1, size.width, size.heads, size.length, size.vocabulary))
    compiles = bench.device.type != "cpu" and not find_obstacle(module, bench.device)
    folder.mkdir(parents=True)
    has_words = size.command_vocabulary >= 256
    write_training_text(folder / "text.txt", size.command_vocabulary, 8 * size.rows * size.length)
    text = RUN_FILE.format(
        folder=folder, length=size.length, kind="word" if has_words else "character",
        vocabulary=f"vocab_size = {size.command_vocabulary}" if has_words else "", layers=size.layers,
        width=size.width, heads=size.heads, steps=steps, batch_tokens=size.rows * size.length, clip=CLIP,
        precision="bf16", device=bench.device.type, compiles=str(compiles).lower(),
    )  # fmt: skip
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def measure_command(bench: Bench, name: str) -> None:
    """Measure `clearhead train` by the times in its metrics, without the first and the last line."""
    size, case = bench.sizes.decoders[name], f"command-{name}"
    with report_failure(bench, case, COMMAND_SIDE):
        file = command_file(bench, size, bench.folder / case, size.command_steps)
        began = time.perf_counter()
        command = [sys.executable, "-m", "clearhead", "train", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, bench.seconds_left()))
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        lines = (file.parent / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines][:-1]  # the last line is written after a validation
        tokens, seconds = (rows[-1][key] - rows[0][key] for key in ("tokens", "seconds"))
        steps = rows[-1]["step"] - rows[0]["step"]
        figures = {
            "unit": "tokens", "amount": tokens, "seconds": [seconds], "steps": steps, "limit": None,
            "ready_seconds": time.perf_counter() - began - seconds,
        }  # fmt: skip
        bench.note(case, compile_line(bench, done.stderr + done.stdout))
        figures |= count_command(bench, size, steps) if bench.seconds_left() > 20 else {}
        bench.report(case, COMMAND_SIDE, **figures)


def compile_line(bench: Bench, output: str) -> str:
    """Return the line of a run about compiling, or the reason why the machine cannot compile."""
    lines = [line.strip() for line in output.splitlines() if "compile" in line]
    reason = "a CPU" if bench.device.type == "cpu" else find_obstacle(torch.nn.Identity(), bench.device)
    return lines[-1] if lines else f"eager: {reason}" if reason else "compiled"


def count_command(bench: Bench, size: DecoderSize, steps: int) -> dict[str, Any]:
    """Return the counts of a step of the command: those of a longer run less those of a shorter one.

    Args:
        bench: the settings.
        size: the sizes of the decoder.
        steps: the steps of the measured run; the counted runs are shorter.
    """
    lengths = 10, 20
    counts = []
    for length in lengths:
        file = command_file(bench, size, bench.folder / f"counted-{size.width}-{length}", length)
        counts.append(count_work(partial(ch.train, file), bench.device))
    return counts[1].subtract(counts[0]).divide(lengths[1] - lengths[0])


def measure_translation(bench: Bench, data: Path | None) -> None:
    """Measure steps of translation training on batches of many shapes, eager and compiled, and count the graphs.

    Args:
        bench: the settings.
        data: the folder multi30k-bpe. None means generated sentences of such lengths.
    """
    steps, device = bench.sizes.translation_steps, bench.device
    if data is None:
        data = bench.folder / "pairs"
        data.mkdir()
        write_sentence_pairs(data, 29_000 if device.type != "cpu" else 200)
    arguments = argparse.Namespace(data=data, steps=steps, batch_tokens=4096 if device.type != "cpu" else 256)
    work = translation(arguments, bench.sizes.translation_layers)
    batches = [batch.to(device) for batch in work.batches[:steps]]
    tokens = sum(batch.num_tokens for batch in batches)
    operations = sum(training_flops(work.spec, count_batch(batch)) for batch in batches)
    limit = bench.flops / operations * tokens if bench.flops else None

    def prepare(*, compiles: bool) -> Run:
        step = our_step(work.spec, "bf16", SMOOTHING, device.type, compiles=compiles)
        return lambda: [step(batch) for batch in batches]

    sides = [
        Side("clearhead eager", partial(prepare, compiles=False)),
        Side(STEP_SIDE, partial(prepare, compiles=True), COMPILE_SECONDS),
    ]
    before = count_graphs()
    measure_case(bench, Case("train-translate", "tokens", tokens, steps, limit), sides)
    shapes = len({tuple(batch.ids.shape) for batch in batches})
    bench.note("train-translate", f"{count_graphs() - before} graphs for {shapes} shapes")
