"""The third stage: the model is built and has its first weights, its precision is chosen, and files say what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from clearhead.base.errors import InputError
from clearhead.base.machine import choose_precision
from clearhead.checkpoints.reference import SPEC_FILE
from clearhead.checkpoints.runs.directory import RUN_FILE, TASK_FILE
from clearhead.checkpoints.weights.lora import adapt, describe
from clearhead.core import Transformer, build
from clearhead.spec import Model
from clearhead.training.dry_run import faster_precision
from clearhead.training.init_from import take_weights
from clearhead.training.parallel.choice import shares_model
from clearhead.training.preflight import refuse_large
from clearhead.training.random_state import seed_everything
from clearhead.training.runfile.read import to_toml
from clearhead.training.stages.data import PreparedData
from clearhead.training.stages.opening import OpenedRun, with_precision

# The choice of a run under which the tensors are remembered that LoRA trains whole.
NEW_TENSORS: Final = "new_tensors"


@dataclass(frozen=True)
class BuiltModel:
    """The model of a run with the weights that it starts with.

    Attributes:
        module: the plain tree.
        is_sharded: whether the processes share its weights.
        new: addresses of the tensors that the initial model does not have.
        precision: of the computation.
    """

    module: Transformer
    is_sharded: bool
    new: Sequence[str]
    precision: Literal["fp32", "bf16"]


def build_model(run: OpenedRun, data: PreparedData) -> BuiltModel:
    """Build the model from the seed, copy weights into it, and choose the precision.

    Raises:
        InputError: the model or a batch does not fit into memory, or a weight of the initial model is missing.
    """
    run_file, spec, process = run.run_file, data.parts.spec, run.processes.this
    seed_everything(run_file.train.seed)
    is_sharded = shares_model(run_file, spec, run.device, run.processes)
    refuse_large(spec, run.device, is_trained_whole=run_file.lora is None, process=process, is_sharded=is_sharded)
    # A shared model may not fit on one device: the first process has it in main memory, and sends the others theirs.
    before_sharing = "cpu" if run.processes.is_first else "meta"
    module = build(spec, device=before_sharing if is_sharded else run.device)
    new = _take_weights(run, data, module, is_sharded=is_sharded)
    if run_file.lora is not None:
        run.progress.message(describe(module, adapt(module, **run_file.lora.model_dump(), new=new)))
    return BuiltModel(module, is_sharded, new, _precision(run, data, module, is_sharded=is_sharded))


def _take_weights(run: OpenedRun, data: PreparedData, module: Transformer, *, is_sharded: bool) -> list[str]:
    """Copy the weights of the initial model; return the addresses of the tensors that it does not have."""
    if data.initial is None or run.is_resumed:
        return str(run.choices.get(NEW_TENSORS, "")).split()
    new: list[str] = []
    if run.processes.is_first or not is_sharded:
        new = take_weights(module, data.initial, data.parts.record, run.progress)
    return run.processes.first_of(new)


def _precision(run: OpenedRun, data: PreparedData, module: Transformer, *, is_sharded: bool) -> Literal["fp32", "bf16"]:
    """Return the precision that a resumed run remembers, or the faster one."""
    remembered: Literal["fp32", "bf16"] | None = run.choices.get("precision")
    if remembered is not None:
        return remembered
    train = run.run_file.train
    is_tried = run.processes.is_first and not is_sharded
    tried = faster_precision(module, data.parts.workload(), train) if is_tried else None
    return run.processes.first_of(tried) or choose_precision(train.precision, run.device)


def describe_model(run: OpenedRun, data: PreparedData, model: BuiltModel) -> None:
    """Write into the run directory what the weights mean: resolved run file, tokenizers, spec and task.

    Raises:
        InputError: a resumed run has another spec.
    """
    directory, parts = run.directory, data.parts
    if directory is None:
        return
    directory.write_text(RUN_FILE, to_toml(with_precision(run.run_file, model.precision)))
    file = directory.path / SPEC_FILE
    if run.is_resumed and file.exists() and Model.from_file(file) != parts.spec:
        raise InputError(f"{file} describes a different model than the run file: restore the original run file")
    parts.tokenizers.save(directory.path)
    directory.write_text(SPEC_FILE, parts.spec.to_json())
    directory.write_text(TASK_FILE, parts.record.to_json())
    if data.initial is not None and data.initial.hf_checkpoint is not None and not run.is_resumed:
        data.initial.hf_checkpoint.save_origin(directory.path)
    directory.seal()
