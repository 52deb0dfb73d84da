"""Weight matrices in other storage formats than fp32, and the modules that hold them.

A stored module is the plain module with another class; address, bias and settings stay the same. Each read of its
`weight` widens the stored entries to fp32; the result is dropped when the module has run. Kernels multiply with the
entries directly; see `Runner`.

In 8 bits, a weight w becomes round(w / scale), where scale is 1/127 of the largest magnitude in its row. So w changes
by at most half a scale. Source: arXiv 2208.07339, section 2.1 (quantization by the largest magnitude of a row). In 4
bits, each group of 32 weights has a scale; see `nibbles`. In 16 bits, a matrix has the bits of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.core.embedding import Table
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.rare.mixture_of_experts import ExpertMaps
from clearhead.core.shapes import Ids
from clearhead.core.stack import Stack
from clearhead.fast import huge_pages
from clearhead.fast.nibbles import GROUP, quantize_groups, widen_groups
from clearhead.fast.replica import override, plain_type

LARGEST = 127
LEAST_WEIGHTS: Final = 2**20
"""Smaller models stay in fp32: they are fast enough, and no result depends on the batch."""
_BLOCK: Final = 2**16
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class FormatEntry:
    """One tensor of a stored matrix, such as its integers or its scales; the first axis is the rows of the matrix."""

    name: str
    dtype: torch.dtype
    num_axes: int


@dataclass(frozen=True)
class StorageFormat:
    """A storage format of matrices.

    Args:
        name: name of the format in messages, such as int8.
        entries: the tensors that replace `weight`, with their names in a module's state and in files. The name of the
            first entry occurs in no other format.
        encode: function that returns the entries of a weight, also on the meta device.
        widen: function that returns the fp32 matrix of the entries, or of the same rows of all entries.
        is_exact: True if the widened matrix equals the original bit for bit.
        repair: function that brings the first entry of a file into the range that kernels expect, in place.
        group: number of columns that share a scale; rows are whole groups.
    """

    name: str
    entries: tuple[FormatEntry, ...]
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    widen: Callable[..., Tensor]
    is_exact: bool = False
    repair: Callable[[Tensor], object] = lambda entry: None
    group: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(entry.name for entry in self.entries)

    def holds(self, shape: torch.Size) -> bool:
        """Return whether the format can store a weight of this shape: a matrix, or in exact formats a stack of them."""
        return (len(shape) == 2 or (self.is_exact and len(shape) == 3)) and shape[-1] % self.group == 0

    def __reduce__(self) -> tuple[Callable[[str], StorageFormat], tuple[str]]:
        """Copy and pickle a format by its name."""
        return _format_by_name, (self.name,)


def quantize(
    weight_NK: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, " rows"]]:
    """Return a matrix in 8 bits, and the fp32 scale of each row."""
    matrix_NK = huge_pages.allocate(weight_NK.shape, torch.int8, weight_NK.device)
    scale_N = torch.empty(len(weight_NK), device=weight_NK.device)
    if weight_NK.is_meta:
        return matrix_NK, scale_N
    rows = max(1, _BLOCK // max(1, weight_NK.shape[1]))
    # A few rows at a time: a whole fp32 matrix would be several times as large as the result.
    blocks = zip(weight_NK.detach().split(rows), matrix_NK.split(rows), scale_N.split(rows), strict=True)
    for block_RK, integers_RK, block_scale_R in blocks:
        block_RK = block_RK.float()
        torch.div(block_RK.abs().amax(1), LARGEST, out=block_scale_R)
        # A row of zeros has no scale; its integers are zeros.
        divisor_R1 = block_scale_R.masked_fill(block_scale_R == 0.0, 1.0)[:, None]
        integers_RK.copy_((block_RK / divisor_R1).round_())
    return matrix_NK, scale_N


def _times_scale(matrix: Tensor, scale: Tensor) -> Tensor:
    return matrix * scale[..., None]


def _clamp(matrix: Tensor) -> None:
    """Clamp integers to -127..127: the kernels' products cannot represent -128."""
    # Write only if necessary: writing copies every page of a mapped file.
    if matrix.numel() and int(matrix.amin()) < -LARGEST:
        matrix.clamp_(min=-LARGEST)


def _in_16_bits(name: str, dtype: torch.dtype) -> StorageFormat:
    def encode(weight: Tensor) -> tuple[Tensor, ...]:
        return (huge_pages.convert(weight, dtype),)

    def widen(weight: Tensor) -> Tensor:
        # A replica for a check may hold the weight in double precision.
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    return StorageFormat(name, (FormatEntry("weight", dtype, 2),), encode, widen, is_exact=True)


INT8 = StorageFormat(
    "int8",
    (FormatEntry("weight_int8", torch.int8, 2), FormatEntry("weight_scale", torch.float32, 1)),
    quantize,
    _times_scale,
    repair=_clamp,
)
INT4 = StorageFormat(
    "int4",
    (FormatEntry("weight_int4", torch.uint8, 2), FormatEntry("group_scale", torch.float16, 2)),
    quantize_groups,
    widen_groups,
    group=GROUP,
)
LEAST_SHARE_IN_4_BITS: Final = 0.75
"""Minimum share of the layers' weights in 4 bits; with less, int4 gains hardly anything over int8."""
BF16 = _in_16_bits("bf16", torch.bfloat16)
FP16 = _in_16_bits("fp16", torch.float16)
QUANTIZED = (INT8, INT4)
"""Formats that round weights; a file is recognized by the names of their entries."""
IN_16_BITS = {torch.bfloat16: BF16, torch.float16: FP16}


def in_16_bits(weight: Tensor) -> Tensor:
    """Return a bf16 or fp16 weight unchanged, and any other weight rounded to bf16."""
    return weight if weight.dtype in IN_16_BITS else huge_pages.convert(weight, torch.bfloat16)


def _format_by_name(name: str) -> StorageFormat:
    return next(kind for kind in (*QUANTIZED, *IN_16_BITS.values()) if kind.name == name)


class Stored(nn.Module):
    """A module that holds its matrix in a storage format such as int8, instead of the parameter `weight`."""

    format: StorageFormat

    @property
    def weight(self) -> Tensor:
        """The matrix, widened to fp32. Writing to it has no effect on the stored entries."""
        return self.format.widen(*self.entries())

    def entries(self) -> list[Tensor]:
        """Return the stored tensors, in the order of the format."""
        state = {**self._parameters, **self._buffers}
        return [tensor for name in self.format.names if (tensor := state[name]) is not None]

    def put(self, weight: Tensor) -> None:
        """Replace the stored tensors by those of a new weight of any floating-point dtype."""
        for name, tensor in zip(self.format.names, self.format.encode(weight), strict=True):
            # 16-bit weights keep the name of the parameter, and so their position in `parameters()` and in files.
            if name == "weight":
                self._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                self._parameters.pop("weight", None)
                self._buffers[name] = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the plain class and the mixin, since the class that combines both exists only at run time."""
        mixin = StoredRows if isinstance(self, StoredRows) else Stored
        return _build_stored, (plain_type(self), mixin), vars(self)


class StoredRows(Stored):
    """Embedding table whose matrix is held in a storage format such as int8; an output layer may be tied to it."""

    def forward(self, ids_BT: Ids) -> Float[Tensor, "batch tokens width"]:
        """Return the embeddings of the ids in fp32; only their rows are widened."""
        rows = (entry.index_select(0, ids_BT.flatten()) for entry in self.entries())
        widened: Tensor = self.format.widen(*rows).unflatten(0, ids_BT.shape)
        return widened


def _build_stored(plain: type[nn.Module], mixin: type[Stored]) -> Stored:
    return override(object.__new__(plain), mixin)


MIXINS: Final = {nn.Linear: Stored, HeadLinear: Stored, ExpertMaps: Stored, Table: StoredRows}
"""Class of the stored module for each plain class."""


def choose_formats(module: nn.Module, kind: StorageFormat) -> dict[str, StorageFormat]:
    """Return the format for every module whose matrix the format can store, by address.

    Args:
        module: a module on any device.
        kind: the format.
    """
    weights = {
        address: vars(submodule)["_parameters"].get("weight")
        for address, submodule in module.named_modules()
        if isinstance(submodule, tuple(MIXINS))
    }
    return {address: kind for address, weight in weights.items() if weight is not None and kind.holds(weight.shape)}


def require_formats(module: nn.Module, kind: StorageFormat) -> dict[str, StorageFormat]:
    """Return the format for every module whose matrix it can store, by address; see `choose_formats`.

    Raises:
        InputError: the model has no such matrix.
    """
    formats = choose_formats(module, kind)
    if not formats:
        raise InputError(f"precision {kind.name} is for matrices, but this model has none: load it with fp32")
    return formats


def choose_int4(module: nn.Module, in_8_bits: Collection[str] = ()) -> dict[str, StorageFormat]:
    """Return the formats of a model in int4: 4 bits for the linear layers of its stacks, 8 bits for other matrices.

    A linear layer whose rows are not whole groups also gets 8 bits.

    Args:
        module: a module on any device.
        in_8_bits: addresses of linear layers that get 8 bits instead.

    Raises:
        InputError: less than 75 % of the layers' weights would have 4 bits.
    """
    formats = require_formats(module, INT8)
    for address, submodule in _stack_layers(module).items():
        if not isinstance(submodule, nn.Linear) or address not in formats or address in in_8_bits:
            continue
        if INT4.holds(submodule.weight.shape):
            formats[address] = INT4
    in_4_bits, total = count_int4(module, formats)
    if in_4_bits < LEAST_SHARE_IN_4_BITS * total:
        raise InputError(
            f"precision int4 needs {LEAST_SHARE_IN_4_BITS:.0%} of the layers' weights in 4 bits, but "
            f"{in_4_bits / max(1, total):.0%} of this model's are in matrices whose rows are multiples of {GROUP}; "
            "use int8"
        )
    return formats


def count_int4(module: nn.Module, formats: Mapping[str, StorageFormat]) -> tuple[int, int]:
    """Return the number of the layers' weights in 4 bits, and their total number; shared weights count once."""
    counts = {}
    for address, submodule in _stack_layers(module).items():
        for weight in submodule.parameters(recurse=False):
            if weight.dim() > 1:
                counts[id(weight)] = weight.numel(), formats.get(address) == INT4
    in_4_bits = sum(count for count, is_in_4_bits in counts.values() if is_in_4_bits)
    return in_4_bits, sum(count for count, _ in counts.values())


def _stack_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return every module in the layers of a model's stacks, by address."""
    return {
        f"{address}.layers.{inner}": submodule
        for address, stack in module.named_modules()
        if isinstance(stack, Stack)
        for inner, submodule in stack.layers.named_modules()
    }


def store(module: Transformer, formats: Mapping[str, StorageFormat] | StorageFormat) -> Transformer:
    """Convert matrices of a model in place to storage formats such as int8, and all other weights to fp32.

    Args:
        module: the model on the CPU, or on the meta device with entries to be filled later.
        formats: formats by the address of a linear layer, a table or experts; other addresses have no effect. A single
            format applies to every matrix that it can store.

    Raises:
        InputError: the model has no matrix for the requested format, or a format cannot store a matrix.
    """
    formats = require_formats(module, formats) if isinstance(formats, StorageFormat) else formats
    for address, submodule in list(module.named_modules()):
        mixin = next((mixin for plain, mixin in MIXINS.items() if isinstance(submodule, plain)), None)
        if mixin is None or address not in formats:
            continue
        weight = submodule.weight
        assert isinstance(weight, Tensor)
        if not formats[address].holds(weight.shape):
            name, shape = formats[address].name, list(weight.shape)
            raise InputError(f"'{address}' has the shape {shape}, which {name} cannot store")
        stored = submodule if isinstance(submodule, Stored) else override(submodule, mixin)
        stored.format = formats[address]
        stored.put(weight)
    for submodule in module.modules() if formats else ():
        for name, parameter in submodule.named_parameters(recurse=False):
            if not isinstance(submodule, Stored) or name != "weight":
                parameter.data = parameter.data.float()
            parameter.requires_grad_(False)
    return module


def keep_16_bits(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, StorageFormat]:
    """Return the formats that keep a file's 16-bit matrices, by address; none for a small model, which is fast in fp32.

    Args:
        module: a module on any device.
        dtypes: dtypes in the file, by the addresses of weights.
    """
    formats = {
        address: IN_16_BITS[dtype]
        for address in choose_formats(module, BF16)
        if (dtype := dtypes[f"{address}.weight"]) in IN_16_BITS
    }
    count = sum(module.get_parameter(f"{address}.weight").numel() for address in formats)
    return formats if count >= LEAST_WEIGHTS else {}


def matching_formats(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, StorageFormat]:
    """Return the formats in which saved tensors store the matrices of a module, by address.

    Quantized matrices are recognized by the names of their entries. A 16-bit matrix counts as stored if other tensors
    are fp32: the module then computes in fp32.
    """
    formats = formats_of(tensors)
    if any(tensor.dtype == torch.float32 for tensor in tensors.values()):
        for address in choose_formats(module, BF16):
            weight = tensors.get(f"{address}.weight")
            if weight is not None and weight.dtype in IN_16_BITS:
                formats[address] = IN_16_BITS[weight.dtype]
    return formats


@dataclass(frozen=True)
class WeightPlan:
    """The dtype or format in which each weight of one model is held in memory.

    Args:
        dtype: dtype of all weights that are not stored.
        formats: formats of stored matrices, by the addresses of their modules.
    """

    dtype: torch.dtype
    formats: Mapping[str, StorageFormat]

    def keeps(self, address: str, dtype: torch.dtype) -> bool:
        """Return whether a weight of this dtype needs no conversion, and may stay in its mapped file."""
        kind = self._format(address)
        return dtype == (self.dtype if kind is None else kind.entries[0].dtype)

    def hold(self, address: str, tensor: Tensor) -> dict[str, Tensor]:
        """Convert a weight to its planned dtype or format; return the resulting tensors by address."""
        owner, kind = address.rpartition(".")[0], self._format(address)
        if kind is not None:
            return {f"{owner}.{name}": entry for name, entry in zip(kind.names, kind.encode(tensor), strict=True)}
        if tensor.dtype != self.dtype:
            tensor = huge_pages.allocate(tensor.shape, self.dtype, tensor.device).copy_(tensor)
        return {address: tensor}

    def outline(self, address: str, slot: Tensor) -> dict[str, Tensor]:
        """Return the tensors that `hold` would return, on the meta device; `slot` is the weight on that device."""
        if self._format(address) is None:
            return {address: slot.to(self.dtype)}
        # Converting one row is enough: the first axis of every entry is the rows.
        row = self.hold(address, slot[:1])
        return {name: entry.new_empty(len(slot), *entry.shape[1:]) for name, entry in row.items()}

    def num_bytes(self, address: str, slot: Tensor) -> int:
        """Return the number of bytes that a weight takes in memory; `slot` is the weight on the meta device."""
        return sum(tensor.nbytes for tensor in self.outline(address, slot).values())

    def _format(self, address: str) -> StorageFormat | None:
        owner, _, name = address.rpartition(".")
        return self.formats.get(owner) if name == "weight" else None


@dataclass(frozen=True)
class WeightForm:
    """Rule that decides in which dtype or storage format a load keeps each weight, for any model.

    Args:
        dtype: dtype of all weights that are not stored.
        choose: function that returns the formats of the matrices to store, by the addresses of their modules. It gets a
            module on the meta device, and the dtypes of the file by the addresses of weights. None stores none.
    """

    dtype: torch.dtype = torch.float32
    choose: Callable[[nn.Module, Mapping[str, torch.dtype]], Mapping[str, StorageFormat]] | None = None

    def plan(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> WeightPlan:
        """Return the plan for one model."""
        return WeightPlan(self.dtype, {} if self.choose is None else self.choose(module, dtypes))


def stored_matrices(module: nn.Module) -> dict[str, StorageFormat]:
    """Return the storage format, such as int8, of each matrix that has one, by the address of its module."""
    return {address: submodule.format for address, submodule in module.named_modules() if isinstance(submodule, Stored)}


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model in a form that can be changed: fp32 if matrices are stored in 16 bits."""
    state = module.state_dict()
    return {name: tensor.float() for name, tensor in state.items()} if stored_matrices(module) else state


def state_to_save(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights to save; if all stored matrices share a 16-bit dtype, so do weights that are exact in it."""
    state, kinds = module.state_dict(), set(stored_matrices(module).values())
    if kinds not in ({BF16}, {FP16}):
        return state
    dtype = kinds.pop().entries[0].dtype
    shorts = {name: tensor.to(dtype) for name, tensor in state.items() if tensor.dtype == torch.float32}
    return state | {name: short for name, short in shorts.items() if torch.equal(short.float(), state[name])}


def is_quantized(module: nn.Module) -> bool:
    """Return whether a model has matrices that were rounded to fewer than 16 bits."""
    return any(not kind.is_exact for kind in stored_matrices(module).values())


def narrowest(formats: Mapping[str, StorageFormat]) -> StorageFormat | None:
    """Return the quantized format that names a model: int4 if a matrix has it, else int8; None without any."""
    return max((kind for kind in formats.values() if kind in QUANTIZED), key=QUANTIZED.index, default=None)


def refuse_quantized(module: nn.Module, purpose: str) -> None:
    """Refuse a model with quantized weights for work that needs full precision.

    Raises:
        InputError: the model is quantized.
    """
    names = sorted({kind.name for kind in stored_matrices(module).values() if not kind.is_exact})
    if names:
        raise InputError(
            f"{purpose} needs full-precision weights, but this model has them in {' and '.join(names)}: load it as fp32"
        )


def formats_of(tensors: Mapping[str, Tensor]) -> dict[str, StorageFormat]:
    """Return the format of each quantized matrix in a file, by the address of its module.

    Args:
        tensors: tensors of the file, by address.
    """
    by_entry = {kind.names[0]: kind for kind in QUANTIZED}
    owners = (name.rpartition(".") for name in tensors)
    return {owner: by_entry[entry] for owner, _, entry in owners if entry in by_entry}


def widen_weights(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by address, with quantized weights widened to fp32, one at a time.

    Args:
        tensors: tensors of a file in which `weight_faults` finds nothing, or of a module's state.
    """
    kinds = formats_of(tensors)
    for name, tensor in tensors.items():
        owner, _, entry = name.rpartition(".")
        kind = kinds.get(owner)
        if kind is None or entry not in kind.names:
            yield name, tensor
        elif entry == kind.names[0]:
            yield f"{owner}.weight", kind.widen(*(tensors[f"{owner}.{other}"] for other in kind.names))


def repair(tensors: Mapping[str, Tensor]) -> None:
    """Bring the values of quantized matrices from a file into the range that kernels expect, in place."""
    for owner, kind in formats_of(tensors).items():
        kind.repair(tensors[f"{owner}.{kind.names[0]}"])


def weight_faults(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each tensor of a file whose dtype or shape no weight can have.

    A quantized matrix has every entry of its format, with equal rows. All other tensors of its model are fp32.
    """
    kinds = formats_of(tensors)
    names = {name for kind in QUANTIZED for name in kind.names}
    for address, tensor in tensors.items():
        owner, _, name = address.rpartition(".")
        kind = kinds.get(owner)
        entry = None if kind is None else next((entry for entry in kind.entries if entry.name == name), None)
        expected = (torch.float32,) if kinds else FLOATS
        if entry is not None:
            expected = (entry.dtype,)
        if tensor.dtype not in expected:
            yield f"'{address}' must hold {_dtypes(*expected)}, got {_dtypes(tensor.dtype)}"
        elif entry is None and name in names:
            yield f"'{address}' belongs to a quantized matrix that the file lacks"
        elif kind is not None and name == kind.names[0]:
            yield from _entry_faults(owner, kind, tensors)


def _entry_faults(owner: str, kind: StorageFormat, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each tensor of a quantized matrix that is missing or has a wrong shape."""
    matrix = tensors[f"{owner}.{kind.names[0]}"]
    for entry in kind.entries:
        tensor = tensors.get(f"{owner}.{entry.name}")
        if tensor is None:
            yield f"'{owner}.{kind.names[0]}' is incomplete: the file lacks its '{entry.name}'"
        elif tensor.dim() != entry.num_axes or tensor.shape[:1] != matrix.shape[:1]:
            yield f"'{owner}.{entry.name}' has the shape {list(tensor.shape)}, and its matrix {list(matrix.shape)}"


def _dtypes(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
