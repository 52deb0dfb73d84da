"""Reading of pickled weights and vocabularies: the only module that opens a pickle.

PyTorch's restricted unpickler builds only tensors and plain containers, and refuses everything else. The result is
checked again, so that only named tensors are written. A vocabulary is read by an unpickler that knows no class and no
function. Both run only when the user asks for the conversion.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import file_inside, read_json_object, read_model_file, write_json
from clearhead.base.machine import refuse_memory
from clearhead.checkpoints.hf.files.tensor_files import FLOATS, INDEX, check_shards
from clearhead.checkpoints.reference import READ
from clearhead.checkpoints.weights.files import MOST_TENSORS, save_tensors

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Limits: size of all tensors as a multiple of the file size, and bytes of the pickle (enough for 20,000 tensors).
MOST_GROWTH, LARGEST_PICKLE = 4, 2**22
_PICKLE = ".pkl"  # suffix of the archive entry that is a pickle
_METADATA = "__metadata__"  # the only key of a safetensors header that names no tensor
# Dtypes of weights, and of tables and masks that are stored with them.
_DTYPES = {*FLOATS.values(), torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
# Instructions of a pickle that build numbers, texts, lists and dicts. None of them names a class or a function.
_PLAIN = frozenset(
    """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE
    TUPLE1 TUPLE2 TUPLE3
    """.split()
)
_COPIED = tuple(suffix for suffix in READ if suffix != ".safetensors")


def convert_bin(folder: Path, target: Path) -> list[str]:
    """Write the weights of a folder as safetensors, and copy its other files.

    Args:
        folder: the folder with `pytorch_model.bin`, or with `pytorch_model.bin.index.json` and the files that it names.
        target: an empty folder.

    Returns:
        The names of the .bin files that were read.

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
    """Return the file name of each tensor; None if one file holds all tensors."""
    if (folder / _SINGLE).is_file():
        return None
    if not (folder / _INDEX).is_file():
        raise InputError(f"{folder} has no pickled weights to convert: expected {_SINGLE} or {_INDEX}")
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
    faults += [
        f"{folder / name} is missing; download it again"
        for name in files
        if not faults and not (folder / name).is_file()
    ]
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
    return _require_tensors(path, load_pickle(path))


def load_pickle(path: Path) -> object:
    """Read a file of `torch.save` by PyTorch's restricted unpickler: tensors, numbers, texts and plain containers.

    Raises:
        InputError: the file is damaged, compressed or too large, or contains code.
    """
    # Only zip archives can be mapped; files from before PyTorch 1.6 are not zip archives.
    is_archive = zipfile.is_zipfile(path)
    entries = _list_entries(path) if is_archive else []
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path} is a compressed archive, which PyTorch would misread: get the model as safetensors")
    if any(entry.file_size > LARGEST_PICKLE for entry in entries if entry.filename.endswith(_PICKLE)):
        raise InputError(f"{path}: its pickle must be at most {LARGEST_PICKLE:,} bytes: get the model as safetensors")
    if not is_archive:
        refuse_memory(path.stat().st_size, f"{path}: to load it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # noqa: BLE001 whatever a damaged or hostile file makes the reader raise
        # PyTorch's message explains how to execute the code in the file, which is unsafe.
        raise InputError(
            f"{path} cannot be read as weights only ({type(error).__name__}): it is damaged, or contains code, which "
            "is never executed; get the model as safetensors"
        ) from None


def read_tables(path: Path, content: Mapping[Any, Any], tables: str) -> dict[str, Tensor]:
    """Return one entry of a pickled dict as named tensors.

    Args:
        path: the file, for messages.
        content: the dict that `load_pickle` returned.
        tables: the key of the entry.

    Raises:
        InputError: the entry is missing, or holds anything but named tensors.
    """
    if tables not in content:
        raise InputError(f"{path} has no entry '{tables}' with weights; expected a file that nanoGPT saved")
    return _require_tensors(path, content[tables])


def _require_tensors(path: Path, tensors: object) -> dict[str, Tensor]:
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise InputError(f"{path}: expected named tensors, got a {type(tensors).__name__}")
    if len(tensors) > MOST_TENSORS:
        raise InputError(f"{path} has {len(tensors):,} tensors; expected at most {MOST_TENSORS:,}")
    _check_tensors(path, tensors)
    return {name: tensor.resolve_neg() for name, tensor in tensors.items()}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts, lists and dicts: it refuses every class and every function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")


def read_plain_pickle(path: Path) -> object:
    """Read a pickle of numbers, texts, lists and dicts, such as nanoGPT's `meta.pkl`, without executing any code.

    The instructions of the pickle are listed and checked first.

    Raises:
        InputError: the file is damaged or too large, or contains anything else.
    """
    data = read_model_file(path, what="a pickled vocabulary", largest=LARGEST_PICKLE)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            is_huge = isinstance(argument, int) and instruction.name == "LONG_BINPUT" and argument > len(data)
            if instruction.name not in _PLAIN or is_huge:
                raise InputError(
                    f"{path} is refused: its pickle has the instruction {instruction.name}, and only numbers, texts, "
                    "lists and dicts are read; no code is executed"
                )
        return _PlainUnpickler(io.BytesIO(data)).load()
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 whatever a damaged or hostile file makes the reader raise
        raise InputError(f"{path} is no readable pickle ({type(error).__name__}): make it again") from None


def _check_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse entries that are not weights, and tensors that are much larger than their file."""
    checked = ((name, _find_fault(name, value)) for name, value in tensors.items())
    faults = [f"{path}: '{name}' {fault}" for name, fault in checked if fault is not None]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))
    # A tensor with stride 0, or thousands of views of one tensor, would be written as more bytes than the file has.
    views = {(value.data_ptr(), value.dtype, value.shape, value.stride()): value for value in tensors.values()}
    size = sum(value.numel() * value.element_size() for value in views.values())
    if size > MOST_GROWTH * path.stat().st_size:
        raise InputError(f"{path}: its tensors need {size} bytes, far more than the file: get the model as safetensors")


def _find_fault(name: str, value: object) -> str | None:
    """Return the reason why an entry is not a tensor of a model; None if nothing is wrong."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if name == _METADATA or not name.isprintable():
        return "is not a valid name of a tensor"
    kinds = {
        "nested": value.is_nested,
        "quantized": value.is_quantized,
        "meta": value.is_meta,
        "sparse": value.layout != torch.strided,
        str(value.dtype).removeprefix("torch."): value.dtype not in _DTYPES,
    }
    kind = next((kind for kind, is_of_it in kinds.items() if is_of_it), None)
    return None if kind is None else f"is a tensor of the kind {kind}; expected plain numbers"
