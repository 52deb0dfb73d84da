"""Forecast memory and communication of models of 1B, 7B and 70B parameters on 8 and 64 GPUs, from their specs alone.

    python benchmarks/scale.py
    MALLOC_MMAP_THRESHOLD_=65536 torchrun --nproc-per-node 2 benchmarks/scale.py --peak fsdp [--checkpointing]

The first prints the table of docs/scale.md. The second trains a small model for two steps on the CPU, and prints the
peak of each process's memory beside the forecast; the variable lets glibc give back what is freed.

Shapes: Llama 3.2 1B and Llama 3 70B (arXiv 2407.21783, table 3, and the released configuration), Llama 2 7B
(arXiv 2307.09288, appendix A.2.1).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from clearhead.core import build
from clearhead.data.batches.base import Batch
from clearhead.machine import size
from clearhead.presets.hyperparameters import build_spec
from clearhead.presets.named import PRESETS
from clearhead.spec import Model
from clearhead.training.dry_run import memory_in_use, peak_memory
from clearhead.training.losses import token_loss
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.parallel.choice import build_engine
from clearhead.training.parallel.joining import joined
from clearhead.training.parallel.processes import Process
from clearhead.training.parallel.sharded import Sharded
from clearhead.training.parallel.shares import share_of
from clearhead.training.plan import TrainingPlan, TrainingSetting, plan_training
from clearhead.training.recompute import recompute_layers

GB = 10**9
MEMORY, CONTEXT, GPUS = 80 * GB, 4096, (8, 64)


def llama(*, layers: int, width: int, heads: int, kv_heads: int, feedforward: int, vocab: int, tie: bool) -> Model:
    """Return the spec of a Llama."""
    hparams = replace(
        PRESETS["llama-tiny"], layers=layers, width=width, heads=heads, kv_heads=kv_heads, feedforward=feedforward,
        tie="all" if tie else "none",
    )  # fmt: skip
    return build_spec(hparams, source_vocab=vocab, target_vocab=vocab)


MODELS = {
    "1B": llama(layers=16, width=2048, heads=32, kv_heads=8, feedforward=8192, vocab=128_256, tie=True),
    "7B": llama(layers=32, width=4096, heads=32, kv_heads=32, feedforward=11_008, vocab=32_000, tie=False),
    "70B": llama(layers=80, width=8192, heads=64, kv_heads=8, feedforward=28_672, vocab=128_256, tie=False),
}


def row(name: str, plan: TrainingPlan) -> str:
    """Return a plan as a line of a table, in GB."""
    cells = [name, str(plan.setting.gpus)]
    for share in plan.shares:
        state = share.parameters + share.gradients + share.optimizer
        numbers = (
            state,
            share.weights,
            share.total(checkpointing=False),
            share.total(checkpointing=True),
            share.sent,
        )
        cells += [f"{number / GB:,.1f}" for number in numbers]
    best = plan.best
    cells.append("none" if best is None else f"{best[0].parallel}{', checkpointing' * best[1]}")
    return f"| {' | '.join(cells)} |"


def measure_peak(way: Literal["ddp", "fsdp"], *, checkpointing: bool) -> None:
    """Train a small model with the other processes that torchrun started, and print peak and forecast of each."""
    process, device, context, vocab = Process.here(), torch.device("cpu"), 512, 4000
    spec = llama(layers=4, width=768, heads=12, kv_heads=12, feedforward=2048, vocab=vocab, tie=True)
    torch.set_num_threads(1)
    with joined(process, Path("none"), device="cpu") as processes:
        ids = torch.randint(0, vocab, (process.size, context), generator=torch.Generator().manual_seed(3))
        batch = Batch(ids, None, ids, ids.numel(), ids.numel(), rows=np.arange(process.size))
        before = memory_in_use(device)
        module = build(spec, device="cpu" if way == "ddp" or processes.is_first else "meta")
        if checkpointing:
            recompute_layers(module)
        engine = build_engine(
            module,
            lambda module, batch: token_loss(module, batch, label_smoothing=0.0),
            processes,
            is_sharded=way == "fsdp",
            device=device,
            precision="fp32",
        )
        assert engine is not None and isinstance(engine, Sharded) == (way == "fsdp"), "start it with torchrun"
        optimizer = build_optimizer(module, kind="adamw", learning_rate=1e-3)
        # Without the whole weights that the first process had.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        for _ in range(2):
            engine.loss(share_of(batch, process), is_last=True)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        setting = TrainingSetting(process.size, MEMORY, ids.numel(), context, optimizer="adamw", precision="fp32")
        plan = plan_training(spec, setting)
        forecast = plan.shares[way == "fsdp"].total(checkpointing=checkpointing)
        print(
            f"process {process.rank}, {way}: {size(peak_memory(device) - before)}, forecast {size(forecast)}",
            flush=True,
        )


def main() -> None:
    """Print the table, or the peak of a small training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", choices=("ddp", "fsdp"), help="train a small model under torchrun")
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing")
    given = parser.parse_args()
    if given.peak:
        measure_peak(given.peak, checkpointing=given.checkpointing)
        return
    columns = ["state", "weights at work", "all", "checkpointed", "sent"]
    heads = ["model", "GPUs", *(f"{way}: {column}" for way in ("ddp", "fsdp") for column in columns), "fits"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, spec in MODELS.items():
        for gpus in GPUS:
            setting = TrainingSetting(gpus, MEMORY, gpus * CONTEXT, CONTEXT, optimizer="adamw", precision="bf16")
            print(row(name, plan_training(spec, setting)))


if __name__ == "__main__":
    main()
