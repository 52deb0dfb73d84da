"""What pydantic found, said in the words of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from clearhead.errors import nearest


def sentences(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Say each fault that pydantic found while it parsed `root`."""
    base = root.__mro__[-1 - len(BaseModel.__mro__)]  # the class that all nodes share
    return [_sentence(dict(fault), root, base) for fault in error.errors(include_url=False)]


def _sentence(fault: dict[str, Any], root: type[BaseModel], base: type[BaseModel]) -> str:
    tags = {str(node.model_fields["kind"].default) for node in _below(base) if "kind" in node.model_fields}
    tags.add("word")  # the tag of a plain name where a name or a node may stand
    location = [str(part) for part in fault["loc"]]
    path = ".".join(part for part in location if part not in tags) or root.__name__
    received = fault["input"]
    if fault["type"] == "extra_forbidden":
        fields = {field for node in _below(base) for field in node.model_fields}
        return f"{path}: unknown key{nearest(location[-1], fields)}"
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "union_tag_invalid":
        expected = fault["ctx"]["expected_tags"]
        return (
            f"{path}: kind must be one of {expected}; got '{fault['ctx']['tag']}'{nearest(fault['ctx']['tag'], tags)}"
        )
    shown = received if isinstance(received, str | int | float | bool) or received is None else type(received).__name__
    message = fault["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{path}: expected {message}, got {shown!r}"


def _below(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for node in base.__subclasses__():
        yield node
        yield from _below(node)
