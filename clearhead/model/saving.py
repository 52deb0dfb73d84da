"""Models written into folders."""

from __future__ import annotations

from pathlib import Path

from clearhead.core import Transformer
from clearhead.errors import InputError, argument
from clearhead.formats import FORMAT_FILE
from clearhead.hf.checkpoint import HFCheckpoint
from clearhead.hf.export import save_checkpoint, save_origin
from clearhead.runs.checkpoint import writing_folder
from clearhead.runs.directory import SAVED_FORMAT, SPEC_FILE, TASK_FILE, WEIGHTS_FILE
from clearhead.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.weights.files import save_tensors


def save_model(
    folder: Path,
    module: Transformer,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint | None,
    *,
    format: str,
    max_shard_size: int,
) -> None:
    """Write a model into a new folder that `load` reads.

    Args:
        folder, format, max_shard_size: as for `Model.save`.
        module, tokenizers, task, hf_checkpoint: of the model.

    Raises:
        InputError: the folder exists, the format is not known, or no Hugging Face family can express the model.
    """
    if format not in ("clearhead", "hf"):
        raise InputError(f"format '{format}' is not known; expected 'clearhead' or 'hf'")
    if max_shard_size < 1:
        raise InputError(argument("max_shard_size") + f" is {max_shard_size}; expected a number of bytes")
    if folder.exists():
        raise InputError(f"{folder} exists already; give a new folder")
    with writing_folder(folder) as temporary:
        if format == "hf":
            save_checkpoint(module, temporary, tokenizers, task, hf_checkpoint, max_shard_size=max_shard_size)
            return
        (temporary / FORMAT_FILE).write_text(SAVED_FORMAT.to_json(), encoding="utf-8")
        (temporary / SPEC_FILE).write_text(module.spec.to_json(), encoding="utf-8")
        (temporary / TASK_FILE).write_text(task.to_json(), encoding="utf-8")
        tokenizers.save(temporary)
        save_tensors(temporary / WEIGHTS_FILE, module.state_dict())
        if hf_checkpoint is not None:
            save_origin(hf_checkpoint, temporary)
