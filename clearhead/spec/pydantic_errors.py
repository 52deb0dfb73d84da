"""Error messages of pydantic, rewritten with the paths and kinds of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from clearhead.base.errors import nearest

PLAIN_NAME = "word"
"""The tag of a plain name in a field that takes a name or a node."""
OWN_TAG = "own part"
"""The tag of the parts of a user's own in a union that is open to them."""


def error_messages(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return a message for each error that pydantic found while it parsed `root`."""
    base = root.__mro__[-1 - len(BaseModel.__mro__)]  # the base class of all nodes
    faults = [dict(fault) for fault in error.errors(include_url=False)]
    return [_sentence(fault, root, base) for fault in faults if not _follows(fault, faults)]


def _follows(fault: dict[str, Any], faults: list[dict[str, Any]]) -> bool:
    """Return whether an error follows from others: pydantic calls a sequence too short when its members are invalid."""
    place = fault["loc"]
    inner = any(other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in faults)
    return fault["type"] == "too_short" and inner


def _sentence(fault: dict[str, Any], root: type[BaseModel], base: type[BaseModel]) -> str:
    tagged = kinds_of_nodes(base)
    location, tags = [str(part) for part in fault["loc"]], set(tagged)
    if fault["type"] == "extra_forbidden":
        parts, node = _address(location[:-1], root, tagged)
        return f"{'.'.join([*parts, location[-1]])}: unknown key{nearest(location[-1], node.model_fields)}"
    path, received = ".".join(_address(location, root, tagged)[0]) or root.__name__, fault["input"]
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "value_error":
        return f"{path}: {fault['ctx']['error']}"
    if fault["type"] == "union_tag_invalid":
        expected = fault["ctx"]["expected_tags"]
        return (
            f"{path}: kind must be one of {expected}; got '{fault['ctx']['tag']}'{nearest(fault['ctx']['tag'], tags)}"
        )
    shown = received if isinstance(received, str | int | float | bool) or received is None else type(received).__name__
    message = fault["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{path}: expected {message}, got {shown!r}"


def _address(
    location: list[str], root: type[BaseModel], tagged: dict[str, type[BaseModel]]
) -> tuple[list[str], type[BaseModel]]:
    """Return the parts of a path without the tags that pydantic adds for unions, and the last node on it.

    A field may have the name of a kind, so fields are looked up on the way down.
    """
    parts: list[str] = []
    current: type[BaseModel] | None = root
    last = root
    for part in location:
        if current is not None and part in current.model_fields:
            found = set(_nodes_in(current.model_fields[part].annotation))
            current = found.pop() if len(found) == 1 else None
        elif part in tagged or part in (PLAIN_NAME, OWN_TAG):
            current = tagged.get(part)
            last = current or last
            continue
        last = current or last
        parts.append(part)
    return parts, last


def _nodes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _nodes_in(part)


def kinds_of_nodes(base: type[BaseModel], *, without: type[BaseModel] | None = None) -> dict[str, type[BaseModel]]:
    """Return the classes of nodes below a base by their kinds, but for those below `without`."""
    nodes = [node for node in _below(base) if "kind" in node.model_fields]
    return {
        str(node.model_fields["kind"].default): node
        for node in nodes
        if without is None or not issubclass(node, without)
    }


def _below(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for node in base.__subclasses__():
        yield node
        yield from _below(node)
