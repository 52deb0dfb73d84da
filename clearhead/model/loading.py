"""From a name or a folder to a model."""

from __future__ import annotations

from pathlib import Path

import torch

from clearhead.hf.checkpoint import HFCheckpoint
from clearhead.hf.files.hub import find_checkpoint
from clearhead.hf.files.tensor_files import stored_dtype
from clearhead.machine import choose_device, choose_precision
from clearhead.model.facade import Model
from clearhead.runs.loading import load_saved


def load(ref: str | Path, *, device: str = "auto", precision: str = "auto") -> Model:
    """Load a trained model.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N; a folder that `save` wrote, or one in
            the layout of the Hugging Face hub; or a name on the hub, optionally with @revision.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32 or bf16.

    Raises:
        InputError: nothing usable is there; the sentence says what was expected.
    """
    where = choose_device(device)
    dtype = torch.bfloat16 if choose_precision(precision, where) == "bf16" else torch.float32
    checkpoint = find_checkpoint(str(ref))
    if checkpoint is not None:
        return _of_checkpoint(checkpoint, dtype, where)
    module, pair, task, came_from = load_saved(str(ref), dtype=dtype)
    return Model(module.to(where).eval(), pair, task, came_from)


def load_as_stored(ref: str | Path) -> Model:
    """Load a model to be written again: every weight in the type that its file has, on the CPU.

    Args:
        ref: as for `load`.

    Raises:
        InputError: as for `load`.
    """
    checkpoint = find_checkpoint(str(ref))
    if checkpoint is None:
        return load(ref, device="cpu", precision="fp32")
    return _of_checkpoint(checkpoint, stored_dtype(checkpoint), torch.device("cpu"))


def _of_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    hf_checkpoint = HFCheckpoint.load(folder, dtype=dtype)
    assert hf_checkpoint.loaded is not None, "a checkpoint is of the family that it came in"
    module, pair = hf_checkpoint.loaded.module.to(device), hf_checkpoint.tokenizers.pair
    pair.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
    return Model(module.eval(), pair, hf_checkpoint.loaded.task, hf_checkpoint)
