"""What an operation gives back: the new model, and what became of every tensor."""

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
    """What became of every tensor, by address.

    Args:
        copied: addresses of the new model whose tensors are those of the old one, every number of them, with the
            addresses that they had.
        changed: addresses whose tensors come from the old model with rows or columns left out, added or computed, with
            the addresses that they had.
        new: addresses whose tensors were drawn.
        dropped: addresses of the old model of which nothing is left.
        notes: what is worth knowing besides.
    """

    copied: Mapping[str, str]
    changed: Mapping[str, str]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines of text, in which equal places of many layers are one line."""
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
    """A new model, and how it came about; the old one is as it was.

    Args:
        model: of the kind that was given: a module, or a model with its tokenizers.
        report: what became of every tensor.
    """

    model: AnyModel
    report: SurgeryReport


def _fold_layers(addresses: Iterable[str]) -> list[str]:
    """Write addresses that differ in the number of their layer alone as one, with a star and how many they are."""
    groups: dict[str, list[str]] = {}
    for address in addresses:
        groups.setdefault(_NUMBER.sub("*", address, count=1), []).append(address)
    return [group[0] if len(group) == 1 else f"{form} ({len(group)})" for form, group in groups.items()]
