"""What an explanation consists of: values with their formulas, their numbers and the lines of code that compute them.

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
    """The lines of a function.

    Args:
        path: of its file, as of the installed package: clearhead/core/attention.py.
        first: the number of its first line.
        lines: its text, without the indentation that it stands in.
    """

    path: str
    first: int
    lines: tuple[str, ...]

    @property
    def location(self) -> str:
        """Where it stands: clearhead/core/attention.py:97-99."""
        return f"{self.path}:{self.first}-{self.first + len(self.lines) - 1}"


@cache
def code_of(function: Callable[..., Any]) -> Code:
    """Return the lines of a function, read from the installed source.

    Args:
        function: of a module on disk.
    """
    lines, first = inspect.getsourcelines(function)
    text = inspect.cleandoc("\n" + "".join(lines))
    file = Path(inspect.getsourcefile(function) or "")
    path = file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else file.name
    return Code(path, first, tuple(text.splitlines()))


@dataclass(frozen=True)
class Value:
    """A value of the forward pass.

    Args:
        name: in the field's words, such as "query".
        formula: how it follows from the values before it.
        numbers: [T, C], or [H, T, C] where each head has its own.
        address: of the activation, as for `capture`; empty: it is computed from what was captured.
        code: what computes it.
        columns: the names of the columns; None: they are the components of vectors.
        notes: a text for each row, in place of numbers that are too many.
        is_of_keys: its rows are the tokens that are looked at, not those that look.
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
        """Whether each head has numbers of its own."""
        return self.numbers.dim() == 3

    def of_head(self, head: int) -> Tensor:
        """Return the numbers [T, C] of a head, or those that all heads share."""
        numbers: Tensor = self.numbers[head] if self.has_heads else self.numbers
        return numbers

    @property
    def shape(self) -> str:
        """The shape in words: 5 tokens x 768, or 12 heads x 5 tokens x 64."""
        *heads, rows, columns = self.numbers.shape
        return " x ".join([*(f"{count} heads" for count in heads), f"{rows} tokens", str(columns)])


@dataclass(frozen=True)
class ExplanationSection:
    """What one part of a model computes.

    Args:
        title: of the part: "embedding", "layer 3, step 0: self-attention", "head".
        address: of the module.
        rows: the tokens that the rows of its values belong to.
        values: in the order in which they are computed.
        layer: how many layers of its stack ran before; None: it is in no layer.
        stack: "encoder", "decoder"; "head" for what is behind both.
        keys: for an attention, the stack whose tokens its keys are; else None.
    """

    title: str
    address: str
    rows: tuple[str, ...]
    values: tuple[Value, ...]
    layer: int | None = None
    stack: str = "head"
    keys: str | None = None

    def value(self, name: str) -> Value:
        """Return a value by its name."""
        return next(value for value in self.values if value.name == name)


def heads_first(x_TI: Tensor, head_size: int) -> Tensor:
    """Return vectors [T, heads * head_size] as [heads, T, head_size]."""
    x_HTE: Tensor = x_TI.unflatten(-1, (-1, head_size)).transpose(0, 1)
    return x_HTE


def number_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, each once: equal tokens are told apart by their places."""
    return tuple(f"{position} {name}" for position, name in enumerate(names))
