"""Weights in safetensors files and in modules; no other kind of file is read or written.

A slot is an entry of a module's state dict. Either every slot gets a tensor and every tensor a slot, or one report
names all faults.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import open_model_file, parse_json
from clearhead.base.machine import refuse_memory
from clearhead.base.mapped_files import MappedFile
from clearhead.checkpoints.weights.lora import LOW_RANK, merge_low_rank
from clearhead.checkpoints.weights.writer import TensorWriter
from clearhead.core import Transformer, build
from clearhead.fast.memory import refuse_load
from clearhead.fast.stored import (
    QUANTIZED,
    StorageFormat,
    WeightForm,
    formats_of,
    matching_formats,
    narrowest,
    repair,
    store,
    stored_matrices,
    weight_faults,
    widen_weights,
)
from clearhead.spec import Model

Stream = Iterable[tuple[str, Tensor]]
"""Names and tensors one after the other, to write a model without having all of it in memory."""
# Limit for damaged files: no model has more tensors in all its files.
MOST_TENSORS = 2**17
# Maximum number of faults of one kind in a report.
MOST_NAMED = 20
_BLOCK = 2**16
_QUANTIZED_NAMES = {name for kind in QUANTIZED for name in kind.names}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], stream: Stream | None = None) -> None:
    """Write named tensors to one safetensors file; a tensor with several names is stored once.

    Args:
        path: the file.
        tensors: the tensors by name, or with a stream, tensors of the same dtypes and shapes on the meta device.
        stream: the names and tensors one after the other, in any order. None means those of `tensors`.
    """
    _save_files([path], [tensors], stream)


def save_shards(
    directory: Path, tensors: Mapping[str, Tensor], *, name: str, max_size: int, stream: Stream | None = None
) -> list[str]:
    """Write named tensors to one file, or if they are too large, to several shards and an index.

    Args:
        directory: the folder of the files.
        tensors: same as in `save_tensors`; the shards follow their order.
        name: the name of a single file, such as `model.safetensors`.
        max_size: the maximum size of the tensors in a file, in bytes. A larger tensor gets a separate file.
        stream: same as in `save_tensors`.

    Returns:
        The names of the files.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_size:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_tensors(directory / name, tensors, stream)
        return [name]
    stem, _, suffix = name.rpartition(".")
    files = [f"{stem}-{number:05}-of-{len(shards):05}.{suffix}" for number in range(1, len(shards) + 1)]
    stored = _save_files([directory / file for file in files], shards, stream)
    placed = {key: file for file, shard in zip(files, stored, strict=True) for key in shard}
    total = sum(tensor.nbytes for shard in stored for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / f"{name}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    return files


def _save_files(
    paths: Sequence[Path], shards: Sequence[Mapping[str, Tensor]], stream: Stream | None
) -> list[dict[str, Tensor]]:
    """Write named tensors to several files, and return the tensors in each file by the first of their names."""
    stored, writers = [], dict[str, TensorWriter]()
    with contextlib.ExitStack() as stack:
        for path, shard in zip(paths, shards, strict=True):
            unique, aliases = _split_aliases(shard)
            metadata = {"format": "pt"} | ({"aliases": json.dumps(aliases)} if aliases else {})
            writers |= dict.fromkeys(unique, stack.enter_context(TensorWriter(path, unique, metadata)))
            stored.append(unique)
        for name, tensor in itertools.chain.from_iterable(map(dict.items, stored)) if stream is None else stream:
            writers[name].write(name, tensor)
    return stored


def _split_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each distinct tensor by its first name, and a map from every other name of a tensor to its first name."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and not tensor.is_meta and identity in first_names:
            aliases[name] = first_names[identity]
            continue
        first_names[identity] = name
        stored[name] = tensor
    return stored, aliases


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a safetensors file; names that shared a tensor share it again.

    Raises:
        InputError: the file is missing, is not a regular safetensors file, or is a link out of its folder. Also if it
            has too many tensors, or does not fit into memory.
    """
    with open_model_file(path, what="weights") as opened:
        refuse_memory(os.fstat(opened.fileno()).st_size, f"{path}: to load it")
    copies: dict[int, Tensor] = {}
    tensors = map_tensors(path)
    return {name: copies.setdefault(id(tensor), tensor.clone()) for name, tensor in tensors.items()}


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Map the named tensors of a safetensors file into memory; names that shared a tensor share it again.

    Tensors in the mapped file may be unaligned, and the rounding of some floating-point kernels depends on alignment.

    Raises:
        InputError: same cases as in `load_tensors`, except for memory.
    """
    with open_model_file(path, what="weights"):
        try:
            with safe_open(path, framework="pt") as file:
                if len(file.keys()) > MOST_TENSORS:
                    raise InputError(f"{path} has {len(file.keys())} tensors; expected at most {MOST_TENSORS}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                aliases = parse_json((file.metadata() or {}).get("aliases", "{}"))
        except (SafetensorError, json.JSONDecodeError) as error:
            raise InputError(f"{path} is damaged or not a safetensors file: {error}") from None
    if not isinstance(aliases, dict) or not all(
        isinstance(first, str) and first in tensors for first in aliases.values()
    ):
        raise InputError(f"{path}: `aliases` in its metadata must be an object from names to names of tensors")
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def observe_weights(path: Path) -> MappedFile:
    """Return a file of weights with its present state, before it is mapped.

    Raises:
        InputError: the file is missing, is no regular file, or is a link out of its folder.
    """
    with open_model_file(path, what="weights"):
        return MappedFile.observe(path)


class SavedTensors(Mapping[str, Tensor]):
    """Tensors of a safetensors file, each in a separate memory mapping, whose pages are freed with the tensor.

    Args:
        path: the file. If it changes on disk afterwards, reading a tensor raises an `InputError`.

    Raises:
        InputError: same cases as in `map_tensors`, or a tensor has a dtype that weights cannot have.
    """

    def __init__(self, path: Path) -> None:
        self.file: MappedFile = observe_weights(path)
        mapped = map_tensors(path)
        refuse_dtypes(mapped, path)
        self.outlines: dict[str, Tensor] = {name: tensor.to("meta") for name, tensor in mapped.items()}
        with safe_open(path, framework="pt") as file:
            names = {id(mapped[name]): name for name in file.keys()}  # noqa: SIM118
        # A tensor with several names is stored under one of them.
        self._names = {name: names[id(tensor)] for name, tensor in mapped.items()}

    def __getitem__(self, name: str) -> Tensor:
        self.file.open().close()  # refuses another file
        with safe_open(self.file.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self._names[name])
        repair({name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of a model into memory.

    Raises:
        InputError: same cases as in `load_tensors`, or a tensor has a dtype that weights cannot have.
    """
    tensors = load_tensors(path)
    refuse_dtypes(tensors, path)
    return tensors


def refuse_dtypes(weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights with dtypes that would be misread, such as integers, booleans, or float16 scales of int8.

    Args:
        weights: the weights by name.
        path: the file of the weights, for messages.

    Raises:
        InputError: a weight has a wrong dtype; one report names all faults.
    """
    faults = list(itertools.islice(weight_faults(weights), MOST_NAMED))
    if faults:
        raise InputError.from_faults(faults, subject=str(path))


def load_merged(path: Path) -> dict[str, Tensor]:
    """Map the weights of a run or a saved model into memory, with low-rank matrices merged.

    Raises:
        InputError: the file cannot be read, or its tensors have wrong dtypes or do not fit each other.
    """
    tensors = map_tensors(path)
    refuse_dtypes(tensors, path)
    repair(tensors)
    return merge_low_rank(tensors) if any(name.rpartition(".")[2] in LOW_RANK for name in tensors) else tensors


def open_merged(model: Model, path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Open the weights of a run or a saved model without reading them; low-rank matrices are read and merged.

    Args:
        model: the spec of the model.
        path: the file of the weights.

    Returns:
        The tensors by address, each in a separate memory mapping, and tensors of the same shapes and dtypes.

    Raises:
        InputError: same cases as in `load_merged` and `fill`.
    """
    tensors: Mapping[str, Tensor] = SavedTensors(path)
    if any(name.rpartition(".")[2] in LOW_RANK for name in tensors):
        tensors = load_merged(path)
    outlines = tensors.outlines if isinstance(tensors, SavedTensors) else tensors
    refuse_misfits(store(build(model, device="meta"), formats_of(tensors)), outlines, source=str(path))
    return tensors, outlines


def fill(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Load named tensors into a module, which may be on the meta device, without copying them.

    Args:
        module: the module, changed in place.
        tensors: one tensor for each entry of the module's state dict.
        source: the origin of the tensors, for messages.

    Raises:
        InputError: names or shapes in `tensors` and the module's state dict differ. One report names all faults.
    """
    refuse_misfits(module, tensors, source=source)
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def refuse_misfits(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse named tensors that do not fit the state dict of a module; the arguments are those of `fill`.

    Raises:
        InputError: names or shapes in `tensors` and the module's state dict differ. One report names all faults.
    """
    slots = module.state_dict()
    faults = [f"'{name}' is missing" for name in slots if name not in tensors]
    strangers = [name for name in tensors if name not in slots]
    faults += [f"'{name}' is not a tensor of the model{did_you_mean(name, slots)}" for name in strangers[:MOST_NAMED]]
    if len(strangers) > MOST_NAMED:
        faults.append(f"{len(strangers) - MOST_NAMED} more tensors do not belong to the model")
    faults += [
        f"'{name}' has the shape {list(tensors[name].shape)}, the model needs {list(slot.shape)}"
        for name, slot in slots.items()
        if name in tensors and tensors[name].shape != slot.shape
    ]
    if faults:
        raise InputError.from_faults(faults, subject=source)


def load_module_from(
    model: Model,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    form: WeightForm | None = None,
    keep_quantized: Collection[StorageFormat] = (),
) -> Transformer:
    """Return a new module with mapped tensors, which are read into memory one at a time.

    Args:
        model: the spec of the module.
        tensors: one mapped tensor for each entry of the module's state dict, with dtypes of weights.
        source: the origin of the tensors, for messages.
        form: the form in which the module holds its weights, such as int8. None means fp32.
        keep_quantized: the formats of quantized matrices that stay in their mapped file; other formats are dequantized.

    Raises:
        InputError: same cases as in `fill`, or the weights do not fit into memory.
    """
    formats = formats_of(tensors)
    module = store(build(model, device="meta"), formats)
    refuse_misfits(module, tensors, source=source)
    if narrowest(formats) in keep_quantized:
        entries = {f"{owner}.{name}" for owner, kind in formats.items() for name in kind.names}
        state = {address: tensor if address in entries else tensor.clone() for address, tensor in tensors.items()}
    else:
        module = build(model, device="meta")
        state = _load_in_form(module, tensors, form or WeightForm(), source)
    module.load_state_dict(state, strict=True, assign=True)
    return module


def _load_in_form(
    module: Transformer, tensors: Mapping[str, Tensor], form: WeightForm, source: str
) -> dict[str, Tensor]:
    """Return a state dict of mapped tensors in another form, such as bf16, and prepare a meta module for this form."""
    slots = module.state_dict()
    dtypes = {name: tensors[name].dtype if name in tensors else torch.float32 for name in slots}
    plan = form.plan(module, dtypes)
    refuse_load(module, plan, dtypes, source, is_mapped=False)
    store(module, plan.formats)
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for address, tensor in widen_weights(tensors):
        held = plan.hold(address, tensor)
        if held.get(address) is tensor and address in tensors:
            # Copy the tensor: the rounding of kernels may depend on alignment. Shared tensors stay shared.
            held = {address: copies.setdefault(id(tensor), tensor.clone())}
        state |= held
    return state


def refuse_nan(module: nn.Module, name: str) -> None:
    """Refuse a module with NaN or infinite weights, with which every output would be NaN.

    Args:
        module: the module; its weights are read once.
        name: the name of the model, for messages.

    Raises:
        InputError: a weight contains NaN, or a matrix or its quantization scales contain an infinite number.
    """
    for address, weight in itertools.chain(module.named_parameters(), module.named_buffers()):
        refuse_nan_in(address, weight, name)


def refuse_nan_in(address: str, weight: Tensor, name: str) -> None:
    """Refuse a weight with NaN or infinite numbers.

    Args:
        address: the address of the weight.
        weight: the weight, or a tensor of its quantized form.
        name: the name of the model, for messages.

    Raises:
        InputError: same cases as in `refuse_nan`.
    """
    # Sums show in one pass if a closer check is needed. The sum of a whole 16-bit matrix would copy it to fp32.
    rows = max(1, _BLOCK * len(weight) // max(1, weight.numel())) if weight.dim() else 1
    blocks = weight.detach().split(rows) if weight.dim() else (weight.detach(),)
    if weight.is_floating_point() and not all(torch.isfinite(block.sum(dtype=torch.float32)) for block in blocks):
        is_matrix = weight.dim() > 1 or address.rpartition(".")[2] in _QUANTIZED_NAMES
        count = int((~torch.isfinite(weight)).sum() if is_matrix else torch.isnan(weight).sum())
        if count:
            raise InputError(
                f"{name}: {count:,} of {weight.numel():,} numbers in {address} are NaN or infinite, so the "
                "training of this model diverged; use an earlier checkpoint, such as RUN@step-N, or train with a "
                "smaller learning_rate"
            )


def build_from_tensors(model: Model, tensors: Mapping[str, Tensor], *, training: bool = False) -> Transformer:
    """Return a module with tensors that are known to fit; the module uses them without a copy.

    Args:
        model: the spec of the module.
        tensors: one tensor for each entry of the module's state dict, by address.
        training: True for training mode, False for evaluation mode.
    """
    module = build(model, device="meta")
    store(module, matching_formats(module, tensors))
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    return module.train(training)


def with_weights(module: Transformer, weights: Path) -> Transformer:
    """Return a copy of a module with the weights of another step of its run, on the same device and in the same dtype.

    Args:
        module: the module of the run.
        weights: the safetensors file of a checkpoint or a snapshot.

    Raises:
        InputError: the weights cannot be read, or belong to another model.
    """
    like, formats = next(module.parameters()), stored_matrices(module)
    form = WeightForm(torch.float32 if formats else like.dtype, lambda *_: formats)
    copy = load_module_from(module.spec, load_merged(weights), source=str(weights), form=form)
    refuse_nan(copy, str(weights))
    return copy.to(like.device).eval()
