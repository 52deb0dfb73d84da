"""Rules that convert tensors of a Hugging Face checkpoint to tensors of a module, and back.

A rule names tensors on both sides and the transforms between them: "theirs" are tensors of a Hugging Face checkpoint,
"ours" are tensors of clearhead. Every transform can be reversed without arithmetic, so saving is exact bit for bit. A
name may contain a placeholder for a number, such as {layer}. If only the checkpoint's name has the placeholder, the
numbered tensors are stacked into one tensor of clearhead. A slot is an entry of the module's state dict, which a tensor
fills.
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
    """State dict entries that a rule fills: their shapes, and the attention that contains them, or None."""

    shapes: tuple[torch.Size, ...]
    attention: spec.Attention | None


@dataclass(frozen=True)
class Transpose:
    """Transform for matrices that a checkpoint stores as [in, out]; it swaps the last two axes."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Return the tensors with matrices transposed and vectors unchanged."""
        return [tensor.transpose(-1, -2) if tensor.dim() > 1 else tensor for tensor in tensors]

    save = load


@dataclass(frozen=True)
class SplitRows:
    """Transform for a fused checkpoint tensor, such as query, key and value one after the other along an axis."""

    axis: int = 0

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the fused tensor into one tensor for each entry of the state dict."""
        (tensor,) = tensors
        sizes = [shape[self.axis] for shape in slots.shapes]
        if tensor.dim() <= self.axis or sum(sizes) != tensor.shape[self.axis]:
            raise ValueError(f"{sum(sizes)} rows are needed")
        return list(tensor.split(sizes, dim=self.axis))

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Concatenate the module's tensors to the fused tensor."""
        return [torch.cat(tensors, dim=self.axis)]


@dataclass(frozen=True)
class InterleavedRows:
    """Transform for a stack of fused matrices: even rows belong to one tensor of the module, odd rows to another."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the fused tensor into its even and its odd rows, along the second axis."""
        (tensor,) = tensors
        if tensor.dim() < 2 or tensor.shape[1] % 2:
            raise ValueError("an even number of rows is needed")
        return [tensor[:, 0::2], tensor[:, 1::2]]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Interleave the rows of two tensors of the module in the fused tensor."""
        return [torch.stack(tensors, dim=2).flatten(1, 2)]


@dataclass(frozen=True)
class GroupedQKV:
    """Transform for fused query, key and value, ordered by key head: rows [K, G + 2, D] with G queries, key and value.

    Dimensions: K key heads, G query heads per key head, D head size.
    """

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the fused tensor into the weights of query, key and value."""
        (tensor,) = tensors
        kv_heads, queries, size = self._sizes(slots)
        if tensor.shape[0] != kv_heads * (queries + 2) * size:
            raise ValueError(f"{kv_heads * (queries + 2) * size} rows are needed")
        groups = tensor.unflatten(0, (kv_heads, queries + 2, size))
        return [block.flatten(0, 2) for block in groups.split([queries, 1, 1], dim=1)]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Fuse the weights of query, key and value, ordered by key head."""
        kv_heads, _, size = self._sizes(slots)
        groups = [tensor.unflatten(0, (kv_heads, -1, size)) for tensor in tensors]
        return [torch.cat(groups, dim=1).flatten(0, 2)]

    def _sizes(self, slots: Slots) -> tuple[int, int, int]:
        assert slots.attention is not None
        kv_heads = slots.attention.num_kv_heads
        return kv_heads, slots.attention.num_heads // kv_heads, slots.attention.head_size


@dataclass(frozen=True)
class RotaryHalves:
    """Transform for RoPE that rotates adjacent pairs (2i, 2i + 1); it reorders each head for the core's (i, i + half).

    Source: arXiv 2104.09864, eq. 34, for adjacent pairs.
    """

    axis: int = 0

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Reorder the rotated channels of each head: even channels first, then odd channels."""
        return self._reorder(tensors, slots, inverse=False)

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Reorder the rotated channels of each head back to adjacent pairs."""
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
class SwapHalves:
    """Transform for RoPE that rotates by the negative angle: it swaps the two halves of each head.

    Source: arXiv 2104.09864, eq. 34; swapped halves reverse the sign of its sines.
    """

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Swap the first and the second half of the rows of each head."""
        assert slots.attention is not None
        half = slots.attention.head_size // 2
        if any(tensor.shape[0] % (2 * half) for tensor in tensors):
            raise ValueError(f"a multiple of {2 * half} rows is needed")
        return [tensor.unflatten(0, (-1, 2, half)).flip(1).flatten(0, 2) for tensor in tensors]

    save = load


@dataclass(frozen=True)
class StackNumbered:
    """Transform for numbered checkpoint tensors, such as one per expert, that the module stacks in one tensor."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Stack the numbered tensors along a new first axis."""
        return [torch.stack(tensors)]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Split the module's tensor along its first axis into the numbered tensors."""
        (tensor,) = tensors
        return list(tensor.unbind(0))


@dataclass(frozen=True)
class OneRow:
    """Transform for a vector that the checkpoint stores as a matrix of one row."""

    def load(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Return the only row of the checkpoint's matrix as a vector."""
        (tensor,) = tensors
        if tensor.dim() != 2 or tensor.shape[0] != 1:
            raise ValueError("one row is needed")
        return [tensor[0]]

    def save(self, tensors: list[Tensor], slots: Slots) -> list[Tensor]:
        """Return the module's vector as a matrix of one row."""
        return [tensors[0][None]]


Transform = Transpose | SplitRows | InterleavedRows | GroupedQKV | RotaryHalves | SwapHalves | StackNumbered | OneRow
# Transforms whose results share the memory of their inputs.
VIEWS = (Transpose, SplitRows, OneRow)


@dataclass(frozen=True)
class Rule:
    """A rule for one or several tensors: names in the checkpoint, addresses in the module, and transforms.

    Args:
        theirs: the alternative names of one tensor in a checkpoint. The first name is written. If a file has
            different tensors of several names, the last is read.
        ours: the addresses of the tensors in the module's state dict.
        transforms: the transforms in the order in which loading applies them.
        is_module: True if names and addresses belong to modules, with a weight and a bias.
        zeros: True if a file may lack the tensor, which is then all zeros.
        requires: another address that the module must have for the rule to apply. None means no such condition.
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
    """Return the rule for weight and bias of a module in the checkpoint, which fill one or several of our modules."""
    return Rule((theirs,), _tuple(ours), transforms, requires=requires)


def tensor_rule(
    theirs: str | tuple[str, ...], ours: str | tuple[str, ...], *transforms: Transform, zeros: bool = False
) -> Rule:
    """Return the rule for one checkpoint tensor by its full name, such as `lm_head.bias`."""
    return Rule(_tuple(theirs), _tuple(ours), transforms, is_module=False, zeros=zeros)


def attention_rules(theirs: str, ours: str, names: str = "q_proj k_proj v_proj o_proj") -> tuple[Rule, ...]:
    """Return the rules for attention's projections; `names` are the checkpoint's names of query, key, value and out."""
    addresses = ("query", "key", "value", "out")
    pairs = zip(names.split(), addresses, strict=True)
    return tuple(module_rule(f"{theirs}.{name}", f"{ours}.{address}") for name, address in pairs)


@dataclass(frozen=True)
class BoundRule:
    """A rule with numbers in place of its placeholders; `theirs` has the alternative names of each tensor."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    transforms: tuple[Transform, ...]
    slots: Slots
    zeros: bool = False

    @property
    def is_view(self) -> bool:
        """True if the module's tensors share the memory of the checkpoint's tensors."""
        return all(isinstance(transform, VIEWS) for transform in self.transforms)

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert the checkpoint's tensors to the module's tensors.

        Raises:
            ValueError: the sizes do not fit; its text is the end of a sentence that names the tensor.
        """
        result = list(tensors)
        for transform in self.transforms:
            result = transform.load(result, self.slots)
        return result

    def save_shape(self) -> torch.Size:
        """Return the shape that the first of the rule's checkpoint tensors must have."""
        return self.save([torch.empty(shape, device="meta") for shape in self.slots.shapes])[0].shape

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert the module's tensors back to the checkpoint's tensors."""
        result = list(tensors)
        for transform in reversed(self.transforms):
            result = transform.save(result, self.slots)
        return result


def bind(rules: Sequence[Rule], tensors: Mapping[str, Tensor], model: spec.Model) -> tuple[list[BoundRule], list[str]]:
    """Apply rules to the state dict of a module, with numbers in place of placeholders such as {layer}.

    Args:
        rules: the rules of the family, with the prefix in their names.
        tensors: the module's state dict; only the shapes matter.
        model: the spec of the module.

    Returns:
        The bound rules, and the addresses in the state dict without a rule.
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
    """Return a rule with numbers in place of its placeholders; None if the module lacks one of the rule's addresses."""
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
