"""Loading of models from runs, saved models and Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from clearhead.arguments import checked
from clearhead.hf.checkpoint import HFCheckpoint
from clearhead.hf.files.hub import find_checkpoint
from clearhead.hf.files.tensor_files import stored_dtype
from clearhead.machine import choose_device, choose_precision
from clearhead.model.facade import Model
from clearhead.runs.loading import load_saved
from clearhead.weights.fill import refuse_nan


@checked
def load(ref: str | Path, *, device: str = "auto", precision: str = "auto") -> Model:
    """Load a trained model.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N; a folder that `save` wrote, or one in
            the layout of the Hugging Face hub; or, where there is no such folder, a name on the hub, optionally with
            @revision.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32 or bf16.

    Raises:
        InputError: no usable model is there, or its weights are not numbers; the message says what was expected.
    """
    torch_device = choose_device(device)
    dtype = torch.bfloat16 if choose_precision(precision, torch_device) == "bf16" else torch.float32
    checkpoint = find_checkpoint(str(ref))
    if checkpoint is not None:
        model = _of_checkpoint(checkpoint, dtype, torch_device)
        refuse_nan(model.module, str(ref))
        return model
    module, pair, task, hf_checkpoint = load_saved(str(ref), dtype=dtype)
    refuse_nan(module, str(ref))
    return Model(module.to(torch_device).eval(), pair, task, hf_checkpoint)


def load_as_stored(ref: str | Path) -> Model:
    """Load a model for conversion: every weight in the dtype of its file, on the CPU.

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
    assert hf_checkpoint.loaded is not None, "a loaded checkpoint has a family"
    module, pair = hf_checkpoint.loaded.module.to(device), hf_checkpoint.tokenizers.pair
    pair.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
    return Model(module.eval(), pair, hf_checkpoint.loaded.task, hf_checkpoint)
