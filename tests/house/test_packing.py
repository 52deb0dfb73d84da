"""House rule 5: functions are short because they do little, not because they are packed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.house.source import Source

MOST = 5
"""Comprehensions, conditional expressions, lambdas and assignment expressions in one function."""
PACKED = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.IfExp | ast.Lambda | ast.NamedExpr
EXCEPTIONS: Mapping[str, str] = {}
"""Functions with more, as PATH:NAME, each with its reason."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function that is not in a function inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from inside(child)


def packed(source: Source) -> dict[str, int]:
    """How many expressions are packed into each function, where there are too many."""
    counts = {
        f"{source.path}:{function.name}": sum(isinstance(node, PACKED) for node in inside(function))
        for function in functions(source.tree)
    }
    return {name: count for name, count in counts.items() if count > MOST}


def nested_conditionals(source: Source) -> list[str]:
    """Every conditional expression inside another one."""
    return [
        f"{source.path}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node)
    ]
