"""Error messages for faulty specs, made from pydantic's errors with the paths and kinds of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from clearhead.base.errors import did_you_mean

PLAIN_NAME = "word"
"""The union tag of a plain name, in a field that takes a name or a node."""
EXTENSION_TAG = "own part"
"""The union tag of custom modules, in a union that accepts them."""


def error_messages(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one message per error that pydantic raised while parsing a `root`."""
    base = root.__mro__[-1 - len(BaseModel.__mro__)]  # the base class of all nodes of the spec
    faults = [dict(fault) for fault in error.errors(include_url=False)]
    return [_describe_fault(fault, root, base) for fault in faults if not _follows_from_others(fault, faults)]


def _follows_from_others(fault: dict[str, Any], faults: list[dict[str, Any]]) -> bool:
    """Return whether other errors cause this one: pydantic calls a sequence too short if its members are invalid."""
    location = fault["loc"]
    inner = any(other["loc"][: len(location)] == location and len(other["loc"]) > len(location) for other in faults)
    return fault["type"] == "too_short" and inner


def _describe_fault(fault: dict[str, Any], root: type[BaseModel], base: type[BaseModel]) -> str:
    tagged = kinds_of_nodes(base)
    location, tags = [str(key) for key in fault["loc"]], set(tagged)
    if fault["type"] == "extra_forbidden":
        parts, node = _address(location[:-1], root, tagged)
        return f"{'.'.join([*parts, location[-1]])}: unknown key{did_you_mean(location[-1], node.model_fields)}"
    path, value = ".".join(_address(location, root, tagged)[0]) or root.__name__, fault["input"]
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "value_error":
        return f"{path}: {fault['ctx']['error']}"
    if fault["type"] == "union_tag_invalid":
        expected = fault["ctx"]["expected_tags"]
        return (
            f"{path}: kind must be one of {expected}; got '{fault['ctx']['tag']}'"
            f"{did_you_mean(fault['ctx']['tag'], tags)}"
        )
    shown = value if isinstance(value, str | int | float | bool) or value is None else type(value).__name__
    message = fault["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{path}: expected {message}, got {shown!r}"


def _address(
    location: list[str], root: type[BaseModel], tagged: dict[str, type[BaseModel]]
) -> tuple[list[str], type[BaseModel]]:
    """Return a path without the tags that pydantic adds for unions, and the class of the last node on it.

    A field may have the same name as a kind, so each part of the path is first looked up as a field.
    """
    parts: list[str] = []
    current: type[BaseModel] | None = root
    last = root
    for key in location:
        if current is not None and key in current.model_fields:
            node_types = set(_nodes_in(current.model_fields[key].annotation))
            current = node_types.pop() if len(node_types) == 1 else None
        elif key in tagged or key in (PLAIN_NAME, EXTENSION_TAG):
            current = tagged.get(key)
            last = current or last
            continue
        last = current or last
        parts.append(key)
    return parts, last


def _nodes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _nodes_in(argument)


def kinds_of_nodes(base: type[BaseModel], *, without: type[BaseModel] | None = None) -> dict[str, type[BaseModel]]:
    """Return a dictionary from kind to class of all subclasses of `base`, except subclasses of `without`."""
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
