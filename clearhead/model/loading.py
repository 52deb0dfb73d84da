"""Loading of models from runs, saved models and Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clearhead.base.arguments import check_precision, checked
from clearhead.base.errors import InputError
from clearhead.base.machine import choose_device, choose_precision
from clearhead.base.progress import message
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.files.hub import find_checkpoint, local
from clearhead.checkpoints.hf.files.tensor_files import stored_dtype
from clearhead.checkpoints.runs.loading import load_saved
from clearhead.checkpoints.weights.fill import refuse_nan
from clearhead.core.extensions.files import load_parts
from clearhead.core.extensions.modules import recomputed_parts
from clearhead.fast.busy_waiting import adapt_waiting
from clearhead.fast.int8 import is_int8, to_int8
from clearhead.fast.runner import Runner, multiplies_in_bf16, warn_of_fp32
from clearhead.model.facade import Model


@checked
def load(
    ref: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    parts: str | Path | Sequence[str | Path] | None = None,
) -> Model:
    """Load a trained model.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N; a folder that `save` wrote, or one in
            the layout of the Hugging Face hub; or, where there is no such folder, a name on the hub, optionally with
            @revision.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: fp32, bf16, or int8: weights in 8 bits, for a CPU. auto: bf16 on a GPU that has it; on a CPU fp32,
            where predictions and generated text multiply in bf16 if that is faster (scores, measures and attention
            never do); and the 8 bits of a model that was saved so.
        parts: files of your own with the parts that the model needs; None: they are imported already, or installed.

    Raises:
        InputError: no usable model is there, its weights are not numbers, or a part that it needs is not there or from
            a file that has changed; the message says what was expected.
    """
    if parts is not None:
        load_parts(parts)
    model = _loaded(ref, device, precision)
    for line in recomputed_parts(model.module):
        message(line)
    refuse_nan(model.module, str(ref))
    in_int8 = precision == "int8"
    if in_int8 and not is_int8(model.module):
        to_int8(model.module)
    elif precision == "auto":
        model.runner = Runner(model.module, in_bf16=multiplies_in_bf16(model.module))
    if is_int8(model.module):
        warn_of_fp32()
    return model


def load_unchecked(ref: str | Path, *, device: str = "auto") -> Model:
    """Load a model as fp32, whether its weights are numbers and fit its tokenizer or not.

    Args:
        ref, device: as for `load`.

    Raises:
        InputError: no model is there, or the device is none of this machine.
    """
    return _loaded(ref, device, "fp32", check_rows=False)


def _loaded(ref: str | Path, device: str, precision: str, *, check_rows: bool = True) -> Model:
    check_precision(precision)
    adapt_waiting()
    torch_device = choose_device(device)
    in_int8 = precision == "int8"
    if in_int8 and torch_device.type != "cpu":
        raise InputError(f"precision int8 is for a CPU, and the device is {torch_device.type}; use bf16")
    chosen = "fp32" if in_int8 else choose_precision(precision, torch_device)
    dtype = torch.bfloat16 if chosen == "bf16" else torch.float32
    place = local(str(ref))
    checkpoint = find_checkpoint(place)
    if checkpoint is not None:
        return _of_checkpoint(checkpoint, dtype, torch_device, check_rows=check_rows)
    keep_int8 = in_int8 or (precision == "auto" and torch_device.type == "cpu")
    found = load_saved(place, dtype=dtype, keep_int8=keep_int8, check_rows=check_rows)
    module, pair, task, hf_checkpoint, weights = found
    return Model(module.to(torch_device).eval(), pair, task, hf_checkpoint, weights_file=weights)


def load_as_stored(ref: str | Path) -> Model:
    """Load a model for conversion: every weight in the dtype of its file, on the CPU.

    Args:
        ref: as for `load`.

    Raises:
        InputError: as for `load`.
    """
    place = local(str(ref))
    checkpoint = find_checkpoint(place)
    if checkpoint is None:
        return load(place, device="cpu", precision="fp32")
    return _of_checkpoint(checkpoint, stored_dtype(checkpoint), torch.device("cpu"))


def _of_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device, *, check_rows: bool = True) -> Model:
    hf_checkpoint = HFCheckpoint.load(folder, dtype=dtype)
    assert hf_checkpoint.loaded is not None, "a loaded checkpoint has a family"
    module, pair = hf_checkpoint.loaded.module.to(device), hf_checkpoint.tokenizers.pair
    if check_rows:
        pair.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
    return Model(module.eval(), pair, hf_checkpoint.loaded.task, hf_checkpoint)
