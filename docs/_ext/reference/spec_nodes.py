"""Every node of a spec with its fields, from the types that check it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

from clearhead import spec
from reference.fields import comments, type_words, value_words


def lines(_argument: str) -> Iterator[str]:
    """Yield the sum types, and every node in the order of the files."""
    names = [name for name in spec.__all__ if inspect.isclass(getattr(spec, name))]
    nodes = [getattr(spec, name) for name in names]
    nodes = [node for node in nodes if issubclass(node, spec.Node) and node is not spec.Node]
    for node in sorted(nodes, key=lambda node: (node is not spec.Model, *_place(node))):
        yield from (f"## {node.__name__}", "")
        yield from (f"{paragraph}\n" for paragraph in _paragraphs(node))
        fields = {name: field for name, field in node.model_fields.items() if name != "kind"}
        kind = node.model_fields.get("kind")
        if kind is not None and kind.default is not None:
            yield from (f'In JSON: `"kind": "{kind.default}"`.', "")
        for name, field in fields.items():
            default = "required" if field.is_required() else f"default {value_words(field.default)}"
            yield from (f"`{name}`", f": {type_words(field)} · {default}", "")
            if name in comments(node):
                yield from (f"  {comments(node)[name]}", "")


def _place(node: type) -> tuple[str, int]:
    order = ("clearhead.spec.model", "clearhead.spec.nodes", "clearhead.spec.positions", "clearhead.spec.base")
    module = str(order.index(node.__module__) if node.__module__ in order else len(order))
    return module, inspect.getsourcelines(node)[1]


def _paragraphs(node: type) -> Iterator[str]:
    from reference.commands import plain

    for paragraph in inspect.cleandoc(typing.cast(str, node.__doc__)).split("\n\n"):
        yield plain(" ".join(paragraph.split())).replace("\\`", "`")
