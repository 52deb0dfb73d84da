"""Fit a recipe to data and machine: text length by the tokenizer, model size and steps by timed training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from clearhead.apps.recipes.run_file import VALIDATIONS, DataPlan, RunFileChoice, run_file_text
from clearhead.apps.recipes.survey import TextSurvey
from clearhead.base.errors import InputError, is_out_of_memory
from clearhead.base.machine import choose_device
from clearhead.base.progress import message
from clearhead.checkpoints.weights.lora import adapt
from clearhead.core import build
from clearhead.data.batches.base import Batch
from clearhead.spec.describe import count_noun
from clearhead.spec.tasks.base import Recipe, Size
from clearhead.spec.tasks.registry import find_task
from clearhead.text.pair import TokenizerPair
from clearhead.training.frozen_base import build_base, choose_base_formats
from clearhead.training.init_from import InitialModel, take_weights
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.preflight import Trial, faster_precision, measure_step_cost
from clearhead.training.progress.reports import TrainingProgress, duration
from clearhead.training.random_state import preserve_random_state, seed_everything
from clearhead.training.record import STARTUP_SECONDS, TrainSettings
from clearhead.training.runfile.read import parse_run_file
from clearhead.training.runfile.sections import RunFile
from clearhead.training.task_setup import PreparedTask, TaskSetup, prepare_task

# Factor on the longest training text, since later texts may be longer.
_SPARE = 1.25
# The largest share of the time for validations: slow validations are fewer.
_VALIDATION_SHARE = 0.15
_MEASURED_SECONDS = 2.0
# Fewer steps hardly change a model.
LEAST_STEPS = 100


@dataclass(frozen=True)
class FittedRunFile:
    """A run file that fits data and machine.

    Attributes:
        text: the text of the run file.
        steps: the number of training steps.
        seconds: the forecast time of the training on this machine.
    """

    text: str
    steps: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A model with its data and the measured time of its steps.

    Attributes:
        size: the size of the model. None means the size of a checkpoint.
        parts: the task setup with the data.
        step_seconds, step_tokens: the seconds and tokens of one step with an average batch.
        validation_seconds: the seconds of one validation.
    """

    size: Size | None
    parts: PreparedTask[Batch]
    step_seconds: float
    step_tokens: float
    validation_seconds: float


@dataclass(frozen=True)
class RunLength:
    """The length of a run.

    Attributes:
        steps: the number of training steps.
        validations: the number of validations.
        seconds: the forecast time of the whole run.
    """

    steps: int
    validations: int
    seconds: float

    @classmethod
    def fit_minutes(cls, minutes: float, *, step: float, validation: float, most: int) -> RunLength:
        """Return the length of a run that fits into a time, at most the given number of steps.

        Args:
            minutes: the minutes that training may take.
            step, validation: the seconds of one step and of one validation.
            most: the number of steps beyond which more do not help.
        """
        left = 60 * minutes - STARTUP_SECONDS
        validations = max(2, min(VALIDATIONS, math.floor(_VALIDATION_SHARE * left / validation)))
        steps = max(1, min(most, math.floor((left - validations * validation) / step)))
        return cls(steps, validations, STARTUP_SECONDS + validations * validation + steps * step)


def advise_more_minutes(length: RunLength, most: int, *, step: float) -> str:
    """Return advice on --minutes if the time is too short to learn anything, or an empty text.

    Args:
        length: the length of the run that fits into the time.
        most: the number of steps beyond which more do not help.
        step: the seconds of one step.
    """
    least = min(most, LEAST_STEPS)
    if length.steps >= least:
        return ""
    minutes = math.ceil((length.seconds + (least - length.steps) * step) / 60)
    return f"too short to learn from: {count_noun(least, 'step')} need --minutes {minutes}"


def fit_run_file(plan: DataPlan, minutes: float) -> FittedRunFile:
    """Return a run file from scratch, with a size and steps that fit the data and this machine.

    Args:
        plan: the data of the run.
        minutes: the minutes that training may take.

    Raises:
        InputError: the data cannot be used, or no model of the recipe fits into memory.
    """
    recipe = find_task(plan.task).recipe(plan.amount)
    fitting = RunFileFitter(plan, recipe)
    kind = "characters" if recipe.tokenizer == "character" else "a new vocabulary"
    message(f"preparing the text with {kind}")
    choice = fitting.with_max_length(RunFileChoice(recipe.sizes[0], recipe.max_length))
    with preserve_random_state():
        best = choose_size(recipe, lambda size: fitting.measure_candidate(replace(choice, size=size)), minutes)
        return write_run_file(plan, recipe, replace(choice, size=best.size), best, minutes)


def write_run_file(
    plan: DataPlan, recipe: Recipe, choice: RunFileChoice, candidate: Candidate, minutes: float
) -> FittedRunFile:
    """Return the run file with the chosen values, and with the steps that fit into a time.

    Args:
        plan: the data of the run.
        recipe: the recipe for the task and the amount of data.
        choice: the values of the run file, without its steps.
        candidate: the measured model.
        minutes: the minutes that training may take.
    """
    validation, per_epoch = candidate.validation_seconds, candidate.parts.batches.batches_per_epoch
    most = math.ceil(recipe.most_epochs * per_epoch)
    length = RunLength.fit_minutes(minutes, step=candidate.step_seconds, validation=validation, most=most)
    note = f"{length.steps / per_epoch:.3g} passes over the data, "
    if length.steps == most:
        note += f"about {duration(length.seconds)}: more passes would not help, more data would"
    else:
        pace = f"{duration(candidate.step_seconds)} a step and {duration(validation)} a validation on this machine"
        note += f"{minutes:g} min: {pace}"
    message(f"{count_noun(length.steps, 'step')}: {note}")
    if advice := advise_more_minutes(length, most, step=candidate.step_seconds):
        message(advice)
    planned = None if length.steps == most else minutes
    choice = replace(choice, steps=length.steps, steps_note=note, validations=length.validations, minutes=planned)
    return FittedRunFile(run_file_text(plan, recipe, choice), length.steps, length.seconds)


class RunFileFitter:
    """Builds and measures the data and the model of a run-file choice.

    Args:
        plan: the data of the run.
        recipe: the recipe for the task and the amount of data.
        initial: the checkpoint to start from. None means from scratch.
    """

    def __init__(self, plan: DataPlan, recipe: Recipe, initial: InitialModel | None = None) -> None:
        self.plan: DataPlan = plan
        self.recipe: Recipe = recipe
        self.initial: InitialModel | None = initial
        self._tokenizers: dict[str, TokenizerPair] = {}

    def parse_choice(self, choice: RunFileChoice) -> RunFile:
        """Return the run file with the chosen values, parsed."""
        return parse_run_file(run_file_text(self.plan, self.recipe, choice), "the run file")

    def prepare_task(self, choice: RunFileChoice) -> PreparedTask[Batch]:
        """Return the task setup for the chosen values, with data and spec; each tokenizer is trained once."""
        run_file = self.parse_choice(choice)

        def find(train: Callable[[], TokenizerPair]) -> TokenizerPair:
            if self.initial is not None:
                return self.initial.tokenizers
            key = run_file.tokenizer.model_dump_json()
            if key not in self._tokenizers:
                self._tokenizers[key] = train()
            return self._tokenizers[key]

        device = choose_device(run_file.train.device)
        setup = TaskSetup(
            run_file=run_file, find_tokenizers=find, initial=self.initial, progress=TrainingProgress(), device=device
        )
        return prepare_task(setup)

    def with_max_length(self, choice: RunFileChoice) -> RunFileChoice:
        """Return the chosen values with a `max_length` that fits the longest text."""
        recipe, survey = self.recipe, self.plan.survey
        if isinstance(survey, TextSurvey):
            if dict(self.plan.train).get("document") != "line":
                return choice
            tokenizer = self.prepare_task(choice).tokenizers.source
            longest = max(map(len, tokenizer.encode_batch(list(survey.longest_lines)))) + 2
        else:
            longest = max(side.longest for side in self.prepare_task(choice).sides)
        length = min(recipe.max_length, max(16, math.ceil(longest * _SPARE / 8) * 8))
        if longest < recipe.max_length:
            return replace(choice, max_length=length, length_note=f"The longest text has {longest}")
        return replace(choice, length_note=f"The longest text has {longest} or more")

    def measure_candidate(self, choice: RunFileChoice) -> Candidate:
        """Build the model for the chosen values, and measure its training steps."""
        run_file, parts = self.parse_choice(choice), self.prepare_task(choice)
        device = choose_device(run_file.train.device)
        seed_everything(run_file.train.seed)
        formats = choose_base_formats(run_file, parts.spec, self.initial, parts.record, device)
        module = build_base(parts.spec, formats, device) if formats else build(parts.spec, device=device)
        if self.initial is not None:
            new = take_weights(module, self.initial, parts.record, TrainingProgress())
            if run_file.lora is not None:
                adapt(module, **run_file.lora.model_dump(), new=new)
        train = run_file.train
        assert train.learning_rate is not None, "the run file fills its defaults"
        optimizer = build_optimizer(module, kind=train.optimizer, learning_rate=train.learning_rate)
        # A compiled run is faster; that compiling pays is known only when the run begins.
        table = train.model_dump() | {"precision": faster_precision(module, parts, train), "compile": False}
        cost = measure_step_cost(Trial(module, optimizer, parts, TrainSettings(**table)), seconds=_MEASURED_SECONDS)
        return Candidate(choice.size, parts, cost.step_seconds, parts.mean_tokens, cost.validation_seconds)


def choose_size(recipe: Recipe, candidate: Callable[[Size], Candidate], minutes: float) -> Candidate:
    """Return the largest model of a recipe that fits into memory and reads enough tokens in the given minutes.

    Args:
        recipe: the recipe with its sizes in ascending order.
        candidate: function that builds a model of a size and measures its steps.
        minutes: the minutes that training may take.

    Raises:
        InputError: even the smallest model does not fit into memory.
    """
    best: Candidate | None = None
    message("measuring training steps")
    for size in recipe.sizes:
        try:
            trial = candidate(size)
        except InputError as error:
            if best is None or not lacks_memory(error):
                raise
            message(f"{_name(size)}: does not fit into memory")
            break
        steps = max(0, int((60 * minutes - STARTUP_SECONDS) / trial.step_seconds))
        message(f"{_name(size)}: {duration(trial.step_seconds)} a step, {count_noun(steps, 'step')} in {minutes:g} min")
        if best is not None and steps * trial.step_tokens < size.least_tokens:
            break
        best = trial
    assert best is not None, "a recipe needs at least one size"
    return best


def lacks_memory(error: InputError) -> bool:
    """Return whether a measurement failed for lack of memory."""
    return isinstance(error.__cause__, RuntimeError) and is_out_of_memory(error.__cause__)


def _name(size: Size) -> str:
    return f"{count_noun(size.layers, 'layer')} of width {size.width}"
