"""Rules that rearrange the tensors of a checkpoint into the parameters and buffers (slots) of a module, and back.

A rule names tensors on both sides and the transforms between them: "theirs" are tensors of a Hugging Face checkpoint,
"ours" are tensors of clearhead. Every transform can be reversed without arithmetic, so saving is exact bit for bit. A
name may contain a placeholder for a number, such as {layer}. A placeholder in their name alone numbers the tensors that
are stacked in one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead import spec

LEAVES = ("weight", "bias")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Slots:
    """Parameters and buffers that a rule fills: their shapes, and the attention that they belong to, if any."""

    shapes: tuple[torch.Size, ...]
    attention: spec.Attention | None


@dataclass(frozen=True)
class Transpose:
    """Transform for matrices stored as [in, out]: swaps the last two axes."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Transpose matrices, but not vectors."""
        return [tensor.transpose(-1, -2) if tensor.dim() > 1 else tensor for tensor in tensors]

    save = load


@dataclass(frozen=True)
class SplitRows:
    """Transform for one tensor that contains the rows of several slots, block after block along an axis."""

    axis: int = 0

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the tensor of the checkpoint into one tensor for each slot."""
        (tensor,) = tensors
        sizes = [shape[self.axis] for shape in slots.shapes]
        if tensor.dim() <= self.axis or sum(sizes) != tensor.shape[self.axis]:
            raise ValueError(f"{sum(sizes)} rows are needed")
        return list(tensor.split(sizes, dim=self.axis))

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Concatenate the blocks."""
        return [torch.cat(tensors, dim=self.axis)]


@dataclass(frozen=True)
class InterleavedRows:
    """Transform for stacked matrices whose even rows fill one slot and whose odd rows fill another slot."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Separate even and odd rows, along the second axis."""
        (tensor,) = tensors
        if tensor.dim() < 2 or tensor.shape[1] % 2:
            raise ValueError("an even number of rows is needed")
        return [tensor[:, 0::2], tensor[:, 1::2]]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Interleave the rows of both tensors again."""
        return [torch.stack(tensors, dim=2).flatten(1, 2)]


@dataclass(frozen=True)
class GroupedQKV:
    """Transform for query, key and value in one tensor, group by group: rows (K, G + 2, D), G queries per key.

    Dimensions: K key heads, G query heads per key head, D head size.
    """

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the fused tensor into a query, a key and a value tensor."""
        (tensor,) = tensors
        kv_heads, queries, size = self._sizes(slots)
        if tensor.shape[0] != kv_heads * (queries + 2) * size:
            raise ValueError(f"{kv_heads * (queries + 2) * size} rows are needed")
        groups = tensor.unflatten(0, (kv_heads, queries + 2, size))
        return [block.flatten(0, 2) for block in groups.split([queries, 1, 1], dim=1)]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Fuse query, key and value into one tensor: for each key head, its G queries, its key and its value."""
        kv_heads, _, size = self._sizes(slots)
        groups = [tensor.unflatten(0, (kv_heads, -1, size)) for tensor in tensors]
        return [torch.cat(groups, dim=1).flatten(0, 2)]

    def _sizes(self, slots: Slots) -> tuple[int, int, int]:
        assert slots.attention is not None
        kv_heads = slots.attention.num_kv_heads
        return kv_heads, slots.attention.num_heads // kv_heads, slots.attention.head_size


@dataclass(frozen=True)
class RotaryHalves:
    """Transform for rotated pairs (2i, 2i + 1) of each head: they become (i, i + half), the only layout of the core.

    Source: arXiv 2104.09864, eq. 34, for adjacent pairs.
    """

    axis: int = 0

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Put the even entries of each head's rotated part before the odd ones."""
        return self._reorder(tensors, slots, inverse=False)

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Interleave the two halves of each head's rotated part again."""
        return self._reorder(tensors, slots, inverse=True)

    def _reorder(self, tensors: list[Tensor], slots: Slots, *, inverse: bool) -> list[Tensor]:
        assert slots.attention is not None
        if slots.attention.position is None:
            return tensors
        size = slots.attention.head_size
        rotated = slots.attention.position.size or size
        order = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, size)])
        order = order.argsort() if inverse else order
        axis = self.axis
        if any(tensor.shape[axis] % size for tensor in tensors):
            raise ValueError(f"a multiple of {size} rows is needed")
        return [
            tensor.unflatten(axis, (-1, size)).index_select(axis + 1, order).flatten(axis, axis + 1)
            for tensor in tensors
        ]


@dataclass(frozen=True)
class StackNumbered:
    """Transform for numbered tensors, such as those of experts, that are stacked in one slot."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Stack the tensors along a new first axis."""
        return [torch.stack(tensors)]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Unstack the tensor along the first axis."""
        (tensor,) = tensors
        return list(tensor.unbind(0))


@dataclass(frozen=True)
class OneRow:
    """Transform for a vector that is stored as a matrix of one row."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Return the only row of the matrix."""
        (tensor,) = tensors
        if tensor.dim() != 2 or tensor.shape[0] != 1:
            raise ValueError("one row is needed")
        return [tensor[0]]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Return the vector as a matrix of one row."""
        return [tensors[0][None]]


Transform = Transpose | SplitRows | InterleavedRows | GroupedQKV | RotaryHalves | StackNumbered | OneRow
# Transforms whose results share the memory of their inputs.
VIEWS = (Transpose, SplitRows, OneRow)


@dataclass(frozen=True)
class Rule:
    """A rule from tensors of a checkpoint to slots of a module.

    Args:
        theirs: the names of one tensor of the checkpoint. The first is written. If a file has several with different
            values, the last is read.
        ours: the addresses of the slots in the module.
        transforms: the transforms in the order of loading.
        is_module: True if names and addresses belong to modules, with a weight and a bias.
        zeros: True if a file may lack the tensor, which is then all zeros.
        requires: another address that must exist in the module. None means no such condition.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    is_module: bool = True
    zeros: bool = False
    requires: str | None = None


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def module_rule(theirs: str, ours: str | tuple[str, ...], *transforms: Transform, requires: str | None = None) -> Rule:
    """Return the rule for the weight and bias of a module of the checkpoint, which fill one or several modules here."""
    return Rule((theirs,), _tuple(ours), transforms, requires=requires)


def tensor_rule(
    theirs: str | tuple[str, ...], ours: str | tuple[str, ...], *transforms: Transform, zeros: bool = False
) -> Rule:
    """Return the rule for one tensor by its full name."""
    return Rule(_tuple(theirs), _tuple(ours), transforms, is_module=False, zeros=zeros)


def attention_rules(theirs: str, ours: str, names: str = "q_proj k_proj v_proj o_proj") -> tuple[Rule, ...]:
    """Return the rules for the four projections of attention; `names` has the names q, k, v, out of the checkpoint."""
    addresses = ("query", "key", "value", "out")
    pairs = zip(names.split(), addresses, strict=True)
    return tuple(module_rule(f"{theirs}.{name}", f"{ours}.{address}") for name, address in pairs)


@dataclass(frozen=True)
class BoundRule:
    """A rule for the slots of one module: `theirs` has the possible names of each tensor in the checkpoint."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    transforms: tuple[Transform, ...]
    slots: Slots
    zeros: bool = False

    @property
    def is_view(self) -> bool:
        """True if the loaded tensors share the memory of the tensors in the checkpoint."""
        return all(isinstance(transform, VIEWS) for transform in self.transforms)

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert tensors of the checkpoint to tensors of clearhead.

        Raises:
            ValueError: the sizes do not fit; its text is the end of a sentence that names the tensor.
        """
        result = list(tensors)
        for transform in self.transforms:
            result = transform.load(result, self.slots)
        return result

    def save_shape(self) -> torch.Size:
        """Return the shape that the first tensor in the checkpoint must have."""
        return self.save([torch.empty(shape, device="meta") for shape in self.slots.shapes])[0].shape

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert tensors of clearhead back to tensors of the checkpoint."""
        result = list(tensors)
        for transform in reversed(self.transforms):
            result = transform.save(result, self.slots)
        return result


def bind(rules: Sequence[Rule], tensors: Mapping[str, Tensor], model: spec.Model) -> tuple[list[BoundRule], list[str]]:
    """Bind rules to the slots of a module.

    Args:
        rules: the rules of the family, with the prefix in their names.
        tensors: the tensors of the module by address; only their shapes matter.
        model: the spec of the module.

    Returns:
        The bound rules, and the addresses without a rule.
    """
    nodes = {path: node for path, node in spec.walk(model) if isinstance(node, spec.Attention)}
    by_address: dict[str, BoundRule] = {}
    for rule in rules:
        for suffix in [f".{leaf}" for leaf in LEAVES] if rule.is_module else [""]:
            first = _pattern(rule.ours[0] + suffix)
            for address in tensors:
                match = first.fullmatch(address)
                if match is not None and address not in by_address:
                    bound = _bind_rule(rule, suffix, match.groupdict(), tensors, nodes)
                    if bound is not None:
                        by_address |= dict.fromkeys(bound.ours, bound)
    bounds = list({id(bound): bound for bound in by_address.values()}.values())
    return bounds, [address for address in tensors if address not in by_address]


def _bind_rule(
    rule: Rule, suffix: str, numbers: dict[str, str], tensors: Mapping[str, Tensor], nodes: Mapping[str, spec.Attention]
) -> BoundRule | None:
    """Return a rule bound to the slots with given numbers in their addresses; None if the module lacks one of them."""
    ours = tuple(address.format(**numbers) + suffix for address in rule.ours)
    needed = ours if rule.requires is None else (*ours, rule.requires.format(**numbers))
    if not all(address in tensors for address in needed):
        return None
    slots = Slots(tuple(tensors[address].shape for address in ours), _attention_of(ours[0], nodes))
    names = [name + suffix for name in rule.theirs]
    return BoundRule(_names(names, numbers, slots), ours, rule.transforms, slots, rule.zeros)


def _pattern(address: str) -> re.Pattern[str]:
    pieces = _PLACEHOLDER.split(address)
    return re.compile("".join(rf"(?P<{piece}>\d+)" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


def _names(patterns: list[str], numbers: dict[str, str], slots: Slots) -> tuple[tuple[str, ...], ...]:
    counted = [name for name in _PLACEHOLDER.findall(patterns[0]) if name not in numbers]
    if not counted:
        return (tuple(pattern.format(**numbers) for pattern in patterns),)
    indices = range(slots.shapes[0][0])
    return tuple(tuple(p.format(**numbers, **{counted[0]: index}) for p in patterns) for index in indices)


def _attention_of(address: str, nodes: Mapping[str, spec.Attention]) -> spec.Attention | None:
    parts = address.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((nodes[path] for path in paths if path in nodes), None)
