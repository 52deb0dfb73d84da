"""Result of a surgery operation: the new model, and a report on the origin of every tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from clearhead.base.printing import Printed, block
from clearhead.core import Transformer
from clearhead.model.facade import Model

AnyModel = TypeVar("AnyModel", Transformer, Model)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, repr=False)
class SurgeryReport:
    """Origin of every tensor of an edited model, by address.

    Args:
        copied: the new address of each unchanged tensor -> its old address.
        changed: the new address of each tensor that was cut, extended or computed -> the address of its old tensor.
        new: the addresses of newly initialized tensors.
        dropped: the old addresses of tensors that no new tensor uses.
        notes: remarks about the operation.
    """

    copied: Mapping[str, str]
    changed: Mapping[str, str]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines of text; equal addresses in several layers share one line."""
        parts = {"copied": tuple(self.copied), "changed": tuple(self.changed), "new": self.new, "dropped": self.dropped}
        lines = []
        for name, addresses in parts.items():
            lines.append(f"{name}: {len(addresses)} tensor{'' if len(addresses) == 1 else 's'}")
            if name != "copied":
                lines += [f"  {line}" for line in _fold_layers(addresses)]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return block(self.lines(), more="lines() has all")


@dataclass(frozen=True, repr=False)
class EditedModel(Printed, Generic[AnyModel]):
    """Result of a surgery operation: the new model, and a report of its tensors.

    Args:
        model: the new model, of the same kind as the old one: a module, or a model with its tokenizers.
        report: the origin of every tensor.
    """

    model: AnyModel
    report: SurgeryReport


def _fold_layers(addresses: Iterable[str]) -> list[str]:
    """Merge addresses that differ only in their first number into one address with a star and a count."""
    groups: dict[str, list[str]] = {}
    for address in addresses:
        groups.setdefault(_NUMBER.sub("*", address, count=1), []).append(address)
    return [group[0] if len(group) == 1 else f"{form} ({len(group)})" for form, group in groups.items()]
