"""The fourth stage: the training tree and its engine, optimizer, schedule and settings, put together to a trainer."""

from __future__ import annotations

from typing import Any, Final

from clearhead.core import Transformer
from clearhead.fast.replica import refuse_to_run
from clearhead.fast.training.parts import training_tree
from clearhead.training.data_files import DATA_FILES, describe_files
from clearhead.training.loop import Trainer
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.optim.schedules import SCHEDULES_WITH_WARMUP, Schedule, build_schedule
from clearhead.training.parallel.choice import build_engine
from clearhead.training.parallel.shares import SharedBatches
from clearhead.training.runfile.sections import Train
from clearhead.training.settings import TrainSettings, in_steps, planned_steps
from clearhead.training.stages.data import PreparedData
from clearhead.training.stages.model import NEW_TENSORS, BuiltModel
from clearhead.training.stages.opening import OpenedRun
from clearhead.training.token_counts import count_tokens

PLANNED_STEPS: Final = "planned_steps"
"""The choice of a run under which the steps of its schedule are remembered; 0: they were not known."""


def build_trainer(run: OpenedRun, data: PreparedData, model: BuiltModel) -> Trainer[Any]:
    """Put together what the training loop needs.

    Raises:
        InputError: the optimizer cannot train the model.
    """
    train, parts, processes = run.run_file.train, data.parts, run.processes
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
    return Trainer(
        module=tree,
        optimizer=build_optimizer(
            tree,
            kind=train.optimizer,
            learning_rate=_learning_rate(train),
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
        ),
        schedule=_schedule(train, tree, steps),
        batches=parts.batches if processes.size == 1 else SharedBatches(parts.batches, processes.place),
        loss=parts.loss,
        validate=parts.validate,
        settings=_settings(run, data, model, steps),
        progress=run.progress,
        directory=run.directory,
        processes=processes,
        engine=engine,
    )


def _learning_rate(train: Train) -> float:
    assert train.learning_rate is not None, "the run file fills its defaults"
    return train.learning_rate


def _schedule(train: Train, tree: Transformer, steps: int | None) -> Schedule:
    assert train.warmup is not None, "the run file fills its defaults"
    top = tree.spec.decoder or tree.spec.encoder
    return build_schedule(
        train.schedule,
        learning_rate=_learning_rate(train),
        warmup=in_steps(train.warmup, steps, least=int(train.schedule in SCHEDULES_WITH_WARMUP)),
        steps=steps,
        width=top.width if top is not None else None,
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
    resolved = {"precision": model.precision, "validate_every": in_steps(train.validate_every, steps)}
    table = train.model_dump() | resolved
    return TrainSettings(**table, best_by=parts.best_by, score_name=parts.score_name, choices=choices)
