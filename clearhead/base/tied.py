"""Holder of a table that one module owns and others use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

TableT = TypeVar("TableT", bound=nn.Module)


@dataclass(frozen=True)
class Tied(Generic[TableT]):
    """A table of another module, in an object that PyTorch does not search: the table has one owner and one name."""

    module: TableT
