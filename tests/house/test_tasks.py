"""A task is defined in its folder: elsewhere no table and no branch is keyed by the names of tasks.

A string alone may also be a column, a form of data or a command, so only some uses count. These are a collection that
lists several tasks or only tasks, a comparison with a name, and a case of a match.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from clearhead.spec.tasks.registry import BUILT_IN
from tests.house.source import Source, package_sources

AT_HOME = ("clearhead/tasks/", "clearhead/spec/tasks/registry.py", "clearhead/checkpoints/hf/")
"""Tasks themselves, and the classes of checkpoints, each of which names its task."""


def name_of(node: ast.expr | None) -> str | None:
    """Return the task that an expression names, or None."""
    named = isinstance(node, ast.Constant) and node.value in BUILT_IN
    return str(node.value) if named and isinstance(node, ast.Constant) else None


def keys_of(node: ast.AST) -> list[ast.expr | None] | None:
    """Return the items of a collection, a table row by its first entry; None for other nodes."""
    if isinstance(node, ast.Dict):
        return list(node.keys)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return [ast.Constant(keyword.arg) for keyword in node.keywords]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [
            entry.elts[0] if isinstance(entry, ast.List | ast.Tuple) and entry.elts else entry for entry in node.elts
        ]
    return None


def is_table(node: ast.AST) -> bool:
    """Return whether a collection lists several tasks, or only tasks."""
    keys = keys_of(node) or []
    names = {name for name in map(name_of, keys) if name is not None}
    return len(names) > 1 or (len(names) == 1 and len(keys) == 1)


def is_branch(node: ast.AST) -> bool:
    """Return whether a node compares a value with the name of a task."""
    if isinstance(node, ast.MatchValue):
        return name_of(node.value) is not None
    if not isinstance(node, ast.Compare):
        return False
    operands = [node.left, *node.comparators]
    is_equality = any(isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) for operator in node.ops)
    listed = [key for operand in operands for key in keys_of(operand) or []]
    return any(name_of(key) is not None for key in [*(operands if is_equality else []), *listed])


def find_task_tables(source: Source) -> Iterator[str]:
    """Yield the tables and branches of a file that are keyed by the names of tasks."""
    if source.path.startswith(AT_HOME):
        return
    for node in ast.walk(source.tree):
        if is_table(node) or is_branch(node):
            line = node.value.lineno if isinstance(node, ast.MatchValue) else node.lineno
            yield f"{source.path}:{line}"


def test_only_tasks_are_keyed_by_their_names() -> None:
    faults = [fault for source in package_sources() for fault in find_task_tables(source)]
    assert not faults, "ask the task (an attribute, its `outputs`, a part of it):\n" + "\n".join(faults)


OFFENDERS = [
    'KINDS = ("translate", "fill")',
    'KINDS = ["classify", "other"] + ["tag", "embed", "column"]',
    'KINDS = {"translate"}',
    'SCORES = {"translate": "BLEU", "classify": "accuracy", "else": "loss"}',
    'SCORES = {"translate": "BLEU"}',
    'SCORES = dict(translate="BLEU", tag="F1")',
    'SCORES = (("translate", "BLEU"), ("tag", "F1"))',
    'Kind = Literal["answer", "tag"]',
    'def f(kind):\n    return kind == "embed"',
    'def f(kind):\n    return "embed" != kind',
    'def f(kind, other):\n    return kind in ("denoise", other)',
    'def f(kind):\n    match kind:\n        case "answer":\n            return 1',
    'def f(kind):\n    match kind:\n        case "answer" | "x":\n            return 1',
]
KEEPERS = [
    'FIELDS = ("context", "question", "answer", "start")',
    'row = {"chunk": chunks, "words": words, "tag": tags}',
    'values = (("generate", generate, 0), ("beam_size", beam_size, 1))',
    'def f(row, argument):\n    return row["answer"], row.get("tag"), "answer" in row, argument("generate")',
    'def f(model, kind="translate"):\n    return model.translate(["a"]), find(kind).outputs == "span"',
    'print("translate", end="")',
]


@pytest.mark.parametrize("text", OFFENDERS)
def test_the_rule_can_fail(text: str) -> None:
    assert list(find_task_tables(Source.of(text)))
    for home in AT_HOME:
        assert not list(find_task_tables(Source.of(text, f"{home}example.py")))


@pytest.mark.parametrize("text", KEEPERS)
def test_columns_and_commands_of_the_same_name_pass(text: str) -> None:
    assert not list(find_task_tables(Source.of(text)))
