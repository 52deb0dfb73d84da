"""The files of a checkpoint's directory, opened with care: nothing outside it, nothing that is not what it says.

Tensors stay in their mapped files until they are used. A directory inside the hub's cache is made of links to the
repository's own store beside it; those are followed, others are not.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.errors import InputError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ = (".json", ".txt", ".model", ".spm", ".jinja", ".safetensors")
LARGEST_JSON = 64 * 2**20
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
BLOCK = 2**22


def inside(directory: Path, name: str) -> Path:
    """Return the path of a file of a directory.

    Raises:
        InputError: the name leads out of the directory, by itself or through a link.
    """
    if not name or "/" in name or "\\" in name or name in (".", "..") or "\0" in name:
        raise InputError(f"{directory}: '{name}' is not the name of a file in this directory")
    path = directory / name
    real, home = path.resolve(), directory.resolve()
    # In the hub's cache, `snapshots/REVISION` and its folders hold links into `blobs` of the same repository.
    store = next((one.parent / "blobs" for one in list(home.parents)[:2] if one.name == "snapshots"), home)
    if not (real.is_relative_to(home) or real.is_relative_to(store)):
        raise InputError(f"{path}: a link out of the directory is not followed; copy the file here")
    return path


def check_links(directory: Path) -> None:
    """Refuse a directory that holds links out of it among the files that could be read.

    Raises:
        InputError: there is such a link.
    """
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and path.suffix in READ:
            inside(directory, path.name)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of a directory.

    Raises:
        InputError: there is no such file, it is too large, or it is not a JSON object.
    """
    value = _parsed(directory, name)
    if not isinstance(value, dict):
        raise InputError(f"{directory / name}: must hold a JSON object, got {type(value).__name__}")
    return value


def read_list(directory: Path, name: str) -> list[Any]:
    """Read a JSON list from a file of a directory.

    Raises:
        InputError: as `read_json`, or it is not a JSON list.
    """
    value = _parsed(directory, name)
    if not isinstance(value, list):
        raise InputError(f"{directory / name}: must hold a JSON list, got {type(value).__name__}")
    return value


def _parsed(directory: Path, name: str) -> Any:
    path = inside(directory, name)
    if not path.is_file():
        raise InputError(f"{directory}: there is no {name}")
    if path.stat().st_size > LARGEST_JSON:
        raise InputError(f"{path}: {path.stat().st_size} bytes are too many for a file of settings")
    try:
        return json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor before it is read: its bytes are those from `start` to `end` of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the type of a checkpoint's floating-point tensors; of several types, one that holds them all.

    Args:
        directory: with safetensors.

    Raises:
        InputError: the files cannot be read.
    """
    headers = TensorFiles(directory).headers.values()
    found = sorted({FLOATS[header.dtype] for header in headers if header.dtype in FLOATS}, key=str)
    return functools.reduce(torch.promote_types, found) if found else torch.float32


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one safetensors file, or of all the shards that an index names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self.headers: dict[str, Header] = {}
        faults: list[str] = []
        index = self._index(faults)
        for name in dict.fromkeys(index.values()) if index is not None else [SINGLE]:
            self._read_headers(name, faults)
        if index is not None:
            faults += [
                f"{INDEX}: '{name}' should be in {file}, which lacks it"
                for name, file in index.items()
                if file in self._files and (name not in self.headers or self.headers[name].file != file)
            ]
        if faults:
            raise InputError.from_faults(list(dict.fromkeys(faults)), subject=str(directory))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self.headers[name].file].get_tensor(name)
        return tensor

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a floating-point tensor for what will copy it, mapped for itself, or converted.

        The pages of a mapped file that were looked at stay in memory as long as another tensor of it lives, so that a
        copy made from them would be there twice. A mapping of its own ends with the tensor.
        """
        header = self.headers[name]
        stored = FLOATS[header.dtype]
        if stored == dtype:
            return self._mapped(header, stored).view(header.shape)
        made = torch.empty(header.shape, dtype=dtype)
        for place, part in enumerate(made.view(-1).split(BLOCK) if made.numel() else ()):
            part.copy_(self._mapped(header, stored, place * BLOCK, part.numel()))
        return made

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are one bit by bit; neither stays in memory."""
        one, other = self.headers[first], self.headers[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        size = one.end - one.start
        blocks = ((place, min(BLOCK, size - place)) for place in range(0, size, BLOCK))
        return all(
            torch.equal(self._mapped(one, torch.uint8, *block), self._mapped(other, torch.uint8, *block))
            for block in blocks
        )

    def _mapped(self, header: Header, dtype: torch.dtype, place: int = 0, count: int | None = None) -> Tensor:
        """Map numbers of a tensor, from a place on: all of them, or so many."""
        start = header.start + place * dtype.itemsize
        end = header.end if count is None else start + count * dtype.itemsize
        first = start - start % mmap.ALLOCATIONGRANULARITY
        if start == end:
            return torch.empty(0, dtype=dtype)
        with (self.directory / header.file).open("rb") as file:
            if os.fstat(file.fileno()).st_size < end:
                raise InputError(f"{self.directory / header.file}: the file was cut off while it was read")
            pages = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
        # A file may put numbers where this machine would not; copied, they are at their place.
        if start % dtype.itemsize:
            return torch.frombuffer(bytearray(pages[start - first :]), dtype=dtype)
        return torch.frombuffer(pages, dtype=dtype, offset=start - first)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    def _index(self, faults: list[str]) -> dict[str, str] | None:
        """Return which file holds which tensor; None where one file holds all."""
        if inside(self.directory, SINGLE).is_file():
            return None
        if not inside(self.directory, INDEX).is_file():
            if any((self.directory / name).exists() for name in PICKLED):
                raise InputError(
                    f"{self.directory}: the weights are there as .bin only, a format that can hold programs and is "
                    f"never read by itself; write them as safetensors with: "
                    f"clearhead convert {self.directory} OUT --from-bin"
                )
            raise InputError(f"{self.directory}: there is neither {SINGLE} nor {INDEX}, so there are no weights")
        table = read_json(self.directory, INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()) or not table:
            raise InputError(f"{self.directory / INDEX}: weight_map must name a file for each tensor")
        faults += [
            f"{INDEX} names {file}, which is not there"
            for file in dict.fromkeys(table.values())
            if not inside(self.directory, file).is_file()
        ]
        return table

    def _read_headers(self, name: str, faults: list[str]) -> None:
        path = inside(self.directory, name)
        if not path.is_file():
            return
        try:
            # Never entered: the file stays open, and mapped, as long as a tensor of it lives.
            file: Any = safe_open(path, framework="pt")
            for tensor, header in _headers(path):
                if tensor in self.headers:
                    faults.append(
                        f"'{tensor}' is in {self.headers[tensor].file} and in {name}: which counts is not said"
                    )
                self.headers[tensor] = header
        except (SafetensorError, OSError) as error:
            faults.append(f"{name} is damaged or not a safetensors file: {error}")
            return
        self._files[name] = file


def _headers(path: Path) -> Iterator[tuple[str, Header]]:
    """Read the headers of a file that the library has opened, and thereby found to be sound."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        content = json.loads(file.read(length))
    for name, entry in content.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, Header(path.name, entry["dtype"], tuple(entry["shape"]), start, end)
