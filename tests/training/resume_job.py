"""A training run for `test_resume`, as a process of its own that can be killed, or that kills itself in mid-write.

    python -m tests.training.resume_job real RUN [--resume] [--kill-after SECONDS] [--kill-at-sync N]
    python -m tests.training.resume_job chain RUN SEED

"real" trains the real module on real batches, with shuffling, dropout, accumulation, EMA and averaging. "chain" trains
a small stand-in in forked children, each killed at a random write to the disk, until one of them reaches the end; then
it trains another one beside it, RUN-whole, undisturbed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.evaluate.result import Validation
from clearhead.runs.checkpoint import checkpoint_steps
from clearhead.training.loop import Trainer
from clearhead.training.runfile.sections import EarlyStop
from clearhead.training.settings import TrainSettings
from tests.training.small import Recorder, small_trainer

STEPS = 28


def reversed_words(folder: Path) -> None:
    """Pairs to learn from: letters, and the same letters backwards."""
    draw = random.Random(4)
    lines = [" ".join(draw.choices("abcdefghijk", k=draw.randint(2, 9))) for _ in range(67)]
    (folder / "source.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target.txt").write_text("".join(f"{line[::-1]}\n" for line in lines))


def real_trainer(run: Path, *, steps: int = STEPS, precision: Literal["fp32", "bf16"] = "fp32") -> Trainer[Any]:
    """The parts of a translation run, with everything on that could be forgotten in a checkpoint."""
    from clearhead.core import build
    from clearhead.data.batches.base import Batch
    from clearhead.data.batches.collate import collate_pairs
    from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches
    from clearhead.data.sources.pairs import parallel_files
    from clearhead.data.stores.pairs import prepare_pairs
    from clearhead.data.stores.tokenizers import cached_tokenizers
    from clearhead.presets.hyperparameters import Hyperparameters, build_spec
    from clearhead.training.losses.tokens import token_loss
    from clearhead.training.optim.optimizers import build_optimizer
    from clearhead.training.optim.schedules import build_schedule

    source = parallel_files(run.parent / "source.txt", run.parent / "target.txt")
    tokenizers = cached_tokenizers(source, kind="word", vocab_size=15, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=11, max_ratio=None, training=True)
    # Drawn before the trainer seeds anything: both a new and a resumed run must not depend on it
    torch.manual_seed(23)
    hparams = Hyperparameters(layers=1, width=14, heads=2, feedforward=19, dropout=0.2, attention_dropout=0.1)
    module = build(
        build_spec(hparams, source_vocab=tokenizers.source.vocab_size, target_vocab=tokenizers.target.vocab_size)
    )

    def batches_of(seed: int, shuffle: bool = True) -> EpochBatches[Batch]:
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=66, seed=seed, shuffle=shuffle)
        return training_batches(store, plan, lambda rows: collate_pairs(store, rows))

    valid = batches_of(0, shuffle=False)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return token_loss(module, batch, label_smoothing=0.1)

    def validate(module: nn.Module) -> Validation:
        valid.load_state(valid.state() | {"epoch": 0, "batch": 0})
        total, labels = token_loss(module, next(valid), label_smoothing=0.0)
        return Validation(float(total) / labels, score=random.random())

    return Trainer(
        module=module,
        optimizer=build_optimizer(module, kind="muon", learning_rate=0.01, weight_decay=0.01),
        schedule=build_schedule("plateau", learning_rate=0.01, warmup=5, steps=STEPS, width=14),
        batches=batches_of(9),
        loss=loss,
        validate=validate,
        settings=TrainSettings(
            run=str(run), steps=steps, precision=precision, accumulate=3, clip=1.0,
            validate_every=4, save_every=3, log_every=1, keep=2, average=3, ema=0.9,
            early_stop=EarlyStop(metric="loss", patience=100), plots=False, seed=5,
        ),
        progress=Recorder(),
    )  # fmt: skip


def die_after(trainer: Trainer[Any], seconds: float) -> None:
    """Kill this process some time after its first checkpoint, whatever it is doing; steps and writes are stretched."""
    fast_sync, fast_loss = os.fsync, trainer.loss

    def slow_sync(descriptor: int) -> None:
        time.sleep(0.01)
        fast_sync(descriptor)

    def slow_loss(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
        time.sleep(0.02)
        return fast_loss(module, batch)

    def wait_and_kill() -> None:
        while not checkpoint_steps(Path(trainer.settings.run)):
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync, trainer.loss = slow_sync, slow_loss  # type: ignore[assignment]
    threading.Thread(target=wait_and_kill, daemon=True).start()


def die_at_sync(number: int) -> None:
    """Kill this process in the middle of its N-th write: before the file has reached the disk, half of it cut off."""
    fast_sync, calls = os.fsync, []

    def deadly_sync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == number:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            # Not a second name for a file that is written already, as recent weights have
            if path.is_file() and ".writing-" in str(path) and path.stat().st_nlink == 1:
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fast_sync(descriptor)

    os.fsync = deadly_sync  # type: ignore[assignment]


def chain(run: Path, seed: int) -> int:
    """Train in children that die at random writes, and return how many did."""
    draw = random.Random(seed)
    # What the first step of an optimizer loads; a backward pass here would leave threads that do not survive a fork
    importlib.import_module("torch._dynamo")
    for deaths in range(200):
        resume = (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step-*"))
        number = draw.randint(1, 40)
        child = os.fork()
        if child == 0:
            die_at_sync(number)
            chain_trainer(run).run(resume=resume)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            chain_trainer(run.with_name(f"{run.name}-whole")).run()
            return deaths
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "the child failed by itself"
    raise AssertionError("no child reached the end")


def chain_trainer(run: Path) -> Trainer[Any]:
    return small_trainer(run, steps=14, accumulate=2, ema=0.8, average=3, keep=2, save_every=3, log_every=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["real", "chain"])
    parser.add_argument("run", type=Path)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-after", type=float)
    parser.add_argument("--kill-at-sync", type=int)
    options = parser.parse_args()
    if options.kind == "chain":
        sys.stdout.write(f"{chain(options.run, options.seed)}\n")
        return
    trainer = real_trainer(options.run)
    if options.kill_after is not None:
        die_after(trainer, options.kill_after)
    if options.kill_at_sync:
        die_at_sync(options.kill_at_sync)
    trainer.run(resume=options.resume)
    sys.stdout.write(f"{trainer.progress.messages}\n")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
