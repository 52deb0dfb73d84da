"""Models without their weights, from the headers of files: for inspection, and for conversion tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead.base.mapped_files import MappedFile, refuse_altered_files
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint
from clearhead.checkpoints.reference import ModelReference
from clearhead.checkpoints.weights.files import (
    SavedTensors,
    Stream,
    observe_weights,
    open_merged,
    refuse_nan_in,
)
from clearhead.core import Transformer, build
from clearhead.fast.stored import BF16, StorageFormat, WeightForm, formats_of, keep_16_bits, store, widen_weights
from clearhead.model.facade import Model
from clearhead.model.loading import read_saved
from clearhead.spec import Model as ModelSpec

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class OpenModel:
    """A model whose weights are not loaded, and a function that reads them from its files one at a time.

    Args:
        model: the model, with its module on the meta device.
        dtypes: the dtypes in the files, by the addresses of weights.
        read: the function that yields addresses and weights, one at a time, each in a separate memory mapping.
            Quantized weights become fp32.
        saved: the tensors in the file of a quantized model. None means that the model is not quantized.
        is_mapped: True if loading maps weights that need no conversion from their files instead of copying them.
        files: the files of the weights, in the state in which their headers were read.
    """

    model: Model
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[], Iterator[tuple[str, Tensor]]]
    saved: SavedTensors | None = None
    is_mapped: bool = True
    files: tuple[MappedFile, ...] = ()


def open_model(reference: ModelReference) -> OpenModel:
    """Read the headers of a model, without its weights.

    Args:
        reference: a run, a saved model, or a Hugging Face checkpoint.

    Raises:
        InputError: same cases as in `load`.
    """
    folder = reference.checkpoint_folder()
    if folder is None:
        return _open_saved(reference)
    hf_checkpoint, opened = HFCheckpoint.read_headers(folder)
    tokenizers, loaded = hf_checkpoint.tokenizers.pair, opened.loaded
    tokenizers.check_rows(loaded.module.num_source_ids, loaded.module.num_target_ids, str(folder))
    model = Model(loaded.module, tokenizers, loaded.task, hf_checkpoint)
    return OpenModel(model, opened.dtypes(), opened.tensors, files=opened.files)


def _open_saved(reference: ModelReference) -> OpenModel:
    read_tensors: list[tuple[Weights, Weights]] = []
    files: list[MappedFile] = []

    def fill(spec: ModelSpec, path: Path) -> Transformer:
        files.append(observe_weights(path))
        read_tensors.append(open_merged(spec, path))
        return build(spec, device="meta")

    model, (tensors, outlines) = read_saved(reference, fill), read_tensors[-1]
    kinds = formats_of(tensors)
    dtypes = {address: tensor.dtype for address, tensor in outlines.items()}
    dtypes |= {f"{owner}.weight": kind.entries[0].dtype for owner, kind in kinds.items()}
    saved = tensors if kinds and isinstance(tensors, SavedTensors) else None
    return OpenModel(model, dtypes, lambda: widen_weights(tensors), saved, is_mapped=bool(kinds), files=(files[-1],))


def change_form(opened: OpenModel, form: WeightForm, name: str) -> tuple[Model, Callable[[], Stream]]:
    """Convert an open model to another form of weights: return the model, and a function that yields the weights.

    Args:
        opened: the model without its weights.
        form: the new form of the weights. If the file is quantized in this form, its tensors are used unchanged.
        name: the name of the model, for messages about NaN and infinite weights.

    Raises:
        InputError: the model has no matrix that can have this form.
    """
    model, saved = opened.model, opened.saved
    plan = form.plan(model.module, opened.dtypes)
    module = store(build(model.spec, device="meta"), plan.formats)
    if not plan.formats:
        module.to(plan.dtype)

    def read() -> Iterator[tuple[str, Tensor]]:
        is_kept = saved is not None and formats_of(saved) == plan.formats
        for address, weight in saved.items() if saved is not None and is_kept else opened.read():
            refuse_nan_in(address, weight, name)
            yield from ((address, weight),) if is_kept else plan.hold(address, weight).items()
        refuse_altered_files(opened.files)

    origin = model.hf_checkpoint
    return Model(module.eval(), model.tokenizers, model.task, origin, weights_file=model.weights_file), read


def lossless_form(opened: OpenModel) -> WeightForm:
    """Return the form with the narrowest dtype that represents all weights of the files; fp32 for a quantized model."""
    dtypes = {torch.float32} if opened.saved is not None else set(opened.dtypes.values())
    return WeightForm(functools.reduce(torch.promote_types, sorted(dtypes, key=str)))


def outline_load(
    model: ModelSpec, dtypes: Mapping[str, torch.dtype], formats: Mapping[str, StorageFormat]
) -> Transformer:
    """Return the module that loading on the CPU would return, with weights in memory that is never read or written.

    The module shows which kernels would run; it cannot compute.

    Args:
        model: the spec of the model.
        dtypes: the dtypes in the files, by the addresses of weights.
        formats: the formats of matrices that are quantized in the files, by the addresses of their modules.
    """
    module = build(model, device="meta")
    # Kernels read bf16 and fp16 in the same way.
    store(module, formats or dict.fromkeys(keep_16_bits(module, dtypes), BF16))
    memory = torch.empty(max(weight.nbytes for weight in (*module.parameters(), *module.buffers())), dtype=torch.uint8)

    def view_memory(weight: Tensor | None) -> Tensor | None:
        if weight is None or not weight.is_meta:
            return weight
        view = memory[: weight.nbytes].view(weight.dtype).view(weight.shape)
        return nn.Parameter(view, requires_grad=False) if isinstance(weight, nn.Parameter) else view

    for submodule in module.modules():
        for kind in ("_parameters", "_buffers"):
            vars(submodule)[kind] |= {name: view_memory(weight) for name, weight in vars(submodule)[kind].items()}
    return module.eval()
