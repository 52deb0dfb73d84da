"""Wrapper for a table, such as an embedding or a score table, that one module owns and others use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

TableT = TypeVar("TableT", bound=nn.Module)


@dataclass(frozen=True)
class Tied(Generic[TableT]):
    """A table of another module, hidden from PyTorch, so that its weights have one owner and one name."""

    module: TableT
