"""Equal budgets of sweeps: changes that give all runs equal steps, tokens, seconds or parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from clearhead.apps.sweeps.variations import SEED, Configuration, Equal, describe_run
from clearhead.base.errors import InputError
from clearhead.base.machine import choose_device
from clearhead.base.printing import num_parameters
from clearhead.base.progress import message
from clearhead.core import build
from clearhead.data.batches.base import Batch
from clearhead.spec import Attention, walk
from clearhead.text.pair import TokenizerPair
from clearhead.training.assemble import load_tokenizers
from clearhead.training.init_from import find_initial_model
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.record import planned_steps
from clearhead.training.runfile.sections import RunFile, Train
from clearhead.training.task_setup import PreparedTask, TaskSetup, prepare_task

LENGTHS: Final = ("train.steps", "train.epochs", "train.seconds")
# Prefixes of the keys that change the number of tokens per step.
_TOKEN_KEYS: Final = ("task.", "data.", "tokenizer.", "train.batch_tokens", "train.accumulate")
_MODEL_KEYS: Final = ("model.family", "model.preset", "model.spec")
_FIXED_KEYS: Final = {
    "train.run": "each run gets a directory inside it",
    "task.kind": "only runs of one task can be compared",
}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, before its budget is known.

    Attributes:
        varied: the varied keys and values.
        run_file: the run file with these values.
        reread: function that parses the run file with further changes, given as texts `table.key=value`.
    """

    varied: Configuration
    run_file: RunFile
    reread: Callable[[Sequence[str]], RunFile]


def check_budget(keys: Collection[str], runs: Sequence[PlannedRun], equal: Equal) -> None:
    """Refuse a sweep whose runs cannot have an equal budget, before any data is read.

    Args:
        keys: the varied keys.
        runs: the runs of the sweep.
        equal: the budget that is equal for all runs.

    Raises:
        InputError: the runs cannot have this budget; the message gives the first reason.
    """
    for key, reason in _FIXED_KEYS.items():
        if key in keys:
            raise InputError(f"{key} cannot vary in a sweep, since {reason}")
    lengths = [key for key in LENGTHS if key in keys]
    if lengths:
        raise InputError(
            f"{lengths[0]} cannot vary in a sweep: all runs share one budget (equal {equal}); set it once, as "
            f"{lengths[0]}=VALUE"
        )
    train = runs[0].run_file.train
    has_steps = train.steps is not None or (train.epochs is not None and equal != "steps")
    if equal == "seconds" and train.seconds is None:
        raise InputError("equal seconds need the time after which each run ends: set it, such as train.seconds=600")
    if equal != "seconds" and not has_steps:
        raise InputError(f"equal {equal} need the number of steps: set it, such as train.steps=1000")
    if equal != "seconds" and train.seconds is not None:
        raise InputError(f"train.seconds may end runs early, so that {equal} are not equal: remove it")
    if equal == "parameters":
        _check_widths(keys, runs)


def _check_widths(keys: Collection[str], runs: Sequence[PlannedRun]) -> None:
    if "model.width" in keys:
        raise InputError("model.width cannot vary at equal parameters: the budget chooses the width, so remove the key")
    for run in runs:
        if run.run_file.task.init or run.run_file.model.spec is not None:
            fixed_key = "task.init" if run.run_file.task.init else "model.spec"
            raise InputError(f"equal parameters choose model.width, but {fixed_key} fixes the whole model: remove it")


def budget_of(keys: Collection[str], runs: Sequence[PlannedRun], equal: Equal) -> list[list[str]]:
    """Return the changes to each run file that make the budgets equal, as texts `table.key=value`; the first has none.

    Args:
        keys: the varied keys.
        runs: the runs of the sweep.
        equal: the budget that is equal for all runs.

    Raises:
        InputError: the data cannot be used.
    """
    if equal == "parameters":
        return _share_between_seeds(runs, _WidthChooser(runs[0]).change)
    if equal == "tokens" and any(key.startswith((*_TOKEN_KEYS, *_MODEL_KEYS)) for key in keys):
        return _share_between_seeds(runs, _StepChooser(runs[0]).change)
    return [[] for _ in runs]


def _share_between_seeds(runs: Sequence[PlannedRun], change: Callable[[PlannedRun], list[str]]) -> list[list[str]]:
    """Return the run-file changes of each run; runs that differ only in the seed share one result of `change`."""
    known: list[tuple[Configuration, list[str]]] = [(_without_seed(runs[0]), [])]
    changes = []
    for run in runs:
        varied = _without_seed(run)
        texts = next((texts for other, texts in known if other == varied), None)
        if texts is None:
            texts = change(run)
            known.append((varied, texts))
            if texts:
                message(f"{describe_run(varied)}: {' '.join(texts)}")
        changes.append(texts)
    return changes


def _without_seed(run: PlannedRun) -> Configuration:
    return {key: value for key, value in run.varied.items() if key != SEED}


def prepare_run(run_file: RunFile) -> PreparedTask[Batch]:
    """Prepare the data of a run without a run directory; the cache keeps it for the training.

    Raises:
        InputError: the data, the tokenizers or the sizes cannot be used.
    """
    task, path = run_file.task, run_file.tokenizer.path
    initial = find_initial_model(task.init, *task.languages)

    def tokenizers(train: Callable[[], TokenizerPair]) -> TokenizerPair:
        if initial is not None:
            return initial.tokenizers
        return train() if path is None else load_tokenizers(Path(path))

    setup = TaskSetup(run_file, tokenizers, initial, TrainingProgress(), choose_device(run_file.train.device))
    return prepare_task(setup)


class _StepChooser:
    """Chooses the steps of a run, so that it reads as many tokens as the first run of the sweep."""

    def __init__(self, first: PlannedRun) -> None:
        self.steps, self.tokens = self._count_work(first)

    def _count_work(self, run: PlannedRun) -> tuple[int, float]:
        """Return the number of training steps that a run file asks for, and the mean tokens of one step."""
        parts, train = prepare_run(run.run_file), run.run_file.train
        steps = planned_steps(train, parts.batches.batches_per_epoch)
        assert steps is not None, "a budget of tokens has steps or epochs"
        return steps, parts.mean_tokens * train.accumulate

    def change(self, run: PlannedRun) -> list[str]:
        """Return the run-file changes, such as train.steps=500, that give a run the tokens of the first run."""
        before, tokens = self._count_work(run)
        steps = max(1, round(self.steps * self.tokens / tokens))
        return (
            [] if steps == before else [f"train.steps={steps}", *_scale_step_keys(run.run_file.train, steps / before)]
        )


def _scale_step_keys(train: Train, ratio: float) -> list[str]:
    """Return the run-file changes that scale warmup and validate_every by a ratio, if they are counted in steps."""
    values = {"warmup": train.warmup, "validate_every": train.validate_every}
    return [
        f"train.{key}={max(1, round(value * ratio))}"
        for key, value in values.items()
        if isinstance(value, int) and value
    ]


class _WidthChooser:
    """Chooses the width of a run, so that it has as many parameters as the first run of the sweep."""

    def __init__(self, first: PlannedRun) -> None:
        self.parameters = self._parameters(first, [])

    def _parameters(self, run: PlannedRun, changes: Sequence[str]) -> int:
        spec = prepare_run(run.reread(changes)).spec
        return num_parameters(build(spec, device="meta"))

    def change(self, run: PlannedRun) -> list[str]:
        """Return the run-file change, such as model.width=256, that gives a run the parameters of the first run."""
        spec = prepare_run(run.run_file).spec
        stack = spec.decoder or spec.encoder
        assert stack is not None, "a model has a stack"
        heads = max(node.num_heads for _, node in walk(spec) if isinstance(node, Attention))
        # Rotary and sinusoidal positions need heads of an even size.
        grain = 2 * heads
        widths = [max(grain, stack.width // grain * grain) + step * grain for step in range(3)]
        counts = [self._parameters(run, [f"model.width={width}"]) for width in widths]
        # The parameter count is a quadratic polynomial in the width, determined by three values.
        curve = np.polynomial.Polynomial.fit(widths, counts, 2)
        candidates = np.arange(grain, 8 * widths[-1], grain)
        width = int(candidates[np.abs(curve(candidates) - self.parameters).argmin()])
        return [] if width == stack.width else [f"model.width={width}"]
