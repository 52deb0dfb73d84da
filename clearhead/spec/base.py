"""Base classes of a spec: the node, its number types, references, and norms."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clearhead.errors import InputError
from clearhead.spec.pydantic_errors import error_messages

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Node(BaseModel):
    """A node of the spec tree: immutable, comparable, hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError.from_faults(error_messages(error, type(self)), subject=type(self).__name__) from None

    # Marks the constructor as pydantic's own, so that nested nodes are validated in one pass with one report.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


AnyNode = TypeVar("AnyNode", bound=Node)


class Reference(Node):
    """The path of a table that another module owns."""

    kind: Literal["reference"] = "reference"
    path: str


class LayerNorm(Node):
    """Layer normalisation. Source: arXiv 1607.06450, eq. 3."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True
    weight: bool = True
    unit_offset: bool = False  # multiply by 1 + weight


class RMSNorm(Node):
    """Root-mean-square normalisation. Source: arXiv 1910.07467, eq. 4."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6
    weight: bool = True
    unit_offset: bool = False  # multiply by 1 + weight


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]
