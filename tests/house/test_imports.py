"""The direction of imports, computed from the import statements."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.source import ROOT, Source, package_sources

# A subpackage may import from every row above, and not from the same row.
ORDER = (
    ("version",),
    ("base",),
    ("spec",),
    ("core",),
    ("fast", "text"),
    ("data",),
    ("generate",),
    ("checkpoints",),
    ("training",),
    ("tasks",),
    ("interpret",),
    ("model",),
    ("apps",),
    ("__main__",),
)
RANKS = {door: rank for rank, doors in enumerate(ORDER) for door in doors}
TRAINING = re.compile(r"clearhead\.(training|apps|model\.training|tasks\.(\w+\.)?(train|pipeline))\b")
"""The modules that only training or a program imports."""


def module_name(source: Source) -> str:
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def modules() -> frozenset[str]:
    """Return the dotted names of all modules and packages of clearhead."""
    return frozenset(module_name(source) for source in package_sources())


@cache
def public_homes() -> dict[str, str]:
    """Return the module of each public name of `clearhead`, according to the stub."""
    stub = ast.parse((ROOT / "clearhead" / "__init__.pyi").read_text("utf-8"))
    homes = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            home = ".".join(filter(None, ("clearhead", node.module)))
            homes |= {alias.name: home if node.module else f"{home}.{alias.name}" for alias in node.names}
    return homes


def find_imports(source: Source) -> set[str]:
    """Return the modules of clearhead that a file imports, at its top or inside a function."""
    imported: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == "clearhead"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: write imports from the package's name on"
            if (node.module or "").split(".")[0] == "clearhead":
                names = [alias.name for alias in node.names]
                inner = {f"{node.module}.{name}" for name in names} & modules()
                imported |= inner or {node.module or ""}
                if node.module == "clearhead":
                    imported |= {public_homes()[name] for name in names if name in public_homes()}
    return imported - {"clearhead"}


def door_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def upward_imports(source: Source) -> list[str]:
    """Return the imports from other subpackages in the same row of `ORDER` or below."""
    door = door_of(module_name(source))
    imported = {name: door_of(name) for name in sorted(find_imports(source))}
    return [
        f"{source.path} imports {name}"
        for name, other in imported.items()
        if other != door and RANKS[other] >= RANKS[door]
    ]


@cache
def graph() -> dict[str, frozenset[str]]:
    """Return the imports of every module within clearhead, at its top or inside a function."""
    return {module_name(source): frozenset(find_imports(source)) for source in package_sources()}


def find_reachable(module: str) -> dict[str, str]:
    """Return all modules reached from a module through imports, each with the module that imports it."""
    importers = {module: ""}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        packages = {".".join(current.split(".")[:size]) for size in range(2, current.count(".") + 1)}
        for name in (graph().get(current, frozenset()) | packages) - set(importers):
            importers[name] = current
            waiting.append(name)
    return importers


def test_every_door_has_a_rank() -> None:
    doors = {door_of(module_name(source)) for source in package_sources()} - {"clearhead"}
    assert doors == set(RANKS)


def test_imports_point_one_way() -> None:
    sources = [source for source in package_sources() if source.package != "__init__"]
    faults = [fault for source in sources for fault in upward_imports(source)]
    assert not faults, "\n".join(faults)


def test_no_two_doors_import_each_other() -> None:
    doors: dict[str, set[str]] = {}
    for module, imported in graph().items():
        doors.setdefault(door_of(module), set()).update({door_of(name) for name in imported} - {door_of(module)})
    try:
        TopologicalSorter(doors).prepare()
    except CycleError as error:
        pytest.fail(f"doors import each other: {error.args[1]}")


def test_no_file_is_in_a_cycle_of_imports() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' -> '.join(error.args[1])}")


def test_nothing_that_loads_or_uses_a_model_imports_training() -> None:
    modules = [
        module for module in graph() if not TRAINING.match(module) and door_of(module) not in ("apps", "__main__")
    ]
    assert {"clearhead.model.facade", "clearhead.model.loading", "clearhead.tasks.tag.use"} <= {*modules}
    for module in modules:
        imports = find_reachable(module)
        wrong = sorted(name for name in imports if TRAINING.match(name))
        assert not wrong, f"{module} reaches {wrong[0]}, imported by {imports[wrong[0]]}"


@pytest.mark.parametrize("package", sorted(name for name in modules() if (ROOT / name.replace(".", "/")).is_dir()))
def test_no_public_function_hides_a_module(package: str) -> None:
    folder = Path(ROOT, *package.split("."))
    beside = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    module = importlib.import_module(package)
    names = set(getattr(module, "__all__", ())) | {name for name in vars(module) if not name.startswith("_")}
    hidden = [name for name in sorted(names & beside) if not inspect.ismodule(getattr(module, name))]
    assert not hidden, f"{package}: {hidden} are functions or classes and modules at once"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("def f():\n    from clearhead.training import loop", "clearhead/core/example.py"),
        ("from clearhead import load", "clearhead/core/example.py"),
        ("import clearhead.apps.cli.main", "clearhead/training/example.py"),
        ("from clearhead import surgery", "clearhead/training/example.py"),
    ],
)
def test_the_order_can_fail(text: str, path: str) -> None:
    assert upward_imports(Source.of(text, path))


def test_the_order_lets_imports_from_below_pass() -> None:
    assert not upward_imports(Source.of("from clearhead import spec\nfrom clearhead.base.errors import InputError"))


def _unknown_names(file: Path) -> list[str]:
    """Return the names that a script imports or takes from this package and that do not exist."""
    tree, modules, wrong = ast.parse(file.read_text("utf-8")), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clearhead":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                value = getattr(module, name.name, None) or importlib.util.find_spec(f"{node.module}.{name.name}")
                if value is None:
                    wrong.append(f"{node.module}.{name.name}")
                elif inspect.ismodule(value):
                    modules[name.asname or name.name] = value
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    for node in taken:
        module = modules.get(ast.unparse(node.value))
        if module is not None and not hasattr(module, node.attr):
            wrong.append(ast.unparse(node))
    return wrong


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.name)
def test_benchmarks_name_what_is_there(file: Path) -> None:
    """No other test runs the benchmarks, so a moved name would be noticed only at the next measurement."""
    assert not _unknown_names(file)
