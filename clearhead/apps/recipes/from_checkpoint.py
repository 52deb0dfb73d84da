"""Write run files that fine-tune a checkpoint: all weights, or low-rank matrices if memory or time is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clearhead.apps.recipes.fit import FittedRunFile, RunFileFitter, lacks_memory, write_run_file
from clearhead.apps.recipes.run_file import DataPlan, RunFileChoice, StartCheckpoint
from clearhead.apps.recipes.survey import TextSurvey
from clearhead.base.errors import InputError
from clearhead.base.machine import free_memory
from clearhead.base.printing import human_bytes, num_parameters
from clearhead.base.progress import message
from clearhead.core import build
from clearhead.spec.cost import TRAINING_BYTES
from clearhead.spec.tasks.base import Architecture, Recipe
from clearhead.spec.tasks.registry import find_task
from clearhead.training.init_from import InitialModel, find_initial_model
from clearhead.training.progress.reports import duration
from clearhead.training.random_state import preserve_random_state
from clearhead.training.record import STARTUP_SECONDS

# Memory with activations, relative to weights, gradients and moments alone.
_ACTIVATIONS = 1.5
_LONGEST, _BLOCK = 512, 256
# The least speedup at which low-rank matrices are chosen to save time.
_FASTER = 1.1
LORA_RANK = 8
LORA_RATE = 2e-4
# The learning rate for training all weights, by the largest number of parameters it is for.
_RATES: tuple[tuple[int | None, float], ...] = (
    (5_000_000, 5e-4),
    (60_000_000, 5e-5),
    (200_000_000, 3e-5),
    (None, 2e-5),
)
# The most passes over the data, by the largest number of examples or characters it is for.
_PASSES: tuple[tuple[int | None, int], ...] = ((1_500, 10), (100_000, 4), (None, 3))


@dataclass(frozen=True)
class FineTuneMode:
    """A measured way to fine-tune a checkpoint: all weights or low-rank matrices.

    Attributes:
        step_seconds: the seconds of one training step.
        steps_per_epoch: the number of steps in one pass over the data.
        write: function that returns the run file.
    """

    step_seconds: float
    steps_per_epoch: int
    write: Callable[[], FittedRunFile]


def fit_to_checkpoint(plan: DataPlan, reference: str, minutes: float) -> FittedRunFile:
    """Return the run file that fine-tunes a checkpoint.

    Args:
        plan: the data of the run.
        reference: the reference of the checkpoint.
        minutes: the minutes that training may take.

    Raises:
        InputError: the checkpoint does not exist or does not suit the task.
    """
    initial = find_initial_model(reference, None, None)
    assert initial is not None, "the reference must not be empty"
    _check_family(initial, plan.task, reference)
    module = build(initial.spec, device="meta")
    count = num_parameters(module)
    message(f"{reference}: {count:,} parameters")
    saved_as = "" if initial.hf_checkpoint is None else str(initial.hf_checkpoint.config.get("model_type", ""))
    most = _BLOCK if isinstance(plan.survey, TextSurvey) else _LONGEST
    most = min(most, initial.spec.position_limit or most)

    def try_rank(rank: int | None, why: str) -> FineTuneMode:
        recipe = recipe_for_checkpoint(
            plan.task, plan.amount, num_parameters=count, max_length=most, is_low_rank=rank is not None
        )
        fitting = RunFileFitter(plan, recipe, initial)
        choice = fitting.with_max_length(
            RunFileChoice(None, most, start=StartCheckpoint(reference, rank, why, saved_as))
        )
        candidate = fitting.measure_candidate(choice)
        what = "all weights" if rank is None else f"matrices of rank {rank}"
        message(f"training {what}: {duration(candidate.step_seconds)} a step")
        return FineTuneMode(
            candidate.step_seconds,
            candidate.parts.batches.batches_per_epoch,
            lambda: write_run_file(plan, recipe, choice, candidate, minutes),
        )

    with preserve_random_state():
        return choose_mode(try_rank, count, minutes).write()


def _check_family(initial: InitialModel, task: str, reference: str) -> None:
    families = find_task(task).families
    if initial.spec.family not in families:
        raise InputError(
            f"--init: {reference} is a model with {' and '.join(initial.spec.stacks)}, but the task '{task}' needs the "
            f"family {' or '.join(families)}: name another checkpoint, or leave --init out"
        )


def choose_mode(tried: Callable[[int | None, str], FineTuneMode], count: int, minutes: float) -> FineTuneMode:
    """Choose to train all weights, or low-rank matrices if memory or time is too short for all weights.

    Args:
        tried: function that builds and measures one mode, given the rank (None means all weights) and the reason.
        count: the number of parameters of the checkpoint.
        minutes: the minutes that training may take.
    """
    needed, free = int(_ACTIVATIONS * TRAINING_BYTES * count), free_memory()
    too_large = f"all weights need about {human_bytes(needed)} of memory, and {human_bytes(free)} is free"
    if needed > free:
        return tried(LORA_RANK, too_large)
    try:
        whole = tried(None, "")
    except InputError as error:
        if not lacks_memory(error):
            raise
        return tried(LORA_RANK, too_large)
    passes = (60 * minutes - STARTUP_SECONDS) / whole.step_seconds / whole.steps_per_epoch
    if passes >= 1:
        return whole
    low_rank = tried(LORA_RANK, f"all weights would read only {passes:.2g} of the data in {minutes:g} min")
    return low_rank if low_rank.step_seconds * _FASTER < whole.step_seconds else whole


def recipe_for_checkpoint(task: str, amount: int, *, num_parameters: int, max_length: int, is_low_rank: bool) -> Recipe:
    """Return the recipe for fine-tuning a checkpoint, with its model and tokenizer.

    Args:
        task: the kind of the task.
        amount: the number of texts, pairs or sentences, or of characters of running text.
        num_parameters: the number of parameters of the checkpoint.
        max_length: the maximum number of tokens of a text, at most the positions of the checkpoint.
        is_low_rank: True if only low-rank matrices are trained (LoRA).
    """
    scratch = find_task(task).recipe(amount)
    rate = next(rate for most, rate in _RATES if most is None or num_parameters <= most)
    copied_settings = {
        key: scratch.train[key] for key in ("metric", "bleu_sentences", "batch_tokens") if key in scratch.train
    }
    train = {
        **copied_settings, "optimizer": "adamw", "learning_rate": LORA_RATE if is_low_rank else rate,
        "weight_decay": 0.01, "schedule": "linear", "warmup": 0.06, "clip": 1.0,
    }  # fmt: skip
    return Recipe(
        None, "", 0, max_length, (), Architecture({}), train,
        most_epochs=next(passes for most, passes in _PASSES if most is None or amount <= most),
        # The checkpoint defines the pooling.
        task={key: value for key, value in scratch.task.items() if key != "pool"},
    )  # fmt: skip
