"""Weights in 8 bits: a matrix of integers, and a scale for each of its rows.

A weight w becomes round(w / scale), where scale is the largest magnitude of its row / 127, so that it differs from what
it was by at most half a scale. Vectors (norms, biases) stay as they are. Source: arXiv 2208.07339, section 2.1
(quantization by the largest magnitude of a row).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.base.printing import PrintedModule
from clearhead.base.tied import Tied
from clearhead.core import Transformer
from clearhead.core.embedding import Table
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.shapes import Ids

WEIGHT, SCALE = "weight_int8", "weight_scale"
LARGEST = 127
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantize(
    weight_NK: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, " rows"]]:
    """Return a matrix in 8 bits, and the fp32 scale of each row."""
    weight_NK = weight_NK.detach().float()
    scale_N = weight_NK.abs().amax(1) / LARGEST
    # A row of zeros has no scale; its integers are zeros.
    divisor_N1 = scale_N.masked_fill(scale_N == 0.0, 1.0)[:, None]
    # Kernels read a matrix row by row, and the weights of some checkpoints are transposed views.
    return (weight_NK / divisor_N1).round_().to(torch.int8).contiguous(), scale_N.contiguous()


class Int8Matrix(nn.Module):
    """A matrix in 8 bits in place of the parameter `weight`."""

    weight_int8: Int8[Tensor, "rows columns"]
    weight_scale: Float[Tensor, " rows"]

    def hold(self, weight: Tensor | nn.Parameter) -> None:
        """Take the shape of a weight, and its values unless it is on the meta device."""
        self._parameters.pop("weight", None)
        if weight.is_meta:
            matrix, scale = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight))
        else:
            matrix, scale = quantize(weight)
        self.register_buffer(WEIGHT, matrix)
        self.register_buffer(SCALE, scale)

    def dequantized(self) -> Float[Tensor, "rows columns"]:
        """Return the matrix in fp32."""
        return self.weight_int8 * self.weight_scale[:, None]


class Int8Linear(PrintedModule, Int8Matrix):
    """A linear layer. Called by itself it computes in fp32 with dequantized weights; see `Runner`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias: nn.Parameter = linear.bias
        self.hold(linear.weight)

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        """Dequantized, fp32."""
        return self.dequantized()

    def forward(self, x: Float[Tensor, "*axes inputs"]) -> Float[Tensor, "*axes outputs"]:
        """Return x weight^T + bias."""
        return F.linear(x, self.dequantized(), self.bias)


class Int8Table(Int8Matrix, Table):
    """A table of embeddings, which an output layer may be tied to."""

    def __init__(self, table: Table) -> None:
        nn.Module.__init__(self)
        self.num_rows: int = table.num_rows
        self.hold(table.weight)

    @property
    def weight(self) -> Float[Tensor, "rows width"]:  # type: ignore[override]
        """Dequantized, fp32."""
        return self.dequantized()

    def forward(self, ids_BT: Ids) -> Float[Tensor, "batch tokens width"]:
        """Return the rows of these ids, fp32."""
        return F.embedding(ids_BT, self.weight_int8) * F.embedding(ids_BT, self.weight_scale[:, None])


class Int8HeadLinear(Int8Matrix, HeadLinear):
    """An output layer that is tied to no table."""

    def __init__(self, linear: HeadLinear) -> None:
        nn.Module.__init__(self)
        assert linear.weight is not None
        self.bias: nn.Parameter | None = linear.bias
        self.scale: float = linear.scale
        self.hold(linear.weight)

    @property
    def weight(self) -> Float[Tensor, "outputs width"]:  # type: ignore[override]
        """Dequantized, fp32."""
        return self.dequantized()


def to_int8(module: Transformer) -> Transformer:
    """Turn the matrices of a model's linear layers and tables into 8 bits, and the rest into fp32; in place.

    Args:
        module: on the CPU, or on the meta device, whose matrices are then to be filled.

    Raises:
        InputError: the model has no linear layer or table whose weights are matrices.
    """
    tables: dict[Table, Int8Table] = {}
    for parent, name, part in list(_parts(module)):
        if isinstance(part, Table):
            tables[part] = Int8Table(part)
            setattr(parent, name, tables[part])
        elif isinstance(part, nn.Linear):
            setattr(parent, name, Int8Linear(part))
        elif isinstance(part, HeadLinear) and part.weight is not None:
            _replace(parent, name, Int8HeadLinear(part))
    for part in module.modules():
        if (tied := vars(part).get("tied")) is not None:
            vars(part)["tied"] = Tied(tables.get(tied.module, tied.module))
    if not is_int8(module):
        raise InputError("precision int8 is for matrices, and this model has none; load it with fp32")
    for parameter in module.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(False)
    return module


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in module.modules():
        for name, part in parent.named_children():
            yield parent, name, part


def _replace(parent: nn.Module, name: str, part: nn.Module) -> None:
    if isinstance(parent, nn.ModuleList):
        parent[int(name)] = part
    else:
        setattr(parent, name, part)


def is_int8(module: nn.Module) -> bool:
    """Return whether a model has weights in 8 bits."""
    return any(isinstance(part, Int8Matrix) for part in module.modules())


def holds_int8(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors by name are those of a model with weights in 8 bits."""
    return any(name.endswith(f".{WEIGHT}") for name in tensors)


def dequantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name with fp32 weights in place of those in 8 bits."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        if last == WEIGHT:
            found[f"{owner}.weight"] = tensor * tensors[f"{owner}.{SCALE}"][:, None]
        elif last != SCALE:
            found[name] = tensor
    return found


def clamp(tensors: Mapping[str, Tensor]) -> None:
    """Bring the integers of weights in 8 bits, by name, into -127..127 in place: products have no place for -128."""
    for name, tensor in tensors.items():
        if name.endswith(f".{WEIGHT}"):
            tensor.clamp_(min=-LARGEST)


def weight_faults(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each tensor of a model's weights, by name, whose dtype is not that of weights.

    In a model with weights in 8 bits the rest is fp32, and each matrix has a scale for every row.
    """
    in_int8 = holds_int8(tensors)
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        expected: tuple[torch.dtype, ...] = FLOATS
        if in_int8:
            expected = (torch.int8,) if last == WEIGHT else (torch.float32,)
        if tensor.dtype not in expected:
            yield f"'{name}' holds {_dtypes(tensor.dtype)}, and the model needs {_dtypes(*expected)}"
        elif last in (WEIGHT, SCALE):
            other = tensors.get(f"{owner}.{SCALE if last == WEIGHT else WEIGHT}")
            if other is None:
                yield f"'{name}' is without its '{SCALE if last == WEIGHT else WEIGHT}'"
            elif last == SCALE and (other.dim() != 2 or tensor.shape != other.shape[:1]):
                yield f"'{name}' has the shape {list(tensor.shape)}, and its matrix {list(other.shape)}"


def _dtypes(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def refuse_int8(module: nn.Module, what: str) -> None:
    """Refuse a model with weights in 8 bits for what needs all their digits.

    Raises:
        InputError: it is one.
    """
    if is_int8(module):
        raise InputError(f"{what} needs all digits of the weights, and this model has them in 8 bits: load it as fp32")
