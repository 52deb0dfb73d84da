"""Load a model from a run directory or a saved folder: spec, weights, tokenizers, task record and origin."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.export import load_origin
from clearhead.checkpoints.runs.directory import SPEC_FILE, TASK_FILE, model_files, read_task, settled
from clearhead.checkpoints.weights.fill import filled, refuse_nan
from clearhead.checkpoints.weights.lora import load_merged
from clearhead.core import Transformer
from clearhead.core.extensions.trial import try_parts
from clearhead.fast.int8 import is_int8, to_int8
from clearhead.spec import Model as ModelSpec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find
from clearhead.text.pair import TokenizerPair


def load_saved(
    reference: str, *, dtype: torch.dtype, keep_int8: bool = False, check_rows: bool = True
) -> tuple[Transformer, TokenizerPair, TaskRecord, HFCheckpoint | None, Path]:
    """Load a model that a run or `save` wrote.

    Args:
        reference: a run directory, optionally with @best, @last, @averaged or @step-N, or a saved model's folder.
        dtype: of the weights.
        keep_int8: whether weights that were saved in 8 bits stay so.
        check_rows: a tokenizer with more entries than the model has rows is refused.

    Returns:
        The module on the CPU, its tokenizers, its task record, the Hugging Face checkpoint of its origin, if any,
        and the file of its weights.

    Raises:
        InputError: nothing usable is there; the sentence says what was expected.
    """
    # A run in training deletes old checkpoints, perhaps this one.
    folder, weights, tensors = settled(reference, lambda: _found(reference))
    task = read_task(folder)
    if find(task.kind).learns_head and weights.parent.name == "step-0":
        raise InputError(f"{weights.parent} is the beginning of a run, whose head is untrained; train further")
    spec = ModelSpec.from_file(folder / SPEC_FILE)
    _refuse_other_task(spec, task, folder)
    try_parts(spec)
    module = filled(spec, tensors, source=str(weights), keep_int8=keep_int8)
    if not is_int8(module):
        module.to(dtype)
    tokenizers = TokenizerPair.load(folder)
    if check_rows:
        tokenizers.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
    return module, tokenizers, task, load_origin(folder, module, task, tokenizers), weights


def with_weights(module: Transformer, weights: Path) -> Transformer:
    """Return a copy of a model with the weights of another step of its run, on the device and in the dtype it has.

    Args:
        module: of the run.
        weights: of a checkpoint or a snapshot.

    Raises:
        InputError: the weights cannot be read, or are of another model.
    """
    own = next(module.parameters())
    made = filled(module.spec, load_merged(weights), source=str(weights))
    refuse_nan(made, str(weights))
    made = made.to(own.device, own.dtype).eval()
    return to_int8(made) if is_int8(module) else made


def _found(reference: str) -> tuple[Path, Path, dict[str, Tensor]]:
    folder, weights = model_files(reference)
    return folder, weights, load_merged(weights, keep_int8=True)


def _refuse_other_task(model: ModelSpec, task: TaskRecord, folder: Path) -> None:
    """Refuse a record whose task the outputs of the model are not for."""
    outputs = model.num_outputs
    if find(task.kind).outputs != "vector" and outputs is None:
        raise InputError(f"{folder / SPEC_FILE} has no outputs, but the task is to {task.kind}; restore both files")
    if find(task.kind).has_labels and outputs != max(1, len(task.labels)):
        raise InputError(f"{folder / TASK_FILE} has {len(task.labels)} labels, but the model has {outputs} outputs")
