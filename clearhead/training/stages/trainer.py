"""The last stage: a trainer of training tree, engine, optimizer, schedule and settings, and what is said of its run."""

from __future__ import annotations

from typing import Any, Final

from clearhead.core import Transformer
from clearhead.fast.replica import refuse_to_run
from clearhead.fast.training.parts import training_tree
from clearhead.training.data_files import DATA_FILES, describe_files
from clearhead.training.loop import Trainer
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END, SCHEDULES_WITH_WARMUP, build_schedule
from clearhead.training.parallel.choice import build_engine, work_of_one
from clearhead.training.parallel.shares import SharedBatches
from clearhead.training.preflight import Preflight, TokenSide, preflight
from clearhead.training.settings import TrainSettings, in_steps, planned_steps
from clearhead.training.stages.data import PreparedData
from clearhead.training.stages.model import NEW_TENSORS, BuiltModel
from clearhead.training.stages.opening import OpenedRun
from clearhead.training.task_parts import DataSide
from clearhead.training.token_counts import count_tokens

# The choice of a run under which the steps of its schedule are remembered; 0: they were not known.
PLANNED_STEPS: Final = "planned_steps"


def build_trainer(run: OpenedRun, data: PreparedData, model: BuiltModel) -> Trainer[Any]:
    """Put together what the training loop needs.

    Raises:
        InputError: the optimizer cannot train the model.
    """
    train, parts, processes = run.run_file.train, data.parts, run.processes
    assert train.learning_rate is not None and train.warmup is not None, "the run file fills its defaults"
    tree = training_tree(model.module, model.precision, recomputes_layers=train.activation_checkpointing)
    # Before the optimizer: a sharded tree has other parameters.
    engine = build_engine(
        tree, parts.loss, processes, is_sharded=model.is_sharded, device=run.device, precision=model.precision
    )
    if model.is_sharded:
        refuse_to_run(
            model.module, "its weights are spread over processes, and the tree that they train runs in its place"
        )
    steps = planned_steps(train, parts.batches.batches_per_epoch)
    top = tree.spec.decoder or tree.spec.encoder
    return Trainer(
        module=tree,
        optimizer=build_optimizer(
            tree,
            kind=train.optimizer,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
        ),
        schedule=build_schedule(
            train.schedule,
            learning_rate=train.learning_rate,
            warmup=in_steps(train.warmup, steps, least=int(train.schedule in SCHEDULES_WITH_WARMUP)),
            steps=steps,
            width=top.width if top is not None else None,
        ),
        batches=parts.batches if processes.size == 1 else SharedBatches(parts.batches, processes.this),
        loss=parts.loss,
        validate=parts.validate,
        settings=_settings(run, data, model, steps),
        progress=run.progress,
        directory=run.directory,
        processes=processes,
        engine=engine,
    )


def _settings(run: OpenedRun, data: PreparedData, model: BuiltModel, steps: int | None) -> TrainSettings:
    """Return the [train] table with what is resolved, and the choices that every checkpoint remembers."""
    parts, train = data.parts, run.run_file.train
    choices = {
        "tokenizer": parts.tokenizers.fingerprint,
        "score_name": parts.score_name,
        "valid_data": parts.valid_data,
        PLANNED_STEPS: steps or 0,
        DATA_FILES: describe_files(run.run_file),
        **count_tokens(parts.batches).choices(),
    }
    if run.run_file.lora is not None:
        choices[NEW_TENSORS] = " ".join(model.new)
    table = train.model_dump()
    table |= {"precision": model.precision, "validate_every": in_steps(train.validate_every, steps)}
    return TrainSettings(**table, best_by=parts.best_by, score_name=parts.score_name, choices=choices)


def forecast(run: OpenedRun, data: PreparedData, model: BuiltModel, trainer: Trainer[Any]) -> Preflight:
    """Check the data of a new run against the model, and report and return the forecast of its cost.

    Raises:
        InputError: ids, lengths, memory or disk do not suffice, in one report.
    """
    work, init = data.parts.workload(), run.run_file.task.init
    if trainer.engine is not None:
        work = work_of_one(work, trainer.engine, trainer.batches, run.processes.this)
    report = preflight(
        trainer.module,
        trainer.optimizer,
        work,
        trainer.settings,
        sides=[_token_side(side, model.module, init) for side in data.parts.sides],
        memory_before=run.memory_before,
        process=run.processes.this,
    )
    for line in report.lines():
        run.progress.message(line)
    return report


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
