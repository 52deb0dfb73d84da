"""Base classes of a spec: the node, its number types, references, and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clearhead.base.errors import InputError
from clearhead.base.printing import block, short
from clearhead.spec.pydantic_errors import error_messages

# Upper limits for the number of layers and for sizes; a larger spec is refused before anything is built.
MAX_LAYERS, MAX_SIZE = 2**10, 2**26

Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Node(BaseModel):
    """Base class of all nodes of a spec: immutable, comparable, hashable, printed as a tree without default values."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError.from_faults(error_messages(error, type(self)), subject=type(self).__name__) from None

    # Tells pydantic to treat this constructor as its default, so that nested nodes are validated in one pass.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return block(tree_lines(self), more="to_json() has the whole tree")

    __str__ = __repr__


AnyNode = TypeVar("AnyNode", bound=Node)


def tree_lines(node: Node, name: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the printed lines of a spec, indented, without default values; equal members of a tuple are printed once.

    A node without child nodes is printed in the line of its parent.

    Args:
        node: the root of the tree.
        name: the label of the root in its line; empty: no label.
        depth: the level of indentation of the root.
    """
    values = _non_default_fields(node)
    below = {key: value for key, value in values.items() if _has_nodes(value) and not _is_leaf(value)}
    plain = [f"{key}={_format_value(value)}" for key, value in values.items() if key not in below]
    title = type(node).__name__ + (f"({', '.join(plain)})" if plain else "")
    yield "  " * depth + (f"{name}: {title}" if name else title)
    for key, value in below.items():
        if isinstance(value, Node):
            yield from tree_lines(value, key, depth + 1)
            continue
        for indices, child in _group_equal_children(value):
            yield from tree_lines(child, f"{key}.{indices}", depth + 1)


def _non_default_fields(node: Node) -> dict[str, Any]:
    """Return the fields of a node that differ from their default."""
    values = {}
    for key, field in type(node).model_fields.items():
        value = getattr(node, key)
        if key != "kind" and value is not None and value != field.get_default():
            values[key] = value
    return values


def _is_leaf(value: object) -> bool:
    return isinstance(value, Node) and not any(_has_nodes(getattr(value, key)) for key in type(value).model_fields)


def _has_nodes(value: object) -> bool:
    return isinstance(value, Node) or (isinstance(value, tuple) and any(isinstance(member, Node) for member in value))


def _format_value(value: object) -> str:
    match value:
        case Node():
            return next(tree_lines(value))
        case float():  # with all digits, since two specs may differ in the last one
            return repr(value)
        case str():
            return value
    return short(value)


def _group_equal_children(children: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield each distinct child node of a tuple once, with a label of its indices, such as "0-5" or "0,2,4"."""
    for child in dict.fromkeys(children):
        places = [index for index, other in enumerate(children) if other == child]
        starts = [index for index in places if index - 1 not in places]
        ends = [index for index in places if index + 1 not in places]
        yield ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)), child


class Reference(Node):
    """Reference to a table of another node by its path in the spec, such as "encoder.embedding.table"."""

    kind: Literal["reference"] = "reference"
    path: str


class LayerNorm(Node):
    """Layer normalization. Source: arXiv 1607.06450, eq. 3."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True
    weight: bool = True
    unit_offset: bool = False  # multiply by 1 + weight


class RMSNorm(Node):
    """Root-mean-square normalization. Source: arXiv 1910.07467, eq. 4."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6
    weight: bool = True
    unit_offset: bool = False  # multiply by 1 + weight


PlainNorm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]
