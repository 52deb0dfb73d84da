"""Weights that were published as pickled files, turned into safetensors: the one place where such a file is opened.

PyTorch's restricted reader builds tensors and plain containers only and refuses everything else a pickled file could
ask for. What it returns is checked again, so that nothing but named tensors goes on. Nothing else in this library reads
such a file, and this runs only when someone asks for it by name.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.weights.files import save_tensors

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_COPIED = (".json", ".txt", ".model", ".spm", ".jinja")


def convert_bin(folder: Path, target: Path) -> list[str]:
    """Write the weights of a folder as safetensors, and copy what else it holds.

    Args:
        folder: holds `pytorch_model.bin`, or `pytorch_model.bin.index.json` and the files that it names.
        target: an empty folder.

    Returns:
        The names of the files that were read.

    Raises:
        InputError: there are no such weights, or a file holds anything but named tensors.
    """
    placed = _placed(folder)
    names = [_SINGLE] if placed is None else sorted(set(placed.values()))
    renamed = {name: f"{name.removesuffix('.bin').replace('pytorch_model', 'model')}.safetensors" for name in names}
    for name in names:
        save_tensors(target / renamed[name], _read(folder / name))
    if placed is not None:
        index = {"metadata": {}, "weight_map": {tensor: renamed[name] for tensor, name in placed.items()}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name != _INDEX:
            shutil.copyfile(path, target / path.name)
    return names


def _placed(folder: Path) -> dict[str, str] | None:
    """Return in which file each tensor is, or None where all are in one."""
    if (folder / _SINGLE).is_file():
        return None
    if not (folder / _INDEX).is_file():
        raise InputError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: there is nothing to convert")
    try:
        placed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in placed.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{folder / _INDEX}: expected an object whose weight_map names files") from None
    faults = [
        f"{folder / _INDEX} names the file {name!r}; expected the name of a .bin file in the same folder"
        for name in files
        if Path(name).name != name or not name.endswith(".bin")
    ]
    faults += [f"{folder / name} is missing" for name in files if not faults and not (folder / name).is_file()]
    if faults:
        raise InputError.from_faults(faults, subject=str(folder))
    return {str(tensor): str(name) for tensor, name in placed.items()}


def _read(path: Path) -> dict[str, Tensor]:
    # Files from before PyTorch 1.6 are no archives, and only archives can be mapped.
    is_archive = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # noqa: BLE001 whatever a damaged or hostile file makes the reader raise
        # The reader's own message tells how to run what the file holds, which is the last thing to do with it.
        raise InputError(
            f"{path} cannot be read as weights alone ({type(error).__name__}): it is damaged, or holds more than "
            "tensors, which is never run; ask for safetensors"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InputError(f"{path}: expected named tensors, received a {type(found).__name__}")
    faults = [
        f"{path}: '{name}' is a {type(value).__name__}, not a tensor"
        for name, value in found.items()
        if not isinstance(value, Tensor)
    ]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))
    return found
