"""Memory-mapped safetensors files of a checkpoint. No file outside its folder is read."""

from __future__ import annotations

import functools
import json
import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Shaped
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError
from clearhead.base.files import LARGEST_VOCABULARY, convert_json, file_inside, parse_json, read_json_object
from clearhead.base.mapped_files import MappedFile
from clearhead.base.printing import human_bytes
from clearhead.checkpoints.reference import CONFIG
from clearhead.checkpoints.weights.files import MOST_TENSORS

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
BYTES = {"I8": torch.int8, "U8": torch.uint8}
BLOCK = 2**22
# Limit for damaged indices: no checkpoint has more files.
MOST_SHARDS = 1024


class _TaskSettings(BaseModel):
    """Settings for one task in `task_specific_params`, with the prefix of its prompts."""

    prefix: str | None = None


class _SharedConfig(BaseModel):
    """Keys of config.json that all families share."""

    model_type: str | None = None
    architectures: list[str] | None = None
    id2label: dict[str, str | int | float | bool | None] | None = None
    num_labels: Annotated[int, Field(ge=0, lt=2**26)] | None = None
    problem_type: str | None = None
    tokenizer_class: str | None = None
    task_specific_params: dict[str, _TaskSettings] | None = None
    quantization_config: dict[str, Any] | None = None


def read_config(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file of a folder.

    Raises:
        InputError: the file is missing, is a link out of the folder, or is not a JSON object. Also if a key that
            all families share has a value of a wrong type.
    """
    content = read_json_object(file_inside(directory, name), what=f"a {name}")
    if name == CONFIG:
        convert_json(
            {key: content[key] for key in _SharedConfig.model_fields if key in content},
            _SharedConfig,
            name=str(directory / name),
        )
    return content


@dataclass(frozen=True)
class TensorHeader:
    """Header of one tensor: its file, dtype and shape, and the range of its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def widest_dtype(directory: Path) -> torch.dtype:
    """Return the narrowest dtype that represents all floating-point tensors of a checkpoint.

    Args:
        directory: the folder with the safetensors files.

    Raises:
        InputError: the files cannot be read.
    """
    headers = TensorFiles(directory).headers.values()
    dtypes = sorted({FLOATS[header.dtype] for header in headers if header.dtype in FLOATS}, key=str)
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


class TensorFiles(Mapping[str, Tensor]):
    """Tensors of one safetensors file, or of all shards that an index names.

    Args:
        directory: the folder of the files.
        single: the file name if one file holds all tensors.

    Attributes:
        mapped: the files by name, in the state in which their headers were read.
        headers: the headers of the tensors by name.
    """

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        self.directory = directory
        self._single: str = single
        self._files: dict[str, Any] = {}
        self.mapped: dict[str, MappedFile] = {}
        self.headers: dict[str, TensorHeader] = {}
        faults: list[str] = []
        index = self._index()
        for name in dict.fromkeys(index.values()) if index is not None else [single]:
            self._read_headers(name, faults)
            if len(self.headers) > MOST_TENSORS:
                raise InputError(f"{directory / name}: expected at most {MOST_TENSORS} tensors, got more")
        if index is not None:
            faults += [
                f"{INDEX}: '{name}' should be in {file}, which lacks it: download both again"
                for name, file in index.items()
                if file in self._files and (name not in self.headers or self.headers[name].file != file)
            ]
        if faults:
            raise InputError.from_faults(list(dict.fromkeys(faults)), subject=str(directory))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self.headers[name].file].get_tensor(name)
        return tensor

    def read(self, name: str) -> Tensor:
        """Return a floating-point tensor in a separate memory mapping, for a caller that copies it.

        Pages that were read stay in memory as long as any tensor of the same mapping exists. So a tensor in the mapping
        of the whole file and its copy would take the memory twice. A separate mapping ends with its tensor.
        """
        header = self.headers[name]
        return self._map_numbers(header, FLOATS[header.dtype]).view(header.shape)

    def read_rows(self, name: str, rows: range) -> Shaped[Tensor, "rows *columns"]:
        """Return some rows of a tensor in its stored dtype; a stack of matrices counts the rows of all matrices.

        Raises:
            InputError: the tensor holds neither floating-point numbers nor bytes.
        """
        header = self.headers[name]
        dtype = {**FLOATS, **BYTES}.get(header.dtype)
        if dtype is None:
            raise InputError(f"{self.directory / header.file}: '{name}' holds {header.dtype}, not weights")
        columns = header.shape[-1:] if len(header.shape) > 1 else ()
        width = math.prod(columns)
        return self._map_numbers(header, dtype, rows.start * width, len(rows) * width).view(len(rows), *columns)

    def is_same(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal bit for bit; neither stays in memory."""
        first_header, second_header = self.headers[first], self.headers[second]
        if (first_header.dtype, first_header.shape) != (second_header.dtype, second_header.shape):
            return False
        length = first_header.end - first_header.start
        blocks = ((offset, min(BLOCK, length - offset)) for offset in range(0, length, BLOCK))
        return all(
            torch.equal(
                self._map_numbers(first_header, torch.uint8, *block),
                self._map_numbers(second_header, torch.uint8, *block),
            )
            for block in blocks
        )

    def _map_numbers(
        self, header: TensorHeader, dtype: torch.dtype, offset: int = 0, count: int | None = None
    ) -> Tensor:
        """Map `count` numbers of a tensor into memory from `offset` on; a count of None means all numbers."""
        start = header.start + offset * dtype.itemsize
        end = header.end if count is None else start + count * dtype.itemsize
        first = start - start % mmap.ALLOCATIONGRANULARITY
        if start == end:
            return torch.empty(0, dtype=dtype)
        with self.mapped[header.file].open() as file:
            pages = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
        # Copy numbers that are not aligned in the file.
        if start % dtype.itemsize:
            return torch.frombuffer(bytearray(pages[start - first :]), dtype=dtype)
        return torch.frombuffer(pages, dtype=dtype, offset=start - first)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    def _index(self) -> dict[str, str] | None:
        """Return the file name of each tensor; None if one file holds all tensors."""
        if file_inside(self.directory, self._single).is_file():
            return None
        index = file_inside(self.directory, INDEX)
        if not index.is_file():
            if any((self.directory / name).exists() for name in PICKLED):
                raise InputError(
                    f"{self.directory} has its weights as .bin only, a pickle format that is not loaded; "
                    "write them as safetensors with: "
                    f"{make_command(f'convert {quote(str(self.directory))} OUT --from-bin')}"
                )
            raise InputError(f"{self.directory} has no weights: expected {SINGLE} or {INDEX}")
        table = read_json_object(index, what="an index", largest=LARGEST_VOCABULARY).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()) or not table:
            raise InputError(f"{index}: weight_map must name a file for each tensor")
        check_shards(set(table.values()), index)
        return table

    def _read_headers(self, name: str, faults: list[str]) -> None:
        path = file_inside(self.directory, name)
        if not path.is_file():
            faults.append(f"{INDEX} names {name}, which is missing: download it")
            return
        try:
            self.mapped[name] = MappedFile.observe(path)
            # No context manager: the file stays mapped as long as one of its tensors exists.
            file: Any = safe_open(path, framework="pt")
            for tensor, header in _read_header(path):
                if tensor in self.headers:
                    faults.append(f"'{tensor}' is in both {self.headers[tensor].file} and {name}")
                self.headers[tensor] = header
            self.mapped[name].open().close()  # refuses a file that was replaced meanwhile
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            faults.append(f"{name} is damaged or not a safetensors file: {error}")
            return
        except RuntimeError:
            # PyTorch raises this error if it cannot map the file.
            faults.append(f"{name} cannot be mapped into memory: it has {human_bytes(path.stat().st_size)}")
            return
        self._files[name] = file


def check_shards(names: Collection[str], index: Path) -> None:
    """Refuse an index with too many files.

    Args:
        names: the names of the files.
        index: the index file that names them.

    Raises:
        InputError: there are more than `MOST_SHARDS` files.
    """
    if len(names) > MOST_SHARDS:
        raise InputError(f"{index} names {len(names):,} files; expected at most {MOST_SHARDS:,}")


def _read_header(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the names and headers of the tensors in a file, which `safe_open` has validated."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        content = parse_json(file.read(length).decode("utf-8"))
    for name, entry in content.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, TensorHeader(path.name, entry["dtype"], tuple(entry["shape"]), start, end)
