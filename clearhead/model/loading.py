"""Loading of models from runs, saved models and Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from clearhead.base.arguments import check_precision, check_types
from clearhead.base.errors import InputError
from clearhead.base.machine import choose_device, choose_precision, needs_check
from clearhead.base.mapped_files import refuse_altered_files, set_mapped_files
from clearhead.base.progress import message
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.hf.files.tensor_files import widest_dtype
from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.directory import (
    TASK_FILE,
    find_files,
    read_task,
    retry_while_checkpoints_change,
)
from clearhead.checkpoints.weights.files import load_merged, load_module_from, observe_weights, refuse_nan
from clearhead.core import Transformer
from clearhead.core.extensions.files import load_parts
from clearhead.core.extensions.modules import recomputed_parts
from clearhead.core.extensions.trial import try_parts
from clearhead.fast.busy_waiting import adapt_waiting
from clearhead.fast.computing import replica_in_dtype
from clearhead.fast.replica import use_eager
from clearhead.fast.runner import Runner, multiplies_in_bf16, warn_of_slow_products
from clearhead.fast.stored import (
    INT8,
    QUANTIZED,
    StorageFormat,
    WeightForm,
    choose_int4,
    formats_of,
    is_quantized,
    keep_16_bits,
    narrowest,
    require_formats,
)
from clearhead.model.facade import Model
from clearhead.spec import Model as ModelSpec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.pair import TokenizerPair

CPU = torch.device("cpu")


@check_types
def load(
    ref: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    parts: str | Path | Sequence[str | Path] | None = None,
) -> Model:
    """Load a trained model.

    With precision "auto", weights are bf16 on a GPU that supports it. On a CPU, they keep the 16 bits of a checkpoint
    that has 16 bits, and are fp32 otherwise. Predictions and generated text multiply in bf16 if the weights have 16
    bits or if bf16 is faster. Scores, metrics and attention are computed in fp32. A model that was saved in int8 or
    int4 stays quantized.

    Args:
        ref: a run directory, optionally with @best, @last, @averaged or @step-N; a folder that `save` wrote; or a
            Hugging Face checkpoint. If there is no such folder, a name on the hub, optionally with @revision.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, bf16, or on a CPU int8 or int4: weights in 8 bits, or most of them in 4 bits.
        parts: the files with custom modules that the model needs. None means that they are imported or installed.

    Raises:
        InputError: there is no usable model, or its weights are NaN or infinite. Also if a custom module that it needs
            is missing or comes from a changed file. The message says what was expected.
    """
    if parts is not None:
        load_parts(parts)
    model = _load(ref, device, precision)
    for line in recomputed_parts(model.module):
        message(line)
    refuse_nan(model.module, str(ref))
    if precision == "auto" and not is_quantized(model.module):
        model.runner = Runner(model.module, in_bf16=multiplies_in_bf16(model.module))
    warn_of_slow_products(model.module)
    return model


def load_exact(ref: str | Path, *, device: str = "auto", precision: str = "fp32") -> Model:
    """Load a model that computes in fp32, with weights in the dtype or quantized format of their files.

    The model converts one matrix at a time to fp32, so it takes no more memory than its files.

    Args:
        ref, device: same as in `load`.
        precision: same as in `load`. With a precision other than fp32, or on a GPU, weights have this precision.

    Raises:
        InputError: same cases as in `load`.
    """
    if precision != "fp32" or choose_device(device).type != "cpu":
        return load(ref, device=device, precision=precision)
    model = load(ref, device="cpu")
    if is_quantized(model.module):
        # Kernels for quantized matrices round their inputs.
        model.module = replica_in_dtype(model.module, torch.float32)
    model.runner = Runner(model.module)
    return model


def load_unchecked(ref: str | Path, *, device: str = "auto") -> Model:
    """Load a model that computes in fp32 without checking for NaN or for a tokenizer with too many entries.

    Args:
        ref, device: same as in `load`. On a CPU, weights keep the dtype or quantized format of their files.

    Raises:
        InputError: there is no model, or this machine does not have the device.
    """
    return _load(ref, device, "auto" if choose_device(device).type == "cpu" else "fp32", check_rows=False)


def load_as_stored(ref: str | Path) -> Model:
    """Load a model for conversion: every weight in the dtype of its file, on the CPU.

    Args:
        ref: same as in `load`.

    Raises:
        InputError: same cases as in `load`.
    """
    folder = ModelReference.locate(str(ref)).checkpoint_folder()
    if folder is None:
        return load(ref, device="cpu", precision="fp32")
    return _load_checkpoint(folder, WeightForm(widest_dtype(folder)))


def _load(ref: str | Path, device: str, precision: str, *, check_rows: bool = True) -> Model:
    check_precision(precision)
    adapt_waiting()
    torch_device = choose_device(device)
    form = _choose_form(precision, torch_device)
    reason = ""
    if needs_check(torch_device):
        from clearhead.fast.device_check import find_eager_reason  # most machines do not need it

        reason = find_eager_reason(torch_device, choose_precision(precision, torch_device))
    reference = ModelReference.locate(str(ref))
    checkpoint = reference.checkpoint_folder()
    if checkpoint is not None:
        model = _load_checkpoint(checkpoint, form, device=torch_device, check_rows=check_rows)
    else:
        is_any_kept = precision == "auto" and torch_device.type == "cpu"
        keep_quantized = QUANTIZED if is_any_kept else tuple(kind for kind in QUANTIZED if kind.name == precision)
        model = load_saved(reference, form, device=torch_device, keep_quantized=keep_quantized, check_rows=check_rows)
    if reason:
        use_eager(model.module, reason)
    return model


def _choose_form(precision: str, device: torch.device) -> WeightForm:
    """Return the dtype or quantized format in which a model holds its weights for a precision.

    Raises:
        InputError: the device cannot use this format.
    """
    if precision in ("int8", "int4"):
        if device.type != "cpu":
            raise InputError(f"precision {precision} needs a CPU, got the device {device.type}; use bf16")
        choose = choose_int4 if precision == "int4" else partial(require_formats, kind=INT8)
        return WeightForm(choose=lambda module, _: choose(module))
    if precision == "auto" and device.type == "cpu":
        return WeightForm(choose=keep_16_bits)
    return WeightForm(torch.bfloat16 if choose_precision(precision, device) == "bf16" else torch.float32)


def _load_checkpoint(folder: Path, form: WeightForm, *, device: torch.device = CPU, check_rows: bool = True) -> Model:
    """Load a Hugging Face checkpoint."""
    hf_checkpoint = HFCheckpoint.load(folder, form=form)
    assert hf_checkpoint.loaded is not None, "a loaded checkpoint has a family"
    module, tokenizers = hf_checkpoint.loaded.module.to(device), hf_checkpoint.tokenizers.pair
    if device.type != "cpu":
        set_mapped_files(module, ())  # the device has a copy
    if check_rows:
        tokenizers.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
    return Model(module.eval(), tokenizers, hf_checkpoint.loaded.task, hf_checkpoint)


def load_saved(
    reference: ModelReference,
    form: WeightForm | None = None,
    *,
    device: torch.device = CPU,
    keep_quantized: Collection[StorageFormat] = (),
    check_rows: bool = True,
) -> Model:
    """Load a model that a run or `save` wrote.

    Args:
        reference: a run directory, optionally with the label of a checkpoint, or the folder of a saved model.
        form: the form in which the module holds its weights, such as int8. None means fp32.
        device: the device of the module.
        keep_quantized: the formats of quantized weights that stay quantized; other formats are dequantized.
        check_rows: True to refuse a tokenizer with more entries than the model has rows.

    Raises:
        InputError: the folder holds no usable model; the message says what was expected.
    """

    def fill(spec: ModelSpec, weights: Path) -> Transformer:
        file = observe_weights(weights)
        tensors = load_merged(weights)
        module = load_module_from(spec, tensors, source=str(weights), form=form, keep_quantized=keep_quantized)
        refuse_altered_files([file])
        if device.type == "cpu" and narrowest(formats_of(tensors)) in keep_quantized:
            set_mapped_files(module, [file])
        if form is not None and form.dtype != torch.float32:
            module.to(form.dtype)  # converts computed buffers of custom modules
        return module.to(device)

    return read_saved(reference, fill, check_rows=check_rows)


def read_saved(
    reference: ModelReference, fill: Callable[[ModelSpec, Path], Transformer], *, check_rows: bool = True
) -> Model:
    """Read the files of a model that a run or `save` wrote.

    Args:
        reference: same as in `load_saved`.
        fill: the function that returns the module of a spec with the weights of a file.
        check_rows: same as in `load_saved`.

    Raises:
        InputError: the folder holds no usable model; the message says what was expected.
    """

    def read() -> Model:
        files = find_files(reference)
        folder, weights = files.folder, files.weights
        task = read_task(folder)
        if find_task(task.kind).learns_head and weights.parent.name == "step-0":
            raise InputError(
                f"{weights.parent} is the first checkpoint of a run, and its head is untrained: use a later checkpoint"
            )
        spec = ModelSpec.from_file(folder / SPEC_FILE)
        _refuse_other_task(spec, task, folder)
        try_parts(spec)
        module = fill(spec, weights)
        tokenizers = TokenizerPair.load(folder)
        if check_rows:
            tokenizers.check_rows(module.num_source_ids, module.num_target_ids, str(folder))
        origin = files.origin
        hf_checkpoint = None if origin is None else HFCheckpoint.from_origin(origin, module, task, tokenizers)
        return Model(module.eval(), tokenizers, task, hf_checkpoint, weights_file=weights)

    # A run in training deletes old checkpoints, so this one may be gone.
    return retry_while_checkpoints_change(reference.folder, read)


def _refuse_other_task(model: ModelSpec, task: TaskRecord, folder: Path) -> None:
    """Refuse a task record that does not fit the outputs of the model."""
    outputs = model.num_outputs
    if find_task(task.kind).outputs != "vector" and outputs is None:
        raise InputError(
            f"{folder / SPEC_FILE} has no outputs, but the task {task.kind} needs them; restore spec.json and task.json"
        )
    if find_task(task.kind).has_labels and outputs != max(1, len(task.labels)):
        raise InputError(
            f"{folder / TASK_FILE} has {len(task.labels)} labels, but the model has {outputs} outputs; "
            "restore spec.json and task.json"
        )
