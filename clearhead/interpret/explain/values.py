"""Values of an explanation: a formula, the numbers, and the lines of code that compute them.

Legend: T rows (tokens), C columns, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

PACKAGE = Path(__file__).parents[3]


@dataclass(frozen=True)
class Code:
    """Source code of a function.

    Args:
        path: path of the source file in the installed package, such as clearhead/core/attention.py.
        first: number of the first line.
        lines: source lines without their common indentation.
    """

    path: str
    first: int
    lines: tuple[str, ...]

    @property
    def location(self) -> str:
        """Path and line numbers, such as clearhead/core/attention.py:97-99."""
        return f"{self.path}:{self.first}-{self.first + len(self.lines) - 1}"


@cache
def code_of(function: Callable[..., Any]) -> Code:
    """Return the source code of a function, read from the installed package.

    Args:
        function: function of a module on disk.
    """
    lines, first = inspect.getsourcelines(function)
    text = inspect.cleandoc("\n" + "".join(lines))
    file = Path(inspect.getsourcefile(function) or "")
    path = file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else file.name
    return Code(path, first, tuple(text.splitlines()))


@dataclass(frozen=True)
class Value:
    """Value of the forward pass, such as the queries of a layer.

    Args:
        name: name of the value, such as "query".
        formula: formula that computes it from earlier values.
        numbers: tensor [T, C], or [H, T, C] if each head has different numbers.
        address: address of the activation for `capture`; empty if it is computed from captured activations.
        code: code that computes it. None means that no single function does.
        columns: names of the columns. None means that the columns are components of vectors.
        notes: one text per row, shown in place of the numbers; empty means that the numbers are shown.
        is_of_keys: True if the rows are keys, False if they are queries.
    """

    name: str
    formula: str
    numbers: Tensor
    address: str = ""
    code: Code | None = None
    columns: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    is_of_keys: bool = False

    @property
    def has_heads(self) -> bool:
        """Return whether each head has different numbers."""
        return self.numbers.dim() == 3

    def of_head(self, head: int) -> Tensor:
        """Return the numbers [T, C] of one head; if all heads have the same numbers, return these."""
        numbers: Tensor = self.numbers[head] if self.has_heads else self.numbers
        return numbers

    @property
    def shape(self) -> str:
        """The shape in words, such as "5 tokens x 768" or "12 heads x 5 tokens x 64"."""
        *heads, rows, columns = self.numbers.shape
        return " x ".join([*(f"{count} heads" for count in heads), f"{rows} tokens", str(columns)])


@dataclass(frozen=True)
class ExplanationSection:
    """Section of an explanation: the values that one module of a model computes.

    Args:
        title: title, such as "embedding", "layer 3, step 0: self-attention" or "head".
        address: address of the module.
        rows: tokens to which the rows of the section's values belong.
        values: values in the order of computation.
        layer: number of layers of its stack that ran before. None means outside of the layers.
        stack: "encoder" or "decoder"; "head" for the head of the model.
        keys: stack whose tokens are the keys of an attention. None means that the section has no attention.
    """

    title: str
    address: str
    rows: tuple[str, ...]
    values: tuple[Value, ...]
    layer: int | None = None
    stack: str = "head"
    keys: str | None = None

    def value(self, name: str) -> Value:
        """Return the value of the section that has the given name."""
        return next(value for value in self.values if value.name == name)


def heads_first(x_TI: Tensor, head_size: int) -> Tensor:
    """Reshape vectors [T, heads * head_size] to [heads, T, head_size]."""
    x_HTE: Tensor = x_TI.unflatten(-1, (-1, head_size)).transpose(0, 1)
    return x_HTE


def number_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names with their positions in front, such as "3 the", so that equal tokens get different names."""
    return tuple(f"{position} {name}" for position, name in enumerate(names))
