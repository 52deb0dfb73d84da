"""House rule 5: functions are short because they do little, not because they are packed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.house.source import Source, package_sources

MOST = 5
"""Comprehensions, conditional expressions, lambdas and assignment expressions in one function."""
PACKED = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.IfExp | ast.Lambda | ast.NamedExpr
EXCEPTIONS: Mapping[str, str] = {}
"""Functions that break a rule, as PATH:NAME, each with its reason; at most ten."""


def scopes(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and class with its qualified name, such as Class.method."""
    for child in ast.iter_child_nodes(tree):
        name = owner
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{owner}.{child.name}".lstrip(".")
            yield name, child
        yield from scopes(child, name)


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of a scope that is not in a scope inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from inside(child)


def find_packed(source: Source) -> dict[str, str]:
    """Return the functions with too many packed expressions, each with their number."""
    faults = {}
    for name, scope in scopes(source.tree):
        count = sum(isinstance(node, PACKED) for node in inside(scope))
        if count > MOST and not isinstance(scope, ast.ClassDef):
            faults[f"{source.path}:{name}"] = f"{count} packed expressions"
    return faults


def find_nested_conditionals(source: Source) -> dict[str, str]:
    """Return the scopes with a conditional expression inside another one, each with its line."""
    faults = {}
    for name, scope in [("", source.tree), *scopes(source.tree)]:
        for node in inside(scope):
            if isinstance(node, ast.IfExp) and sum(isinstance(below, ast.IfExp) for below in ast.walk(node)) > 1:
                faults[f"{source.path}:{name}"] = f"a conditional inside another one in line {node.lineno}"
    return faults


Rule = Callable[[Source], dict[str, str]]
RULES: list[Rule] = [find_packed, find_nested_conditionals]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    faults = {name: fault for source in package_sources() for name, fault in rule(source).items()}
    assert not faults.keys() - EXCEPTIONS.keys(), "\n".join(f"{name}: {fault}" for name, fault in faults.items())


def test_every_exception_is_one() -> None:
    faults = {name for rule in RULES for source in package_sources() for name in rule(source)}
    assert not EXCEPTIONS.keys() - faults, "these keep the rules: strike them from the list"
    assert len(EXCEPTIONS) <= 10 and all(EXCEPTIONS.values())


SIX = "[x for x in a], {x for x in a}, {x: x for x in a}, sum(x for x in a), lambda: a, a if a else (b := a)"
OFFENDERS = {
    find_packed: f"class A:\n    def f(self, a):\n        return {SIX}\n    async def g(self): ...\n",
    find_nested_conditionals: "def f(a, b):\n    return 1 if a else 2 if b else 3\n",
}
KEEPERS = """
def f(a, b):
    def g(a):
        return [x for x in a], {x for x in a}, {x: x for x in a}
    if b:
        return 1 if a else 2
    return [x for x in a], sum(x for x in a), lambda: a
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Rule) -> None:
    [name] = rule(Source.of(OFFENDERS[rule]))
    assert name.endswith(("example.py:A.f", "example.py:f"))
    assert not rule(Source.of(KEEPERS))


def test_functions_of_one_name_are_counted_apart() -> None:
    short = "class B:\n    def f(self): ...\n"
    assert list(find_packed(Source.of(OFFENDERS[find_packed] + short))) == ["clearhead/core/example.py:A.f"]


def test_conditionals_outside_functions_are_seen() -> None:
    nested = "1 if a else 2 if b else 3"
    assert list(find_nested_conditionals(Source.of(f"x = {nested}\nclass A:\n    y = {nested}\n"))) == [
        "clearhead/core/example.py:",
        "clearhead/core/example.py:A",
    ]
