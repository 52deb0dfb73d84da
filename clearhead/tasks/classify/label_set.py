"""Label sets of classification, learned from training data: one class, several classes, or a number."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray

from clearhead.base.errors import InputError, did_you_mean, json_text, key, shorten
from clearhead.data.sources.tables import DataTable
from clearhead.spec.tasks.record import LabelKind

_MAX_SHOWN = 12
# If at least this many labels are all different, the column is probably the wrong one.
_SUSPICIOUS = 20


@dataclass(frozen=True)
class LabelSet:
    """The labels that a model predicts.

    Args:
        kind: the kind of labels: one class per text, any number of classes, or a number.
        names: the names of the classes, in the order of the model's outputs; empty for numbers.
        mean: the mean of the numbers in the training data.
        scale: the standard deviation of these numbers; the model learns (number - mean) / scale.
    """

    kind: LabelKind
    names: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @property
    def num_outputs(self) -> int:
        """The number of outputs of a head for these labels."""
        return 1 if self.kind == "regression" else len(self.names)

    def encode(self, data: DataTable) -> Int64[ndarray, " texts"] | Float[ndarray, "texts ..."]:
        """Return the labels as training targets.

        Args:
            data: a table with the labels of the source.

        Returns:
            The index of the class, or 1 or 0 for each class, or the number as (number - mean) / scale.

        Raises:
            InputError: a label is missing, unknown, or not a number.
        """
        if self.kind == "regression":
            return (_numbers(data) - self.mean) / self.scale
        index_of = {name: index for index, name in enumerate(self.names)}
        indices: list[list[int]] = []
        for row, names in enumerate(_names(data, self.kind)):
            for name in names:
                if name not in index_of:
                    raise self._unknown(name, data.location(row))
            indices.append([index_of[name] for name in names])
        if self.kind == "single_label":
            return np.array(indices, dtype=np.int64)[:, 0]
        sets = np.zeros((len(data), len(self.names)), dtype=np.float32)
        for row, its_indices in enumerate(indices):
            sets[row, its_indices] = 1.0
        return sets

    def _unknown(self, name: str, location: str) -> InputError:
        return InputError(
            f"{location}: the label {json_text(name)} is not among the {len(self.names)} labels of the training "
            f"data ({_format_names(self.names)}){did_you_mean(name, self.names)}; check " + key("labels")
        )

    def describe(self, data: DataTable) -> str:
        """Return a text with the count of each label in the data, or with the range of the numbers."""
        if self.kind == "regression":
            values = _numbers(data)
            return f"numbers from {values.min():g} to {values.max():g}"
        counts = _counts(data, self.kind)
        shares = [f"{name} {counts[name]:,}" for name in self.names]
        return f"{len(self.names)} labels: {_format_names(shares)}"


def learn_labels(data: DataTable, kind: LabelKind) -> LabelSet:
    """Return the label set of training data: classes sorted by number or name, or the mean and scale of numbers.

    Args:
        data: a table with the labels of the source.
        kind: the kind of labels.

    Raises:
        InputError: a label is missing or not a number, there is only one label, or every label is different.
    """
    location = data.location(0)
    if kind == "regression":
        values = _numbers(data)
        if np.all(values == values[0]):
            raise InputError(
                f"{location}: all {len(data)} labels from here on are the number {values[0]:g}, so there is nothing "
                "to learn; check " + key("labels")
            )
        return LabelSet(kind, mean=float(values.mean()), scale=float(values.std()))
    names = _counts(data, kind)
    if kind == "multi_label" and not names:
        raise InputError(f"{location}: none of the {len(data)} texts from here on has a label; check " + key("labels"))
    if kind == "single_label" and len(names) == 1:
        raise InputError(
            f"{location}: all {len(data)} texts from here on have the label {json_text(next(iter(names)))}; "
            "a classifier needs at least two classes: check " + key("labels")
        )
    if kind == "single_label" and len(names) == len(data) >= _SUSPICIOUS:
        numbers = ", or for a regression set " + key("task.labels", "regression") if all(map(_is_number, names)) else ""
        raise InputError(
            f"{location}: each of the {len(data)} texts from here on has a different label "
            f"({_format_names(sorted(names))}); check " + key("labels") + numbers
        )
    return LabelSet(kind, names=tuple(sorted(names, key=_order)))


def _order(name: str) -> tuple[int, float, str]:
    """Return the sort key of a class name: whole numbers sort by size, before other names in alphabetical order."""
    return (0, float(name), name) if re.fullmatch("-?[0-9]+", name) else (1, 0.0, name)


def _is_number(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(name))
    return False


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join(map(shorten, names[:_MAX_SHOWN])) + (f" and {more:,} more" if more > 0 else "")


def _counts(data: DataTable, kind: LabelKind) -> Counter[str]:
    """Return the number of examples with each class."""
    return Counter(itertools.chain.from_iterable(_names(data, kind)))


def _names(data: DataTable, kind: LabelKind) -> Iterator[list[str]]:
    """Yield the names of the distinct classes of each example."""
    for row, label in enumerate(data["labels"]):
        yield [_class(label, data.location(row))] if kind == "single_label" else _classes(label, data.location(row))


def _class(label: object, location: str) -> str:
    name = _name(label, location, "several labels per text need a model with " + key("task.labels", "multi_label"))
    if not name:
        raise InputError(f"{location}: the label is missing; expected the name of a class; complete or remove the line")
    return name


def _classes(label: object, location: str) -> list[str]:
    values = [label]
    if isinstance(label, list | tuple):
        values = [*label]
    elif isinstance(label, str):
        values = [*label.split(",")]
    names = [_name(value, location, "a list of labels must hold names") for value in values]
    return list(dict.fromkeys(filter(None, names)))


def _name(value: object, location: str, hint: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if value is None:
        return ""
    if isinstance(value, str):
        name = value.strip()
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise InputError(
                f"{location}: the label {json_text(name)} holds a lone surrogate, which is not valid Unicode; remove it"
            )
        return name
    if isinstance(value, float):
        hint = "numbers need a model with " + key("task.labels", "regression")
    raise InputError(f"{location}: the label is {json_text(value)}; expected the name of a class (" + hint + ")")


def _numbers(data: DataTable) -> Float[ndarray, " texts"]:
    """Return the regression labels of the examples as numbers."""
    return np.array([_number(label, data.location(row)) for row, label in enumerate(data["labels"])], dtype=np.float64)


def _number(value: object, location: str) -> float:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise InputError(
            f"{location}: the label is {json_text(value)}; expected a finite number, since this is regression "
            "(" + key("task.labels", "single_label") + " is the setting for classes)"
        )
    return number
