"""The labels of a task: one class, several classes or a number, as they occur in the training data."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray

from clearhead.data.sources.tables import Table
from clearhead.errors import InputError, json_text, key, nearest, shortened
from clearhead.tasks.record import LabelKind

_MOST_SHOWN = 12
# From this many on, labels that are all different are taken for a wrong column.
_SUSPICIOUS = 20


@dataclass(frozen=True)
class LabelSet:
    """The labels that a model can give.

    Args:
        kind: one class for each text, several of them or none, or a number.
        names: the classes in the order of the model's outputs; none for numbers.
        mean: of the numbers of the training data.
        scale: their standard deviation; a model learns (number - mean) / scale.
    """

    kind: LabelKind
    names: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @property
    def num_outputs(self) -> int:
        """Outputs of a head for these labels."""
        return 1 if self.kind == "regression" else len(self.names)

    def encode(self, data: Table) -> Int64[ndarray, " texts"] | Float[ndarray, "texts ..."]:
        """Return the labels as training targets.

        Args:
            data: the labels as the source has them.

        Returns:
            The index of the class; or for each class 1 or 0; or the number in units of the training data.

        Raises:
            InputError: a label is missing, unknown, or not a number.
        """
        if self.kind == "regression":
            values = [_number(label, data.place(index)) for index, label in enumerate(data["labels"])]
            return (np.array(values, dtype=np.float64) - self.mean) / self.scale
        index_of = {name: index for index, name in enumerate(self.names)}
        found = [
            [self._index(name, index_of, data, row) for name in _names(data, row, self.kind)]
            for row in range(len(data))
        ]
        if self.kind == "single_label":
            return np.array(found, dtype=np.int64)[:, 0]
        sets = np.zeros((len(data), len(self.names)), dtype=np.float32)
        for row, indices in enumerate(found):
            sets[row, indices] = 1.0
        return sets

    def _index(self, name: str, index_of: dict[str, int], data: Table, row: int) -> int:
        if name not in index_of:
            raise InputError(
                f"{data.place(row)}: the label {json_text(name)} is not among the {len(self.names)} of the training "
                f"data ({_listed(self.names)}){nearest(name, self.names)}; check " + key("labels")
            )
        return index_of[name]

    def describe(self, data: Table) -> str:
        """Return how often each label occurs in some data, or the range of its numbers."""
        if self.kind == "regression":
            values = [_number(label, data.place(index)) for index, label in enumerate(data["labels"])]
            return f"numbers from {min(values):g} to {max(values):g}"
        counts = _counts(data, self.kind)
        shares = [f"{name} {counts[name]:,}" for name in self.names]
        return f"{len(self.names)} labels: {_listed(shares)}"


def learn_labels(data: Table, kind: LabelKind) -> LabelSet:
    """Return the labels of training data: classes in order of number or name, numbers with their mean and deviation.

    Args:
        data: the labels as the source has them.
        kind: what a label is.

    Raises:
        InputError: a label is missing or not a number, there is only one label, or every label is different.
    """
    place = data.place(0)
    if kind == "regression":
        values = np.array([_number(label, data.place(index)) for index, label in enumerate(data["labels"])])
        if np.all(values == values[0]):
            raise InputError(
                f"{place}: all {len(data)} labels from here on are the number {values[0]:g}, and there is nothing to "
                "learn; check " + key("labels")
            )
        return LabelSet(kind, mean=float(values.mean()), scale=float(values.std()))
    names = _counts(data, kind)
    if kind == "multi_label" and not names:
        raise InputError(f"{place}: none of the {len(data)} texts from here on has a label; check " + key("labels"))
    if kind == "single_label" and len(names) == 1:
        raise InputError(
            f"{place}: all {len(data)} texts from here on have the label {json_text(next(iter(names)))}; "
            "a classifier needs at least two classes: check " + key("labels")
        )
    if kind == "single_label" and len(names) == len(data) >= _SUSPICIOUS:
        numbers = ", or for numbers set " + key("task.labels", "regression") if all(map(_is_number, names)) else ""
        raise InputError(
            f"{place}: each of the {len(data)} texts from here on has a label of its own ({_listed(sorted(names))}); "
            "check " + key("labels") + numbers
        )
    return LabelSet(kind, names=tuple(sorted(names, key=_order)))


def _order(name: str) -> tuple[int, float, str]:
    """Sort whole numbers by size, in front of words by their letters."""
    is_number = name.lstrip("-").isdecimal() and name.isascii()
    return (0, float(name), name) if is_number else (1, 0.0, name)


def _is_number(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(name))
    return False


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(map(shortened, names[:_MOST_SHOWN])) + (f" and {more:,} more" if more > 0 else "")


def _counts(data: Table, kind: LabelKind) -> Counter[str]:
    """Count how often each class occurs in some data."""
    return Counter(name for row in range(len(data)) for name in _names(data, row, kind))


def _names(data: Table, row: int, kind: LabelKind) -> list[str]:
    """Return the class of a row, or its classes, each once."""
    label, place = data["labels"][row], data.place(row)
    if kind == "single_label":
        name = _name(label, place, "several labels need a model with " + key("task.labels", "multi_label"))
        if not name:
            raise InputError(f"{place}: the label is missing; expected the name of a class, or no such line")
        return [name]
    parts = label if isinstance(label, list | tuple) else label.split(",") if isinstance(label, str) else [label]
    names = [_name(part, place, "a list of labels holds names") for part in parts]
    return list(dict.fromkeys(filter(None, names)))


def _name(value: object, place: str, hint: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if value is None:
        return ""
    if isinstance(value, str):
        name = value.strip()
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise InputError(f"{place}: the label {json_text(name)} holds a lone surrogate, which is not Unicode text")
        return name
    if isinstance(value, float):
        hint = "numbers need a model with " + key("task.labels", "regression")
    raise InputError(f"{place}: the label is {json_text(value)}; expected the name of a class (" + hint + ")")


def _number(value: object, place: str) -> float:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise InputError(
            f"{place}: the label is {json_text(value)}; expected a finite number, since this is regression "
            "(" + key("task.labels", "single_label") + " is for classes)"
        )
    return number
