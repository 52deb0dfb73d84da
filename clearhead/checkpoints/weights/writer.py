"""Writer of safetensors files that takes one tensor at a time, so the whole model need not be in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

import torch
from torch import Tensor

DTYPE_NAMES: Final = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the headers of safetensors files, in the order of their tensors in a file."""
_ORDER: Final = list(DTYPE_NAMES)
_ALIGNMENT: Final = 8
_BLOCK: Final = 2**26


class TensorWriter:
    """Writer of one safetensors file, whose tensors come in any order.

    The file equals that of `safetensors.torch.save_file` byte for byte.

    Args:
        path: the file; an existing file is replaced.
        outlines: tensors by name with the dtypes and shapes to write; they may be on the meta device.
        metadata: the texts for the header by their names.
    """

    def __init__(self, path: Path, outlines: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._ends: dict[str, tuple[int, int]] = {}
        self._missing = set(outlines)
        header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        end = 0
        for name, outline in sorted(outlines.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])):
            start, end = end, end + outline.nbytes
            self._ends[name] = start, end
            shape = list(outline.shape)
            header[name] = {"dtype": DTYPE_NAMES[outline.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        self._first = 8 + len(text)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, with the dtype and shape in the header."""
        start, end = self._ends[name]
        assert tensor.nbytes == end - start, (
            f"{name} has {tensor.nbytes} bytes, but the header of the file declares {end - start}"
        )
        self._missing.remove(name)
        self._file.seek(self._first + start)
        if tensor.numel():
            numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            for block in numbers.split(_BLOCK):
                self._file.write(block.numpy().data)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert error is not None or not self._missing, f"{len(self._missing)} tensors were not written"
