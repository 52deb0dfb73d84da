"""How the tensors of a checkpoint become ours, and back: rules that are data, each a pure permutation.

A rule names tensors on both sides and the steps between them. Since every step can be undone without arithmetic, what
is saved is derived from what is loaded, bit by bit. A name may hold a placeholder such as {layer}; on our side it
stands for a number in an address, and one that stands on their side only counts the tensors that make one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead import spec

LEAVES = ("weight", "bias")
_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Slots:
    """Where a rule acts: the shapes of our tensors, and the attention they belong to, if to any."""

    shapes: tuple[torch.Size, ...]
    attention: spec.Attention | None


@runtime_checkable
class Change(Protocol):
    """One step from their tensors to ours, that can be undone."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Turn their tensors into ours, or a step nearer."""
        ...

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Undo `load`."""
        ...


@dataclass(frozen=True)
class Transpose:
    """Matrices that are stored [in, out]; the last two axes change places."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Turn every matrix; a vector has nothing to turn."""
        return [tensor.transpose(-1, -2) if tensor.dim() > 1 else tensor for tensor in tensors]

    save = load


@dataclass(frozen=True)
class Rows:
    """One tensor that holds the rows of several of ours, one block after the other, along an axis."""

    axis: int = 0

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Cut by the sizes of ours."""
        (tensor,) = tensors
        sizes = [shape[self.axis] for shape in place.shapes]
        if tensor.dim() <= self.axis or sum(sizes) != tensor.shape[self.axis]:
            raise ValueError(f"{sum(sizes)} rows are needed")
        return list(tensor.split(sizes, dim=self.axis))

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Join the blocks."""
        return [torch.cat(tensors, dim=self.axis)]


@dataclass(frozen=True)
class Grouped:
    """Queries, keys and values that stand together group by group: rows (K, G + 2, D), G queries to each key."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Collect the queries, the keys and the values of all groups."""
        (tensor,) = tensors
        kv_heads, queries, size = self._sizes(place)
        if tensor.shape[0] != kv_heads * (queries + 2) * size:
            raise ValueError(f"{kv_heads * (queries + 2) * size} rows are needed")
        groups = tensor.unflatten(0, (kv_heads, queries + 2, size))
        return [part.flatten(0, 2) for part in groups.split([queries, 1, 1], dim=1)]

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Deal them out to their groups again."""
        kv_heads, _, size = self._sizes(place)
        groups = [tensor.unflatten(0, (kv_heads, -1, size)) for tensor in tensors]
        return [torch.cat(groups, dim=1).flatten(0, 2)]

    def _sizes(self, place: Slots) -> tuple[int, int, int]:
        assert place.attention is not None
        kv_heads = place.attention.num_kv_heads
        return kv_heads, place.attention.num_heads // kv_heads, place.attention.head_size


@dataclass(frozen=True)
class Halves:
    """Rotated pairs (2i, 2i + 1) of each head become (i, i + half): the scores do not change, the core knows one form.

    Source: arXiv 2104.09864, eq. 34, for pairs of neighbours.
    """

    axis: int = 0

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Put the even entries of each head's rotated part before the odd ones."""
        return self._reorder(tensors, place, inverse=False)

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Put them back in turns."""
        return self._reorder(tensors, place, inverse=True)

    def _reorder(self, tensors: list[Tensor], place: Slots, *, inverse: bool) -> list[Tensor]:
        assert place.attention is not None
        if place.attention.position is None:
            return tensors
        size = place.attention.head_size
        turned = place.attention.position.size or size
        order = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, size)])
        order = order.argsort() if inverse else order
        axis = self.axis
        if any(tensor.shape[axis] % size for tensor in tensors):
            raise ValueError(f"a multiple of {size} rows is needed")
        return [
            tensor.unflatten(axis, (-1, size)).index_select(axis + 1, order).flatten(axis, axis + 1)
            for tensor in tensors
        ]


@dataclass(frozen=True)
class Stacked:
    """Tensors that are counted on their side, one above the other in one of ours."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Stack them along a new first axis."""
        return [torch.stack(tensors)]

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Take them apart."""
        (tensor,) = tensors
        return list(tensor.unbind(0))


@dataclass(frozen=True)
class OneRow:
    """A vector that is stored as a matrix of one row."""

    def load(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Take the row."""
        (tensor,) = tensors
        if tensor.dim() != 2 or tensor.shape[0] != 1:
            raise ValueError("one row is needed")
        return [tensor[0]]

    def save(self, tensors: list[Tensor], place: Slots) -> list[Tensor]:
        """Make it a matrix again."""
        return [tensors[0][None]]


# The changes that leave a tensor where it lies.
VIEWS = (Transpose, Rows, OneRow)


@dataclass(frozen=True)
class Rule:
    """Which of their tensors make which of ours.

    Args:
        theirs: a name, or several for one tensor: the first is written; where they differ, the last is what is read.
        ours: addresses.
        changes: what lies between, in the order of loading.
        leaves: whether names and addresses are of modules, whose weight and bias are both meant.
        zeros: whether a file may leave the tensor out, which then is all zeros.
        beside: an address that must exist too, where the same address has another name without it.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    leaves: bool = True
    zeros: bool = False
    beside: str | None = None


def module_rule(theirs: str, ours: str | tuple[str, ...], *changes: Change, beside: str | None = None) -> Rule:
    """Weight and bias of one of their modules, in one of ours or in several."""
    return Rule((theirs,), (ours,) if isinstance(ours, str) else ours, changes, beside=beside)


def tensor_rule(
    theirs: str | tuple[str, ...], ours: str | tuple[str, ...], *changes: Change, zeros: bool = False
) -> Rule:
    """One tensor, by its full name."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Rule(names, (ours,) if isinstance(ours, str) else ours, changes, leaves=False, zeros=zeros)


@dataclass(frozen=True)
class BoundRule:
    """A rule at one place of one model: `theirs` has, for each tensor, its names."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    changes: tuple[Change, ...]
    place: Slots
    zeros: bool = False

    @property
    def is_view(self) -> bool:
        """Whether ours lie in the memory of theirs; otherwise they are copies."""
        return all(isinstance(change, VIEWS) for change in self.changes)

    def load(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Turn their tensors into ours.

        Raises:
            ValueError: the sizes do not allow it; the text ends a sentence that names the tensor.
        """
        result = list(tensors)
        for change in self.changes:
            result = change.load(result, self.place)
        return result

    def save_shape(self) -> torch.Size:
        """Return the shape that their first tensor must have."""
        return self.save([torch.empty(shape, device="meta") for shape in self.place.shapes])[0].shape

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Turn ours into theirs."""
        result = list(tensors)
        for change in reversed(self.changes):
            result = change.save(result, self.place)
        return result


def bind(rules: Sequence[Rule], slots: Mapping[str, Tensor], model: spec.Model) -> tuple[list[BoundRule], list[str]]:
    """Find every place of a model where a rule holds.

    Args:
        rules: of the architecture, names already with their prefix.
        slots: our tensors by address; only their shapes matter.
        model: the spec of the same model.

    Returns:
        the bound rules, and the addresses that no rule speaks of.
    """
    nodes = {path: node for path, node in spec.walk(model) if isinstance(node, spec.Attention)}
    found: dict[str, BoundRule] = {}
    for rule in rules:
        for leaf in LEAVES if rule.leaves else ("",):
            dotted = f".{leaf}" if leaf else ""
            first = _pattern(rule.ours[0] + dotted)
            for address in slots:
                match = first.fullmatch(address)
                if match is None or address in found:
                    continue
                if rule.beside is not None and rule.beside.format(**match.groupdict()) not in slots:
                    continue
                ours = tuple(ours.format(**match.groupdict()) + dotted for ours in rule.ours)
                if all(one in slots for one in ours):
                    place = Slots(tuple(slots[one].shape for one in ours), _attention_of(ours[0], nodes))
                    names = [name + dotted for name in rule.theirs]
                    bound = BoundRule(_names(names, match.groupdict(), place), ours, rule.changes, place, rule.zeros)
                    found |= dict.fromkeys(ours, bound)
    return list({id(bound): bound for bound in found.values()}.values()), [one for one in slots if one not in found]


def _pattern(address: str) -> re.Pattern[str]:
    parts = _HOLE.split(address)
    return re.compile("".join(rf"(?P<{part}>\d+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


def _names(patterns: list[str], numbers: dict[str, str], place: Slots) -> tuple[tuple[str, ...], ...]:
    counted = [hole for hole in _HOLE.findall(patterns[0]) if hole not in numbers]
    if not counted:
        return (tuple(pattern.format(**numbers) for pattern in patterns),)
    count = place.shapes[0][0]
    return tuple(tuple(p.format(**numbers, **{counted[0]: index}) for p in patterns) for index in range(count))


def _attention_of(address: str, nodes: Mapping[str, spec.Attention]) -> spec.Attention | None:
    parts = address.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((nodes[path] for path in paths if path in nodes), None)
