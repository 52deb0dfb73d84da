"""Prepare a training from its run file: open the run, prepare the data, build the model and its trainer.

The functions run in this order; each returns an object that contains the result of the function before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from clearhead.base.errors import InputError
from clearhead.base.machine import choose_precision, needs_check
from clearhead.checkpoints.reference import SPEC_FILE
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps, read_choices
from clearhead.checkpoints.runs.directory import JOB_FILE, RUN_FILE, TASK_FILE, RunDirectory, open_run, read_job
from clearhead.checkpoints.weights.lora import adapt, describe_adaptation
from clearhead.core import Transformer, build
from clearhead.data.batches.base import Batch, count_tokens
from clearhead.fast.busy_waiting import adapt_waiting
from clearhead.fast.replica import refuse_to_run, use_eager
from clearhead.fast.stored import StorageFormat
from clearhead.fast.training.tree import training_tree
from clearhead.spec import Model
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.data_files import DATA_FILES, compare_files, describe_files
from clearhead.training.frozen_base import build_base, choose_base_formats, formats_from_text, formats_to_text
from clearhead.training.init_from import InitialModel, find_initial_model, load_resumed_model, take_weights
from clearhead.training.loop import Trainer
from clearhead.training.memory import limit_kernel_cache, memory_in_use
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END, SCHEDULES_WITH_WARMUP, build_schedule
from clearhead.training.parallel.agreement import (
    build_engine,
    check_divisible,
    check_first_has_run,
    check_same_data,
    check_same_everywhere,
    copy_description,
    find_ranks_without_folder,
    rank_workload,
    refuse_sharing,
    shares_model,
)
from clearhead.training.parallel.engines import RankBatches
from clearhead.training.parallel.processes import Processes, choose_process_device, join_processes
from clearhead.training.parallel.world import Process
from clearhead.training.preflight import Preflight, Trial, Workload, faster_precision, preflight, refuse_large
from clearhead.training.progress.console import progress_for
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.progress.tracker import TrackedProgress
from clearhead.training.random_state import seed_everything
from clearhead.training.record import RunResult, TrainSettings, in_steps, planned_steps
from clearhead.training.runfile.read import to_toml
from clearhead.training.runfile.sections import RunFile
from clearhead.training.task_setup import PreparedTask, TaskSetup, one_sided, prepare_task

# The keys that may change when a run is resumed: they do not affect what the next step computes.
_MAY_DIFFER = """
    run steps epochs seconds planned_minutes parallel timeout activation_checkpointing device threads
    save_every keep snapshots snapshot_megabytes early_stop.patience tracker
"""
# The keys of [train] whose "auto" a run replaces by its choice, which it stores.
CHOICES: Final = ("precision", "compile")
MAY_DIFFER = ["model.parts", *(f"train.{key}" for key in _MAY_DIFFER.split())]  # the spec has a digest of the file


@dataclass(frozen=True)
class OpenedRun:
    """A training run with its locked run directory, its processes and its device.

    Attributes:
        path: the run directory.
        run_file: the checked run file. In the first process of a resumed run, "auto" of `CHOICES` is replaced by the
            choice of the run.
        is_resumed: True if the run continues from a checkpoint.
        choices: the automatic choices, such as the precision, that a resumed run has stored; empty for a new run.
        processes: the processes that train together.
        directory: the locked run directory. None in all processes except the first.
        progress: the display that receives all reports; only the first process shows them.
        device: the device of this process.
        memory_before: the memory use of this process before it read the data, in bytes.
        eager_reason: the reason why attention must use the eager kernel on this device; empty if it need not.
        description: the folder with the files that describe the model of a resumed run.
        ranks_without_folder: the ranks of processes that do not see the run directory, because their machine has its
            own disk.
    """

    path: Path
    run_file: RunFile
    is_resumed: bool
    choices: Mapping[str, Any]
    processes: Processes
    directory: RunDirectory | None
    progress: TrainingProgress
    device: torch.device
    memory_before: int
    eager_reason: str
    description: Path
    ranks_without_folder: Sequence[int]


@contextlib.contextmanager
def open_training(run_file: RunFile, *, resume: bool, progress: TrainingProgress) -> Iterator[OpenedRun]:
    """Return a context manager that joins the other processes and holds the run directory open.

    Args:
        run_file: the checked run file.
        resume: True to continue from the newest undamaged checkpoint.
        progress: the display that receives all reports.

    Raises:
        InputError: the run directory or the device cannot be used, processes differ, or the training data has changed.
    """
    run, process = Path(run_file.train.run), Process.here()
    adapt_waiting()
    train = run_file.train
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(
            join_processes(process, run, device=train.device, timeout=train.timeout, notify=progress.message)
        )
        if processes.size > 1:
            check_same_everywhere(processes, run_file)
        resume = _decide_to_resume(processes, run, resume=resume)
        directory, saved = None, dict[str, Any]()
        if processes.is_first:
            # Read without resume too: an existing run is then refused as such, not because of another precision.
            saved = read_choices(run) or {}
            run_file = _take_choices(run_file, saved)
            # The choices are not known without an undamaged checkpoint; resuming is then refused later.
            may_differ = [*MAY_DIFFER, *(f"train.{key}" for key in CHOICES if key not in saved)]
            directory = stack.enter_context(
                open_run(run, configuration=to_toml(run_file), resume=resume, may_differ=may_differ)
            )
            if processes.job:
                directory.write_text(JOB_FILE, processes.job)
            if run_file.train.tracker != "none":
                config = _tracker_config(run_file)
                progress = TrackedProgress(run_file.train.tracker, run, config, progress, is_resumed=resume)
        else:
            progress = TrainingProgress()
        device = choose_process_device(run_file.train.device, process)
        eager_reason = _find_eager_reason(device, run_file.train.precision)
        limit_kernel_cache()
        memory_before = memory_in_use(device)
        choices = processes.broadcast(saved if resume else {})
        ranks_without_folder = find_ranks_without_folder(processes, run) if processes.size > 1 else []
        description = stack.enter_context(copy_description(processes, run)) if resume and ranks_without_folder else run
        for change in compare_files(choices, run_file, run):
            progress.message(change)
        yield OpenedRun(
            run, run_file, resume, choices, processes, directory, progress, device, memory_before, eager_reason,
            description, ranks_without_folder,
        )  # fmt: skip


def _find_eager_reason(device: torch.device, precision: str) -> str:
    """Return the reason why attention must use the eager kernel on a device; empty if it need not."""
    if not needs_check(device):
        return ""
    from clearhead.fast.device_check import find_eager_reason  # not needed on most machines

    return find_eager_reason(device, choose_precision(precision, device))


def _decide_to_resume(processes: Processes, run: Path, *, resume: bool) -> bool:
    """Return whether the run is resumed: on request, or if torchrun restarts the job that began the run.

    Raises:
        InputError: the first process has no checkpoint, but another process has one.
    """
    is_restart = processes.job != "" and read_job(run) == processes.job
    resume = processes.broadcast(resume or (is_restart and bool(checkpoint_steps(run))))
    if resume and processes.size > 1:
        check_first_has_run(processes, run)
    return resume


def _tracker_config(run_file: RunFile) -> dict[str, object]:
    """Return the settings that a tracker (such as wandb) logs for a run, without data and paths."""
    tables = run_file.model_dump(mode="json", include={"tokenizer", "model", "lora", "train"}, exclude_none=True)
    for table, key in (("tokenizer", "path"), ("model", "spec"), ("model", "parts"), ("train", "run")):
        tables[table].pop(key, None)
    return {"task": run_file.task.kind, **tables}


def _take_choices(run_file: RunFile, saved: Mapping[str, Any]) -> RunFile:
    """Return a copy of a run file in which "auto" of `CHOICES` is replaced by the choice that the run has stored."""
    unchosen = [key for key in CHOICES if key in saved and getattr(run_file.train, key) == "auto"]
    return with_choices(run_file, **{key: saved[key] for key in unchosen})


def with_choices(run_file: RunFile, **choices: str | bool) -> RunFile:
    """Return a copy of a run file with the choices of its run in [train], such as its precision."""
    return run_file.model_copy(update={"train": run_file.train.model_copy(update=choices)})


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of a run, and its prepared task.

    Attributes:
        run: the open run.
        initial: the trained model from which the run starts. None means from scratch.
        parts: the prepared task, with tokenizers, batches, loss, validation and spec.
    """

    run: OpenedRun
    initial: InitialModel | None
    parts: PreparedTask[Batch]


def prepare_data(run: OpenedRun) -> PreparedData:
    """Find or train the tokenizers, and prepare the data of a run.

    Raises:
        InputError: the data, the tokenizers, the initial model or the sizes cannot be used, or processes differ.
    """
    task = run.run_file.task
    if run.is_resumed:
        initial = load_resumed_model(run.description) if task.init else None
    else:
        initial = find_initial_model(task.init, *task.languages) if task.init else None
    setup = TaskSetup(run.run_file, partial(_find_tokenizers, run, initial), initial, run.progress, run.device)
    with run.processes.turn():
        parts = prepare_task(setup)
    if run.processes.size > 1:
        check_divisible(parts, run.run_file.train.batch_tokens, run.processes.size)
        check_same_data(run.processes, parts)
    return PreparedData(run, initial, parts)


def _find_tokenizers(run: OpenedRun, initial: InitialModel | None, train: Callable[[], TokenizerPair]) -> TokenizerPair:
    """Load or train the tokenizers of a run; refuse tokenizers that differ from those of a resumed run."""
    path, remembered = run.run_file.tokenizer.path, run.choices.get("tokenizer")
    if initial is not None:
        tokenizers = initial.tokenizers
    elif path is not None:
        tokenizers = load_tokenizers(Path(path))
    elif remembered is not None:
        tokenizers = TokenizerPair.load(run.description)
    else:
        run.progress.message("tokenizer: loading it from the cache, or training it")
        tokenizers = train()
    if remembered is not None and tokenizers.fingerprint != remembered:
        where = path or run.run_file.task.init or run.path
        raise InputError(
            f"the tokenizer in {where} has changed since the run in {run.path} began: restore it and resume, or "
            "start anew in another run directory (train.run=...)"
        )
    return tokenizers


def load_tokenizers(path: Path) -> TokenizerPair:
    """Load the tokenizers that a run file names: a file, or a folder with one or two tokenizers.

    Raises:
        InputError: there is no tokenizer at this path.
    """
    return TokenizerPair.load(path) if path.is_dir() else one_sided(Tokenizer.load(path))


# Key of the choice with the addresses of the tensors that LoRA trains whole.
NEW_TENSORS: Final = "new_tensors"
# Key of the choice with the frozen matrices that LoRA keeps in 16 bits.
BASE_FORMATS: Final = "base_formats"


@dataclass(frozen=True)
class BuiltModel:
    """The model of a run with its first weights.

    Attributes:
        data: the prepared data of the run.
        module: the plain module.
        is_sharded: True if the weights are sharded over the processes.
        new: the addresses of the tensors that the initial model does not have.
        base_formats: the formats of the frozen matrices in 16 bits, by the addresses of their modules.
        precision: the precision of the computation.
        compiles: True if the training is compiled.
    """

    data: PreparedData
    module: Transformer
    is_sharded: bool
    new: Sequence[str]
    base_formats: Mapping[str, StorageFormat]
    precision: Literal["fp32", "bf16"]
    compiles: bool


def build_model(data: PreparedData) -> BuiltModel:
    """Build the model from the seed, copy weights into it, and choose the precision.

    Raises:
        InputError: the model or a batch does not fit into memory, or a weight of the initial model is missing.
    """
    run, spec = data.run, data.parts.spec
    run_file, process = run.run_file, run.processes.this
    seed_everything(run_file.train.seed)
    formats = _choose_base_formats(data)
    is_sharded = process.size > 1 and shares_model(run_file, spec, run.device, run.processes, formats)
    if is_sharded:
        refuse_sharing(run.ranks_without_folder, run.path)
        formats = {}  # shards of one group have one dtype
    refuse_large(
        spec,
        run.device,
        is_trained_whole=run_file.lora is None,
        formats=formats,
        process=process,
        is_sharded=is_sharded,
    )
    # A sharded model may not fit on one device: the first process builds it in main memory and sends each shard.
    before_sharing = torch.device("cpu" if run.processes.is_first else "meta")
    device = before_sharing if is_sharded else run.device
    module = build_base(spec, formats, device) if formats else build(spec, device=device)
    if run.eager_reason:
        use_eager(module, run.eager_reason)
    new = _take_weights(data, module, is_sharded=is_sharded)
    if run_file.lora is not None:
        run.progress.message(describe_adaptation(module, adapt(module, **run_file.lora.model_dump(), new=new)))
    precision = _choose_precision(data, module, is_sharded=is_sharded)
    compiles = _choose_compile(data, module, precision, is_sharded=is_sharded)
    return BuiltModel(data, module, is_sharded, new, formats, precision, compiles)


def _choose_base_formats(data: PreparedData) -> dict[str, StorageFormat]:
    """Return the 16-bit formats of the frozen matrices of a LoRA run; a resumed run keeps its formats."""
    run = data.run
    if run.run_file.lora is None:
        return {}
    if run.is_resumed:
        return formats_from_text(str(run.choices.get(BASE_FORMATS, "")))
    formats: dict[str, StorageFormat] = {}
    if run.processes.is_first:
        formats = choose_base_formats(run.run_file, data.parts.spec, data.initial, data.parts.record, run.device)
    return run.processes.broadcast(formats)


def _take_weights(data: PreparedData, module: Transformer, *, is_sharded: bool) -> list[str]:
    """Copy the weights of the initial model, and return the addresses of the tensors that it does not have."""
    run = data.run
    if data.initial is None or run.is_resumed:
        return str(run.choices.get(NEW_TENSORS, "")).split()
    new: list[str] = []
    if run.processes.is_first or not is_sharded:
        new = take_weights(module, data.initial, data.parts.record, run.progress)
    return run.processes.broadcast(new)


def _choose_precision(data: PreparedData, module: Transformer, *, is_sharded: bool) -> Literal["fp32", "bf16"]:
    """Return the precision of a resumed run, or the faster precision for a new run."""
    run = data.run
    remembered: Literal["fp32", "bf16"] | None = run.choices.get("precision")
    if remembered is not None:
        return remembered
    train = run.run_file.train
    is_tried = run.processes.is_first and not is_sharded
    tried = faster_precision(module, data.parts, train, run.progress) if is_tried else None
    return run.processes.broadcast(tried) or choose_precision(train.precision, run.device)


def _choose_compile(data: PreparedData, module: Transformer, precision: str, *, is_sharded: bool) -> bool:
    """Return whether the training is compiled: the choice of a resumed run, or that of the run file or of a trial.

    Raises:
        InputError: the run must be compiled, and this machine or the model cannot.
    """
    run = data.run
    train = run.run_file.train
    choice = run.choices.get("compile", False) if run.is_resumed else train.compile
    if choice is False or (choice == "auto" and run.device.type == "cpu"):
        return False
    from clearhead.training.compilation import CompileChoice  # imports PyTorch's compiler

    compile_choice = CompileChoice(module, data.parts, train, precision, run.device, run.progress, run.processes.this)
    if choice is True:
        compile_choice.check(is_resumed=run.is_resumed)
        return True
    return run.processes.broadcast(run.processes.is_first and compile_choice.decide(is_sharded=is_sharded))


def describe_model(model: BuiltModel) -> None:
    """Write the resolved run file, the tokenizers, the spec and the task record into the run directory.

    Raises:
        InputError: a resumed run has another spec.
    """
    data, run = model.data, model.data.run
    directory, parts = run.directory, data.parts
    if directory is None:
        return
    directory.write_text(
        RUN_FILE, to_toml(with_choices(run.run_file, precision=model.precision, compile=model.compiles))
    )
    file = directory.path / SPEC_FILE
    if run.is_resumed and file.exists() and Model.from_file(file) != parts.spec:
        raise InputError(f"{file} describes a different model than the run file: restore the original run file")
    parts.tokenizers.save(directory.path)
    directory.write_text(SPEC_FILE, parts.spec.to_json())
    directory.write_text(TASK_FILE, parts.record.to_json())
    if data.initial is not None and data.initial.hf_checkpoint is not None and not run.is_resumed:
        data.initial.hf_checkpoint.save_origin(directory.path)
    directory.seal()


# Key of the choice with the number of steps of the schedule; 0 if it was not known.
PLANNED_STEPS: Final = "planned_steps"


def build_trainer(model: BuiltModel) -> Trainer[Any]:
    """Build the trainer of a model: its module with training kernels, the engine, optimizer, schedule and settings.

    Raises:
        InputError: the optimizer cannot train the model.
    """
    run, parts = model.data.run, model.data.parts
    train, processes = run.run_file.train, run.processes
    assert train.learning_rate is not None and train.warmup is not None, "fill the defaults of the run file first"
    tree = _build_tree(model)
    # Before the optimizer: sharding replaces the parameters of the tree.
    engine = None
    if processes.size > 1:
        engine = build_engine(
            tree, parts.loss, processes, is_sharded=model.is_sharded, device=run.device, precision=model.precision
        )
    if model.is_sharded:
        refuse_to_run(model.module, "its weights are sharded over processes; run the training tree instead")
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
        batches=parts.batches if processes.size == 1 else RankBatches(parts.batches, processes.this),
        loss=parts.loss,
        validate=parts.validate,
        settings=_settings(model, steps),
        progress=run.progress,
        directory=run.directory,
        processes=processes,
        engine=engine,
    )


def _build_tree(model: BuiltModel) -> Transformer:
    """Return the training tree of a model, with the kernels or the compiled layers of the run."""
    run = model.data.run
    recomputes = run.run_file.train.activation_checkpointing
    if not model.compiles:
        return training_tree(model.module, model.precision, recomputes_layers=recomputes)
    from clearhead.training.compilation import full_batch  # imports PyTorch's compiler

    process = run.processes.this
    full = full_batch(model.data.parts, process)
    return training_tree(
        model.module,
        model.precision,
        recomputes_layers=recomputes,
        compiles=True,
        full=full,
        by_layer=process.size > 1,
    )


def _settings(model: BuiltModel, steps: int | None) -> TrainSettings:
    """Return the [train] table with resolved values, and the choices that every checkpoint stores."""
    run, parts = model.data.run, model.data.parts
    train = run.run_file.train
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
        choices[BASE_FORMATS] = formats_to_text(model.base_formats)
    table = train.model_dump()
    table |= {"precision": model.precision, "compile": model.compiles}
    table |= {"validate_every": in_steps(train.validate_every, steps)}
    return TrainSettings(**table, best_by=parts.best_by, score_name=parts.score_name, choices=choices)


@dataclass(frozen=True)
class AssembledRun:
    """A run that is ready for its first step: the model and its trainer.

    Attributes:
        model: the model with its first weights.
        trainer: the trainer of the model.
    """

    model: BuiltModel
    trainer: Trainer[Any]

    @property
    def data(self) -> PreparedData:
        """The prepared data of the run."""
        return self.model.data

    @property
    def run(self) -> OpenedRun:
        """The open run."""
        return self.model.data.run


def assemble_run(run: OpenedRun) -> AssembledRun:
    """Prepare the data, build the model and its trainer, and describe the model in the run directory.

    Raises:
        InputError: the data, the sizes or the initial model cannot be used.
    """
    # A resumed run has equal bits only in this order: tokenizers, stores, seed, model.
    model = build_model(prepare_data(run))
    describe_model(model)
    return AssembledRun(model, build_trainer(model))


def forecast(assembled: AssembledRun) -> Preflight:
    """Check the data of a new run against the model; report and return the forecast of its cost.

    Raises:
        InputError: ids or lengths exceed the model, or memory or disk space are too small, in one report.
    """
    run, parts, module, trainer = assembled.run, assembled.data.parts, assembled.model.module, assembled.trainer
    work: Workload[Any] = parts
    if trainer.engine is not None:
        work = rank_workload(parts, trainer.engine, trainer.batches, run.processes.this)
    report = preflight(
        Trial(trainer.module, trainer.optimizer, work, trainer.settings),
        faults=[fault for side in parts.sides for fault in side.faults(module, run.run_file.task.init)],
        memory_before=run.memory_before,
        process=run.processes.this,
        display=run.progress,
    )
    for line in report.lines():
        run.progress.message(line)
    return report


def warn_of_new_schedule(assembled: AssembledRun) -> None:
    """Warn if a resumed run has another number of steps and thus another schedule."""
    run, now = assembled.run, assembled.trainer.settings.choices[PLANNED_STEPS]
    train, before = run.run_file.train, run.choices.get(PLANNED_STEPS)
    depends = train.schedule in SCHEDULES_WITH_AN_END or isinstance(train.warmup, float)
    if depends and before is not None and before != now:
        run.progress.message(
            f"the {train.schedule} schedule now has {now:,} steps instead of {before:,}, so the learning rates from "
            "here on differ from the original schedule"
        )


def train_run(run_file: RunFile, *, resume: bool = False, progress: TrainingProgress | None = None) -> RunResult:
    """Train the model that a run file describes.

    Args:
        run_file: the checked run file.
        resume: True to continue from the newest undamaged checkpoint of its run directory.
        progress: the display that receives all reports. None means a live panel or lines on stderr.

    Raises:
        InputError: the data, the sizes or the run directory cannot be used; no files remain.
        RunFailure: training failed; the last checkpoint is complete.
        Interrupted: training was stopped by a signal; everything is saved.
    """
    with open_training(run_file, resume=resume, progress=progress or progress_for()) as run:
        return _train(run)


def _train(run: OpenedRun) -> RunResult:
    """Train in an open run directory.

    The engine is freed when this function returns. Otherwise a deadlock is possible. PyTorch would hold
    the GIL while it waits for the thread of the process group, and that thread may wait for the GIL.
    """
    assembled = assemble_run(run)
    trainer = assembled.trainer
    try:
        if run.is_resumed:
            warn_of_new_schedule(assembled)
        else:
            trainer.validation_seconds = forecast(assembled).cost.validation_seconds
        return trainer.run(resume=run.is_resumed)
    finally:
        if assembled.model.compiles:
            torch.compiler.reset()  # later runs of this process compile again
