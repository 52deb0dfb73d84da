"""Fields of a pydantic type in words: allowed values, default, and the comment in the code."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from clearhead.spec import Node

PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table", type(None): "none"}
BOUNDS: Mapping[type, str] = {
    annotated_types.Ge: "at least",
    annotated_types.Gt: "above",
    annotated_types.Le: "at most",
    annotated_types.Lt: "below",
}


@cache
def comments(cls: type) -> dict[str, str]:
    """Return the comment of each field of a type: the `#:` lines above it, else the comment at the end of its line."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith(("pydantic", "builtins")):
            texts |= _comments_in(_source(base))
    return texts


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # made at run time, from types with sources
        return ""


def _comments_in(source: str) -> dict[str, str]:
    comments, above = {}, list[str]()
    for line in source.splitlines():
        field = re.match(r"    (\w+)\s*:(?!:).*?(?:  # (.*))?$", line)
        if line.startswith("    #: "):
            above.append(line.removeprefix("    #: "))
        elif field:
            text = " ".join(above) or field.group(2) or ""
            if text:
                comments[field.group(1)] = text[:1].upper() + text[1:].removesuffix(".") + "."
            above = []
    return comments


def type_words(field: FieldInfo) -> str:
    """Return the allowed values of a field in words, such as "whole number, at least 1"."""
    return field.description or _with_bounds(_words(field.annotation), field.metadata)


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fields = [item for item in arguments[1:] if isinstance(item, FieldInfo)]
        description = next((item.description for item in fields if item.description), None)
        metadata = [bound for item in arguments[1:] for bound in (getattr(item, "metadata", None) or [item])]
        return description or _with_bounds(_words(arguments[0]), metadata)
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        kinds = [_words(kind) for kind in arguments if kind is not type(None)]
        return ", or ".join(dict.fromkeys(kinds))
    if origin is tuple:
        return f"list of {_words(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Node):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return PLAIN[dict]
    return PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _with_bounds(words: str, metadata: typing.Iterable[Any]) -> str:
    bounds = list[str]()
    for item in metadata:
        for kind, word in BOUNDS.items():
            if isinstance(item, kind):
                bounds.append(f"{word} {getattr(item, kind.__name__.lower()):g}")
        if isinstance(item, annotated_types.MinLen) and words != "text":
            bounds.append(f"at least {item.min_length} of them")
    return ", ".join([words, *bounds])


def value_words(value: object) -> str:
    """Return a default value as it stands in a run file."""
    if isinstance(value, BaseModel):
        shown = repr(value).splitlines()[0]
        return f"`{shown}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"
