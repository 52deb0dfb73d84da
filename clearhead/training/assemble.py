"""From a run file to a training run: tokenizers, data, model, optimizer and training loop are put together here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from clearhead.busy_waiting import adapt_waiting
from clearhead.core import Transformer, build
from clearhead.data.batches.base import Batch
from clearhead.errors import InputError
from clearhead.fast.replica import refuse_to_run
from clearhead.fast.training.parts import training_tree
from clearhead.files import absent, runs_nearby
from clearhead.hf.export import save_origin
from clearhead.machine import choose_precision
from clearhead.runs.checkpoint import checkpoint_steps, clear_leftovers, saved_choices, undamaged_weights
from clearhead.runs.directory import (
    RUN_FILE,
    SPEC_FILE,
    TASK_FILE,
    RunDirectory,
    is_run_directory,
    open_run,
    split_reference,
)
from clearhead.runs.recent_weights import recent_folder, save_averaged
from clearhead.spec import Model
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.data_files import DATA_FILES, changed_files, describe_files
from clearhead.training.dry_run import Workload, faster_precision, memory_in_use
from clearhead.training.init_from import InitialModel, find_initial_model, initial_model_of_run, take_weights
from clearhead.training.kernel_cache import limit_kernel_cache
from clearhead.training.loop import Trainer
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END, SCHEDULES_WITH_WARMUP, build_schedule
from clearhead.training.optim.weight_averages import average_checkpoints
from clearhead.training.parallel.agreement import (
    check_divisible,
    check_run_is_seen,
    check_same_data,
    check_same_everywhere,
)
from clearhead.training.parallel.choice import build_engine, shares_model, work_of_one
from clearhead.training.parallel.joining import joined, own_device
from clearhead.training.parallel.processes import Place, Processes
from clearhead.training.parallel.shares import SharedBatches
from clearhead.training.preflight import TokenSide, preflight, refuse_large
from clearhead.training.progress.reports import Progress
from clearhead.training.progress.tensorboard import TensorBoardProgress
from clearhead.training.random_state import seed_everything
from clearhead.training.runfile.read import to_toml
from clearhead.training.runfile.sections import RunFile
from clearhead.training.settings import TrainResult, TrainSettings, in_steps, planned_steps
from clearhead.training.tasks.base import DataSide, TaskParts, TaskSetup, one_sided
from clearhead.training.tasks.registry import parts_of
from clearhead.training.token_counts import count_tokens
from clearhead.weights.lora import adapt, describe, load_merged

# The keys that may change when a run is resumed: its length and what it keeps, not what its next step computes.
MAY_DIFFER = (
    "train.run",
    "train.steps",
    "train.epochs",
    "train.seconds",
    "train.planned_minutes",
    "train.parallel",
    "train.activation_checkpointing",
    "train.device",
    "train.threads",
    "train.save_every",
    "train.keep",
    "train.snapshots",
    "train.snapshot_megabytes",
    "train.early_stop.patience",
    "train.tensorboard",
)

PLANNED_STEPS = "planned_steps"
NEW_TENSORS = "new_tensors"


def train_run(run_file: RunFile, *, resume: bool, progress: Progress) -> TrainResult:
    """Train what a run file describes.

    Args:
        run_file: the checked run file.
        resume: whether to continue from the newest undamaged checkpoint of its run directory.
        progress: receives the reports.

    Raises:
        InputError: the data, the sizes or the run directory cannot be used; no files remain.
        RunFailure: training failed; the last checkpoint is complete.
        Interrupted: stopped by a signal; everything is saved.
    """
    run, place = Path(run_file.train.run), Place.here()
    adapt_waiting()
    with joined(place, run, device=run_file.train.device) as processes:
        check_same_everywhere(processes, run_file)
        # torchrun starts all processes anew after one of them broke down.
        resume = processes.first_of(resume or (place.restarts > 0 and bool(checkpoint_steps(run))))
        with contextlib.ExitStack() as stack:
            directory = None
            # Without resume as well: a run that is there is then refused as such, not as one of another precision.
            precision = (saved_choices(run) or {}).get("precision") if processes.is_first else None
            if run_file.train.precision == "auto" and precision is not None:
                run_file = _with_precision(run_file, str(precision))
            if processes.is_first:
                directory = stack.enter_context(
                    open_run(run, configuration=to_toml(run_file), resume=resume, may_differ=MAY_DIFFER)
                )
                if run_file.train.tensorboard:
                    progress = TensorBoardProgress(run / "tensorboard", progress)
            own_progress = progress if processes.is_first else Progress()
            return _train(run_file, processes, directory, resume=resume, progress=own_progress)


def _train(
    run_file: RunFile, processes: Processes, directory: RunDirectory | None, *, resume: bool, progress: Progress
) -> TrainResult:
    """Train in a run directory that is open; None: the first process has opened it."""
    run, task = Path(run_file.train.run), run_file.task
    device = own_device(run_file.train.device, processes.place)
    limit_kernel_cache()
    memory_before = memory_in_use(device)
    choices = processes.first_of((saved_choices(run) or {}) if resume and processes.is_first else {})
    check_run_is_seen(processes, run)
    for change in changed_files(choices, run_file, run):
        progress.message(change)
    if resume:
        initial = initial_model_of_run(run) if task.init else None
    else:
        initial = find_initial_model(task.init, *task.languages)
    setup = TaskSetup(
        run_file=run_file,
        find_tokenizers=lambda train: _tokenizers(run_file, choices, initial, train, progress),
        initial=initial,
        progress=progress,
        device=device,
    )
    with processes.turn():
        parts = parts_of(setup)
    if processes.size > 1:
        check_divisible(parts, run_file.train.batch_tokens, processes.size)
        check_same_data(processes, parts)
    seed_everything(run_file.train.seed)
    is_sharded = shares_model(run_file, parts.spec, device, processes)
    is_trained_whole = run_file.lora is None
    refuse_large(parts.spec, device, is_trained_whole=is_trained_whole, place=processes.place, is_sharded=is_sharded)
    # Of a model that may not fit on one device the first process has the weights in main memory, and sends the parts.
    module = build(parts.spec, device=("cpu" if processes.is_first else "meta") if is_sharded else device)
    new = str(choices.get(NEW_TENSORS, "")).split()
    if initial is not None and not resume:
        if processes.is_first or not is_sharded:
            new = take_weights(module, initial, parts.record, progress)
        new = processes.first_of(new)
    if run_file.lora is not None:
        progress.message(describe(module, adapt(module, **run_file.lora.model_dump(), new=new)))
    precision = choices.get("precision")
    if precision is None:
        is_tried = processes.is_first and not is_sharded
        precision = faster_precision(module, parts.workload(), run_file.train) if is_tried else None
        precision = processes.first_of(precision) or choose_precision(run_file.train.precision, device)
    if directory is not None:
        directory.write_text(RUN_FILE, to_toml(_with_precision(run_file, precision)))
        _describe(parts, directory, initial, resume)
    tree = training_tree(module, precision, recomputes_layers=run_file.train.activation_checkpointing)
    engine = build_engine(tree, parts.loss, processes, is_sharded=is_sharded, device=device, precision=precision)
    if is_sharded:
        refuse_to_run(module, "its weights are spread over processes, and the tree that they train runs in its place")
    trainer = _trainer(setup, parts, tree, processes, precision=precision, new=new)
    trainer.directory, trainer.engine = directory, engine
    if resume:
        _warn_of_new_schedule(run_file, choices, trainer.settings, progress)
    else:
        _preflight(trainer, parts, tree, memory_before, task.init)
    return trainer.run(resume=resume)


def _with_precision(run_file: RunFile, precision: str) -> RunFile:
    """Return a run file that names the precision that "auto" turned out to be."""
    return run_file.model_copy(update={"train": run_file.train.model_copy(update={"precision": precision})})


def average_run(run: Path, last: int) -> tuple[Path, list[int]]:
    """Average the weights of a run's newest checkpoints, recent weights included.

    Args:
        run: the run directory.
        last: how many, at least 1.

    Returns:
        The file of the averaged weights, and the averaged steps in ascending order.

    Raises:
        InputError: the folder is not a run, is in use, or has fewer undamaged checkpoints.
    """
    whole, label = split_reference(str(run))
    if label is not None and is_run_directory(whole):
        raise InputError(f"{run} names one checkpoint, but the last ones of a run are averaged: name {whole}")
    if not run.exists():
        raise InputError(f"{run}: {absent(run, 'run directory', runs_nearby())}")
    if not is_run_directory(run):
        raise InputError(f"{run} is not a run directory: it has no checkpoints folder.")
    # Not snapshots: the checkpoints that are averaged are as far apart as validations.
    found = undamaged_weights(recent_folder(run), run / "checkpoints")
    found.pop(0, None)
    if last > len(found):
        kept = ", ".join(map(str, found)) or "none"
        raise InputError(
            f"{run} has {len(found)} undamaged checkpoints to average (steps: {kept}), fewer than --last {last}: "
            "average fewer, or train with a larger train.keep"
        )
    steps = list(found)[-last:]
    with open_run(run, resume=True):
        clear_leftovers(run)
        weights = average_checkpoints([load_merged(found[step]) for step in steps])
        file = save_averaged(run, weights, {"steps": steps, "valid_loss": None, "valid_score": None})
    return file, steps


def _tokenizers(
    run_file: RunFile,
    choices: Mapping[str, object],
    initial: InitialModel | None,
    train: Callable[[], TokenizerPair],
    progress: Progress,
) -> TokenizerPair:
    """Train or load the tokenizers, and check that they are those of the checkpoint."""
    section, run = run_file.tokenizer, Path(run_file.train.run)
    remembered = choices.get("tokenizer")
    if initial is not None:
        tokenizers = initial.tokenizers
    elif section.path is not None:
        tokenizers = _load_tokenizers(Path(section.path))
    else:
        if remembered is None:
            progress.message("tokenizer: training it, unless the cache has it")
        tokenizers = TokenizerPair.load(run) if remembered is not None else train()
    if remembered is not None and tokenizers.fingerprint != remembered:
        where = section.path or run_file.task.init or run
        raise InputError(
            f"the tokenizer in {where} has changed since the run in {run} began: restore it and resume, or "
            "start anew in another run directory (train.run=...)"
        )
    return tokenizers


def _load_tokenizers(path: Path) -> TokenizerPair:
    if path.is_dir():
        return TokenizerPair.load(path)
    return one_sided(Tokenizer.load(path))


def _describe(parts: TaskParts[Batch], directory: RunDirectory, initial: InitialModel | None, resume: bool) -> None:
    """Write what the weights of a new run mean; the spec of a resumed run must be the same."""
    file = directory.path / SPEC_FILE
    if resume and file.exists() and Model.from_file(file) != parts.spec:
        raise InputError(f"{file} describes a different model than the run file: restore the original run file")
    parts.tokenizers.save(directory.path)
    directory.write_text(SPEC_FILE, parts.spec.to_json())
    directory.write_text(TASK_FILE, parts.record.to_json())
    if initial is not None and initial.hf_checkpoint is not None and not resume:
        save_origin(initial.hf_checkpoint, directory.path)
    directory.seal()


def _trainer(
    setup: TaskSetup,
    parts: TaskParts[Batch],
    module: Transformer,
    processes: Processes,
    *,
    precision: Literal["fp32", "bf16"],
    new: Sequence[str],
) -> Trainer[Any]:
    """Build settings, optimizer, schedule and trainer."""
    train = setup.run_file.train
    assert train.learning_rate is not None and train.warmup is not None, "the run file fills its defaults"
    steps = planned_steps(train, parts.batches.batches_per_epoch)
    warmup = in_steps(train.warmup, steps, least=int(train.schedule in SCHEDULES_WITH_WARMUP))
    choices = {
        "tokenizer": parts.tokenizers.fingerprint,
        "score_name": parts.score_name,
        "valid_data": parts.valid_data,
        PLANNED_STEPS: steps or 0,
        DATA_FILES: describe_files(setup.run_file),
        **count_tokens(parts.batches).choices(),
    }
    if setup.run_file.lora is not None:
        choices[NEW_TENSORS] = " ".join(new)
    table = train.model_dump() | {"precision": precision, "validate_every": in_steps(train.validate_every, steps)}
    top = module.spec.decoder or module.spec.encoder
    return Trainer(
        module=module,
        optimizer=build_optimizer(
            module,
            kind=train.optimizer,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
        ),
        schedule=build_schedule(
            train.schedule,
            learning_rate=train.learning_rate,
            warmup=warmup,
            steps=steps,
            width=top.width if top is not None else None,
        ),
        batches=parts.batches if processes.size == 1 else SharedBatches(parts.batches, processes.place),
        loss=parts.loss,
        validate=parts.validate,
        settings=TrainSettings(**table, best_by=parts.best_by, score_name=parts.score_name, choices=choices),
        progress=setup.progress,
        processes=processes,
    )


def _warn_of_new_schedule(
    run_file: RunFile, choices: Mapping[str, object], settings: TrainSettings, progress: Progress
) -> None:
    """Warn that a schedule changes when a resumed run has another number of steps, and the schedule depends on it."""
    before, now = choices.get(PLANNED_STEPS), settings.choices[PLANNED_STEPS]
    train = run_file.train
    depends = train.schedule in SCHEDULES_WITH_AN_END or isinstance(train.warmup, float)
    if depends and before is not None and before != now:
        progress.message(
            f"the {train.schedule} schedule is now that of {now:,} steps instead of {before:,}, so the learning rates "
            "from here on differ from those planned before"
        )


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


def _preflight(
    trainer: Trainer[Any], parts: TaskParts[Batch], module: Transformer, memory_before: int, init: str
) -> None:
    """Check the data against the model, and report the forecast of the cost."""
    engine, place = trainer.engine, trainer.processes.place
    work: Workload[Any] = parts.workload()
    if engine is not None:
        work = work_of_one(work, engine, trainer.batches, place)
    report = preflight(
        module,
        trainer.optimizer,
        work,
        trainer.settings,
        sides=[_token_side(side, module, init) for side in parts.sides],
        memory_before=memory_before,
        place=place,
    )
    for line in report.lines():
        trainer.progress.message(line)
    trainer.validation_seconds = report.cost.validation_seconds
