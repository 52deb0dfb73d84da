"""House rule 2 and the shape of the package: sizes, what passes through, and which way imports point."""

from __future__ import annotations

import ast
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source import Source, package_sources, python_sources

FILE_LINES, FUNCTION_LINES, CONSTRUCTOR_PARAMETERS, CORE_LINES = 500, 60, 8, 1700

# Each part may import from its own rank and from those above it in this list.
RANKS = (
    {"errors", "machine", "spec", "task"},
    {"core"},
    {"zoo", "weights"},
    {"text", "data", "train", "generate", "predict", "check", "precision", "view"},
    {"model", "loading", "compare", "surgery", "__init__"},
    {"cli", "__main__"},
)


def long_files(source: Source) -> list[str]:
    """The file itself, where it is too long to be read in one sitting."""
    lines = len(source.text.splitlines())
    return [f"{source.path}: {lines} lines"] if lines > FILE_LINES else []


def long_functions(source: Source) -> list[str]:
    """Every function that does not fit on a screen."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                faults.append(f"{source.path}:{node.lineno} {node.name}: {lines} lines")
    return faults


def wide_constructors(source: Source) -> list[str]:
    """Every written constructor with too many parameters, self not counted."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            if parameters > CONSTRUCTOR_PARAMETERS:
                faults.append(f"{source.path}:{node.lineno} {parameters} parameters")
    return faults


def passed_through(source: Source) -> list[str]:
    """Every function that takes `**options` and hands them on unseen.

    A pydantic base class is let off: its constructor's keywords are the fields of the class, and others are refused.
    """
    classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    fields = [part for node in classes if "BaseModel" in map(ast.unparse, node.bases) for part in node.body]
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg and node not in fields:
            name = node.args.kwarg.arg
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            spread = [word.value for call in calls for word in call.keywords if word.arg is None]
            if any(isinstance(value, ast.Name) and value.id == name for value in spread):
                faults.append(f"{source.path}:{node.lineno} {node.name}: **{name}")
    return faults


def prints(source: Source) -> list[str]:
    """Every print, and every write to the standard streams, outside the command line."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            "print", "sys.stdout.write", "sys.stderr.write", "pprint", "pprint.pprint",
        }:  # fmt: skip
            faults.append(f"{source.path}:{node.lineno} {ast.unparse(node.func)}")
    return faults


def imported_parts(source: Source) -> set[str]:
    """The parts of clearhead that a file imports, at the top or anywhere below it."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: imports name the package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names if name.split(".")[0] == "clearhead"]
        found |= {words[1] if len(words) > 1 else "__init__" for words in parts}
    return found


def rank(part: str) -> int:
    """How far above the spec a part of clearhead stands."""
    matches = [index for index, parts in enumerate(RANKS) if part in parts]
    assert matches, f"clearhead/{part} has no place in the order of imports: give it one in RANKS"
    return matches[0]


def is_part(name: str) -> bool:
    return any(name in parts for parts in RANKS) or any(source.package == name for source in package_sources())


def upward_imports(source: Source) -> list[str]:
    """Every import of a part that stands above the importing one; `import clearhead` counts as the facade."""
    names = {name if is_part(name) else "__init__" for name in imported_parts(source)}
    own = rank(source.package)
    return [f"{source.path} imports {name}" for name in sorted(names) if rank(name) > own]


RULES: list[Callable[[Source], list[str]]] = [
    long_files, long_functions, wide_constructors, passed_through, upward_imports,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Callable[[Source], list[str]]) -> None:
    faults = [fault for source in package_sources() for fault in rule(source)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", ["tests"])
def test_no_long_file_beside_the_package(folder: str) -> None:
    faults = [fault for source in python_sources(folder) for fault in long_files(source)]
    assert not faults, "\n".join(faults)


def test_only_the_command_line_prints() -> None:
    faults = [fault for source in package_sources() if source.package != "cli" for fault in prints(source)]
    assert not faults, "\n".join(faults)


def test_no_two_parts_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for source in package_sources():
        names = {name for name in imported_parts(source) if is_part(name)}
        graph.setdefault(source.package, set()).update(names - {source.package})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {error.args[1]}")


def test_the_core_can_be_read_in_one_sitting() -> None:
    sources = package_sources("core")
    lines = sum(bool(line.strip()) for source in sources for line in source.text.splitlines())
    assert sources
    assert lines <= CORE_LINES, f"{lines} non-blank lines in the core"


def test_every_part_of_the_package_has_a_place() -> None:
    for source in package_sources():
        rank(source.package)


OFFENDERS = {
    long_files: "x = 1\n" * (FILE_LINES + 1),
    long_functions: "def f():\n" + "    x = 1\n" * FUNCTION_LINES,
    wide_constructors: "class A:\n    def __init__(self, a, b, c, d, e, *, f, g, h, i): ...",
    passed_through: "def f(a, **options):\n    return g(a, **options)",
    upward_imports: "def f():\n    from clearhead.train import loop",
    prints: "print('a')",
}


@pytest.mark.parametrize("rule", OFFENDERS, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Callable[[Source], list[str]]) -> None:
    assert rule(Source.of(OFFENDERS[rule]))
    assert not rule(Source.of("def f(a, b):\n    return a + b"))


@pytest.mark.parametrize("text", ["import clearhead as ch", "from clearhead import load", "import clearhead.cli.main"])
def test_the_facade_counts_as_an_import(text: str) -> None:
    assert upward_imports(Source.of(text))
