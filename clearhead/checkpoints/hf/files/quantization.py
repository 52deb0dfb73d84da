"""Quantized checkpoints: MXFP4 weights are dequantized while they are read; other formats are detected and refused.

MXFP4 weights are blocks of 4-bit numbers with one exponent per block. A file has two tensors of bytes for the matrices
of all experts.

- NAME_blocks [E, O, G, 16]: each byte is two numbers of a row, the first one in the lower half.
- NAME_scales [E, O, G]: the exponents of blocks of 32 numbers.

They are read as NAME [E, I, O], the layout of files without quantization. Every number is exact in bfloat16 and in
float32.

Shape suffixes: E experts, O outputs, G groups, I inputs.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2, 5.3.3 (E2M1) and 5.4.1 (E8M0); tensor names are those of
released checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.files.tensor_files import FLOATS, TensorFiles, TensorHeader

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Numbers of the E2M1 codes without sign, in the order of the codes.
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
# Names of quantization methods in config.json, and their usual names.
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "bitnet": "BitNet",
}
# Names of tensors that only one format has; the first match counts.
_TENSORS = (
    (r".*\.g_idx", "GPTQ"),
    (r".*\.qweight", "AWQ or GPTQ"),
    (r".*\.(absmax|quant_map|quant_state\..*)", "bitsandbytes (4 bits)"),
    (r".*\.SCB", "bitsandbytes (8 bits)"),
    (r".*_blocks", "MXFP4 without a quantization_config"),
    (r".*\.weight_scale(_inv)?", "FP8"),
    (r".*\.weight_packed", "compressed-tensors"),
)


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return whether a config says that weights are quantized as MXFP4."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


class PackedFiles(TensorFiles):
    """Tensors of a folder, with MXFP4 tensors dequantized."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._packed: dict[str, tuple[TensorHeader, TensorHeader]] = {}
        faults: list[str] = []
        for name in [name for name in self.headers if name.endswith(_BLOCKS)]:
            self._pair_scales(name.removesuffix(_BLOCKS), faults)
        if not self._packed and not faults:
            faults.append(
                f"{directory}: config.json says that weights are quantized as MXFP4, but no tensor is quantized"
            )
        if faults:
            raise InputError.from_faults(faults, subject=str(directory))

    def _pair_scales(self, stem: str, faults: list[str]) -> None:
        """Replace the safetensors headers of MXFP4 blocks and scales by one header of the tensor that they encode."""
        blocks = self.headers.pop(stem + _BLOCKS)
        scales = self.headers.pop(stem + _SCALES, None)
        if scales is None:
            faults.append(f"'{stem}{_BLOCKS}' has no '{stem}{_SCALES}'")
        elif {blocks.dtype, scales.dtype} != {"U8"}:
            faults.append(
                f"'{stem}{_BLOCKS}' and its scales hold {blocks.dtype} and {scales.dtype}; expected bytes, U8"
            )
        elif len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.shape[:3] != scales.shape:
            shapes = f"{list(blocks.shape)} and {list(scales.shape)}"
            faults.append(
                f"'{stem}{_BLOCKS}' and its scales have the shapes {shapes}; expected [E, O, G, 16] and [E, O, G]"
            )
        else:
            experts, rows, groups, half = blocks.shape
            self._packed[stem] = blocks, scales
            self.headers[stem] = replace(blocks, dtype="BF16", shape=(experts, groups * half * 2, rows))

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name) if name in self._packed else super().__getitem__(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor in a separate memory mapping; a quantized tensor is dequantized, one expert at a time."""
        if name not in self._packed:
            return super().read(name)
        blocks, scales = (self._map_numbers(header, torch.uint8).view(header.shape) for header in self._packed[name])
        result = torch.empty(self.headers[name].shape, dtype=torch.bfloat16)
        for matrix, packed, exponents in zip(result, blocks, scales, strict=True):
            matrix.copy_(dequantize(packed, exponents).T)
        return result

    def is_same(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal bit for bit."""
        if {first, second} & self._packed.keys():
            return self._packed.get(first) == self._packed.get(second)
        return super().is_same(first, second)


def dequantize(
    packed: UInt8[Tensor, "rows groups bytes"], exponents: UInt8[Tensor, "rows groups"]
) -> Float[Tensor, "rows columns"]:
    """Return the numbers of one MXFP4 matrix in fp32.

    Args:
        packed: bytes of two numbers each, the first one in the lower half.
        exponents: exponent of each group, with a bias of 127.
    """
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])
    pairs = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    return torch.ldexp(numbers[pairs.int()], (exponents.int() - _BIAS)[..., None]).flatten(1)


def find_quantization(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return the name of the quantization format; None if the weights are not quantized.

    Args:
        config: the content of config.json.
        dtypes: the safetensors name of the dtype of each tensor, by the name of the tensor.
    """
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and settings:
        method = str(settings.get("quant_method", "an unnamed method"))
        return _METHODS.get(method, method)
    names = [name for name, dtype in dtypes.items() if dtype not in FLOATS]
    is_fp8 = any(dtype.startswith("F8") for dtype in dtypes.values())
    matches = (kind for pattern, kind in _TENSORS if any(re.fullmatch(pattern, name) for name in names))
    return next(matches, "FP8" if is_fp8 else None)
