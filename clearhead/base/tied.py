"""Wrapper for a table, such as an embedding or a score table, that one module owns and others use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

TableT = TypeVar("TableT", bound=nn.Module)


@dataclass(frozen=True)
class Tied(Generic[TableT]):
    """Hides a table of another module from PyTorch, so that its weights have only one owner and one name."""

    module: TableT
