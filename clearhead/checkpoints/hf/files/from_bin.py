"""Pickled weights converted to safetensors: the only place where a pickle is opened.

PyTorch's restricted unpickler builds tensors and plain containers only and refuses everything else. Its result is
checked again, so that only named tensors are written. Nothing else in this library reads such a file, and this runs
only when a user asks for it by name.
"""

from __future__ import annotations

import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import file_inside, read_json_object, write_json
from clearhead.base.machine import refuse_memory
from clearhead.checkpoints.hf.files.tensor_files import FLOATS, INDEX, check_shards
from clearhead.checkpoints.reference import READ
from clearhead.checkpoints.weights.files import MOST_TENSORS, save_tensors

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Times the size of a file, and bytes of its pickle: 20,000 tensors take so many.
MOST_GROWTH, LARGEST_PICKLE = 4, 2**22
_PICKLE = ".pkl"  # of the one entry of an archive that is a pickle
_METADATA = "__metadata__"  # the one key of a safetensors header that names no tensor
# Of weights, and of tables and masks that are stored beside them.
_DTYPES = {*FLOATS.values(), torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
_COPIED = tuple(suffix for suffix in READ if suffix != ".safetensors")


def convert_bin(folder: Path, target: Path) -> list[str]:
    """Write the weights of a folder as safetensors, and copy its other files.

    Args:
        folder: holds `pytorch_model.bin`, or `pytorch_model.bin.index.json` and the files that it names.
        target: an empty folder.

    Returns:
        The names of the files that were read.

    Raises:
        InputError: there are no such weights, a file holds anything but named tensors, or a file is a link out of the
            folder.
    """
    weight_map = _weight_map(folder)
    names = [_SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    renamed = {name: f"{name.removesuffix('.bin').replace('pytorch_model', 'model')}.safetensors" for name in names}
    for name in names:
        save_tensors(target / renamed[name], _read(file_inside(folder, name)))
    if weight_map is not None:
        index = {"metadata": {}, "weight_map": {tensor: renamed[name] for tensor, name in weight_map.items()}}
        write_json(target / INDEX, index, is_indented=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name != _INDEX:
            shutil.copyfile(file_inside(folder, path.name), target / path.name)
    return names


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor, or None where one file holds all."""
    if (folder / _SINGLE).is_file():
        return None
    if not (folder / _INDEX).is_file():
        raise InputError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: there is nothing to convert")
    weight_map = read_json_object(file_inside(folder, _INDEX), what="an index of weights").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{folder / _INDEX}: expected an object whose weight_map names files")
    files = sorted({str(name) for name in weight_map.values()})
    check_shards(files, folder / _INDEX)
    faults = [
        f"{folder / _INDEX} names the file {name!r}; expected the name of a .bin file in the same folder"
        for name in files
        if Path(name).name != name or not name.endswith(".bin")
    ]
    faults += [f"{folder / name} is missing" for name in files if not faults and not (folder / name).is_file()]
    if faults:
        raise InputError.from_faults(faults, subject=str(folder))
    return {str(tensor): str(name) for tensor, name in weight_map.items()}


def _list_entries(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} is a damaged archive ({error}); download it again") from None


def _read(path: Path) -> dict[str, Tensor]:
    # Files from before PyTorch 1.6 are not zip archives, and only those can be mapped.
    is_archive = zipfile.is_zipfile(path)
    entries = _list_entries(path) if is_archive else []
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path} is a compressed archive, whose weights PyTorch would misread; ask for safetensors")
    if any(entry.file_size > LARGEST_PICKLE for entry in entries if entry.filename.endswith(_PICKLE)):
        raise InputError(f"{path}: what names its tensors has more than {LARGEST_PICKLE:,} bytes; ask for safetensors")
    if not is_archive:
        refuse_memory(path.stat().st_size, f"{path}: to load it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # noqa: BLE001 whatever a damaged or hostile file makes the reader raise
        # PyTorch's own message tells how to execute what the file holds, which nobody should do.
        raise InputError(
            f"{path} cannot be read as weights only ({type(error).__name__}): it is damaged, or holds more than "
            "tensors, which is never executed; ask for safetensors"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise InputError(f"{path}: expected named tensors, received a {type(tensors).__name__}")
    if len(tensors) > MOST_TENSORS:
        raise InputError(f"{path}: {len(tensors):,} tensors are too many for a model (at most {MOST_TENSORS:,})")
    _check_tensors(path, tensors)
    return {name: tensor.resolve_neg() for name, tensor in tensors.items()}


def _check_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse what no weights are, and tensors that are larger than their file."""
    checked = ((name, _find_fault(name, value)) for name, value in tensors.items())
    faults = [f"{path}: '{name}' {fault}" for name, fault in checked if fault is not None]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))
    # A tensor of stride 0, or thousands of views of one, would be written as more numbers than the file holds.
    views = {(value.data_ptr(), value.dtype, value.shape, value.stride()): value for value in tensors.values()}
    size = sum(value.numel() * value.element_size() for value in views.values())
    if size > MOST_GROWTH * path.stat().st_size:
        raise InputError(f"{path}: its tensors have {size} bytes, far more than the file")


def _find_fault(name: str, value: object) -> str | None:
    """Return why safetensors cannot hold an entry, or no model reads it; None: nothing is wrong."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if name == _METADATA or not name.isprintable():
        return "is no name of a tensor"
    kinds = {
        "nested": value.is_nested,
        "quantized": value.is_quantized,
        "meta": value.is_meta,
        "sparse": value.layout != torch.strided,
        str(value.dtype).removeprefix("torch."): value.dtype not in _DTYPES,
    }
    kind = next((kind for kind, is_of_it in kinds.items() if is_of_it), None)
    return None if kind is None else f"is a tensor of the kind {kind}; expected plain numbers"
