"""A training run for `test_resume`: a separate process that kills itself at some moment, or during a write.

    python -m tests.training.resume_job whole RUN
    python -m tests.training.resume_job killed RUN SECONDS WRITE
    python -m tests.training.resume_job chain RUN SEED

"whole" trains the real module on real batches, with shuffling, dropout, accumulation, EMA and averaging. "killed" does
so in forked children. The first is killed some seconds after its first checkpoint, the second at a write to the disk,
and the third reaches the end. "chain" trains a small stand-in in forked children. Each is killed at a random write to
the disk, until one of them reaches the end. Then it trains another one, RUN-whole, without interruption.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.generate.scoring.result import Validation
from clearhead.training.loop import Trainer
from clearhead.training.record import TrainSettings
from clearhead.training.runfile.sections import EarlyStop
from tests.training.small import Recorder, small_trainer

STEPS = 28


def write_reversed_words(folder: Path) -> None:
    """Write the training pairs: letters, and the same letters backwards."""
    draw = random.Random(4)
    lines = [" ".join(draw.choices("abcdefghijk", k=draw.randint(2, 9))) for _ in range(67)]
    (folder / "source.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target.txt").write_text("".join(f"{line[::-1]}\n" for line in lines))


def real_trainer(run: Path, *, steps: int = STEPS, precision: Literal["fp32", "bf16"] = "fp32") -> Trainer[Any]:
    """Return a trainer of a translation run with every feature whose state a checkpoint must hold."""
    from clearhead.core import build
    from clearhead.data.batches.base import Batch
    from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches
    from clearhead.data.sources.pairs import parallel_files
    from clearhead.data.stores.store import prepare_pairs
    from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
    from clearhead.fast.training.tree import training_tree
    from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
    from clearhead.tasks.train import token_loss
    from clearhead.tasks.translate.train import collate_pairs
    from clearhead.training.optim.optimizers import build_optimizer
    from clearhead.training.optim.schedules import build_schedule

    source = parallel_files(run.parent / "source.txt", run.parent / "target.txt")
    tokenizers = load_or_train_tokenizers(source, kind="word", vocab_size=15, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=11, max_ratio=None, training=True)
    # Drawn before the trainer seeds anything: both a new and a resumed run must not depend on it
    torch.manual_seed(23)
    # In bf16, layers whose sizes fill blocks have special kernels.
    width, inner = (14, 19) if precision == "fp32" else (32, 64)
    hparams = Hyperparameters(layers=1, width=width, heads=2, feedforward=inner, dropout=0.2, attention_dropout=0.1)
    module = build(
        build_spec(hparams, source_vocab=tokenizers.source.vocab_size, target_vocab=tokenizers.target.vocab_size)
    )

    def batches_of(seed: int, shuffle: bool = True) -> EpochBatches[Batch]:
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=66, seed=seed, shuffle=shuffle)
        return training_batches(store, plan, lambda rows: collate_pairs(store, rows, tokenizers))

    valid = batches_of(0, shuffle=False)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return token_loss(module, batch, label_smoothing=0.1)

    def validate(module: nn.Module) -> Validation:
        valid.load_state(valid.state() | {"epoch": 0, "batch": 0})
        total, labels = token_loss(module, next(valid), label_smoothing=0.0)
        return Validation(float(total) / labels, score=random.random())

    return Trainer(
        module=training_tree(module, precision),
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
    """Kill this process some time after its first checkpoint; steps and writes are slowed down."""
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


def import_first() -> None:
    """Import the modules of the first optimizer step; a backward pass would start threads, which no fork keeps."""
    importlib.import_module("torch._dynamo")


def was_killed(action: Callable[[], None]) -> bool:
    """Run a function in a forked child, and return whether the child was killed."""
    child = os.fork()
    if child == 0:
        action()
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the child failed by itself"
    return code != 0


def kill_twice(run: Path, seconds: float, write: int) -> None:
    """Train in three children, two of which are killed; print the step that the first one reached."""
    import_first()

    def first() -> None:
        trainer = real_trainer(run)
        die_after(trainer, seconds)
        trainer.run()

    def second() -> None:
        trainer = real_trainer(run)
        die_at_sync(write)
        trainer.run(resume=True)

    def third() -> None:
        trainer = real_trainer(run)
        trainer.run(resume=True)
        print(trainer.progress.messages)  # type: ignore[attr-defined]

    assert was_killed(first)
    print(max((row.step for row in read_metrics(run / "metrics.jsonl")), default=0), flush=True)
    assert was_killed(second)
    assert not was_killed(third)


def chain(run: Path, seed: int) -> int:
    """Train in children that are killed at random writes, and return the number of kills."""
    draw = random.Random(seed)
    import_first()
    for deaths in range(200):
        resume = (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step-*"))
        number = draw.randint(1, 40)

        def train_part(number: int = number, resume: bool = resume) -> None:
            die_at_sync(number)
            chain_trainer(run).run(resume=resume)

        if not was_killed(train_part):
            chain_trainer(run.with_name(f"{run.name}-whole")).run()
            return deaths
    raise AssertionError("no child reached the end")


def chain_trainer(run: Path) -> Trainer[Any]:
    return small_trainer(run, steps=14, accumulate=2, ema=0.8, average=3, keep=2, save_every=3, log_every=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["whole", "killed", "chain"])
    parser.add_argument("run", type=Path)
    parser.add_argument("numbers", nargs="*", type=float)
    options = parser.parse_args()
    if options.kind == "chain":
        print(chain(options.run, int(options.numbers[0])))
    elif options.kind == "killed":
        kill_twice(options.run, options.numbers[0], int(options.numbers[1]))
    else:
        real_trainer(options.run).run()


if __name__ == "__main__":
    main()
