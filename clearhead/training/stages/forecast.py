"""The last stage before the first step: what the run costs, or what is different since it began."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clearhead.core import Transformer
from clearhead.training.loop import Trainer
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END
from clearhead.training.parallel.choice import work_of_one
from clearhead.training.preflight import TokenSide, preflight
from clearhead.training.stages.data import PreparedData
from clearhead.training.stages.model import BuiltModel
from clearhead.training.stages.opening import OpenedRun
from clearhead.training.stages.trainer import PLANNED_STEPS
from clearhead.training.tasks.base import DataSide


def forecast(run: OpenedRun, data: PreparedData, model: BuiltModel, trainer: Trainer[Any]) -> Trainer[Any]:
    """Check the data of a new run against the model, and report the forecast of its cost.

    Returns:
        the trainer, which knows what a validation costs.

    Raises:
        InputError: ids, lengths, memory or disk do not suffice, in one report.
    """
    work, init = data.parts.workload(), run.run_file.task.init
    if trainer.engine is not None:
        work = work_of_one(work, trainer.engine, trainer.batches, run.processes.place)
    report = preflight(
        trainer.module,
        trainer.optimizer,
        work,
        trainer.settings,
        sides=[_token_side(side, model.module, init) for side in data.parts.sides],
        memory_before=run.memory_before,
        place=run.processes.place,
    )
    for line in report.lines():
        run.progress.message(line)
    return replace(trainer, validation_seconds=report.cost.validation_seconds)


def _token_side(side: DataSide, module: Transformer, init: str) -> TokenSide:
    return TokenSide(
        name=side.name,
        largest_id=side.largest_id,
        vocabulary_rows=module.num_target_ids if side.name == "target" else module.num_source_ids,
        longest=side.longest,
        max_positions=module.max_positions,
        special_ids={role: getattr(side.tokenizer, f"{role}_id") for role in ("pad", "bos", "eos")},
        init=init,
    )


def warn_of_new_schedule(run: OpenedRun, trainer: Trainer[Any]) -> None:
    """Warn that the schedule of a resumed run changes: it depends on the number of steps, and that is another one."""
    train, before, now = run.run_file.train, run.choices.get(PLANNED_STEPS), trainer.settings.choices[PLANNED_STEPS]
    depends = train.schedule in SCHEDULES_WITH_AN_END or isinstance(train.warmup, float)
    if depends and before is not None and before != now:
        run.progress.message(
            f"the {train.schedule} schedule is now that of {now:,} steps instead of {before:,}, so the learning rates "
            "from here on differ from those planned before"
        )
