"""House rule 2 and the shape of the package: sizes of files, functions and constructors, and pass-through options."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.house.code_lines import code_lines, page_lines
from tests.house.source import Source, package_sources, python_sources

FILE_LINES, FUNCTION_LINES, CONSTRUCTOR_PARAMETERS, CORE_LINES = 700, 60, 8, 1200
KERNELS, EXTENSIONS = "clearhead/core/kernels/", "clearhead/core/extensions/"
NOT_OF_THE_MODEL = "clearhead/core/kernels/linear_cross_entropy.py"  # the loss of training


def long_files(source: Source) -> list[str]:
    """Return the path of a file with too many lines."""
    lines = len(source.text.splitlines())
    return [f"{source.path}: {lines} lines"] if lines > FILE_LINES else []


def long_functions(source: Source) -> list[str]:
    """Return the functions that do not fit on a screen."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                faults.append(f"{source.path}:{node.lineno} {node.name}: {lines} lines")
    return faults


def wide_constructors(source: Source) -> list[str]:
    """Return the constructors with too many parameters, not counting self."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            if parameters > CONSTRUCTOR_PARAMETERS:
                faults.append(f"{source.path}:{node.lineno} {parameters} parameters")
    return faults


def find_pass_through(source: Source) -> list[str]:
    """Return the functions that take `**options` and pass them on without reading them.

    Pydantic classes are exempt: their constructors accept only the fields of the class. Functions under
    `functools.wraps` are exempt too, since they have the signature of another function.
    """
    classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    fields = [statement for node in classes if "BaseModel" in map(ast.unparse, node.bases) for statement in node.body]
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    wrappers = [
        node for node in functions if any("wraps(" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    faults = []
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.args.kwarg
            and node not in fields + wrappers
        ):
            name = node.args.kwarg.arg
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            spread = [word.value for call in calls for word in call.keywords if word.arg is None]
            if any(isinstance(value, ast.Name) and value.id == name for value in spread):
                faults.append(f"{source.path}:{node.lineno} {node.name}: **{name}")
    return faults


def prints(source: Source) -> list[str]:
    """Return the prints and the writes to standard streams outside the command line."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            "print", "sys.stdout.write", "sys.stderr.write", "pprint", "pprint.pprint",
        }:  # fmt: skip
            faults.append(f"{source.path}:{node.lineno} {ast.unparse(node.func)}")
    return faults


RULES: list[Callable[[Source], list[str]]] = [
    long_files, long_functions, wide_constructors, find_pass_through,
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
    faults = [
        fault
        for source in package_sources()
        if not source.path.startswith("clearhead/apps/cli/")
        for fault in prints(source)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("folder", "excluded", "limit"),
    [
        ("clearhead/core/", (KERNELS, EXTENSIONS), CORE_LINES),
        ("clearhead/core/", (KERNELS, EXTENSIONS, "clearhead/core/rare/"), 900),
        ("clearhead/core/attention.py", (), 180),
        ("clearhead/core/", (EXTENSIONS, NOT_OF_THE_MODEL), 1500),
    ],
)
def test_the_core_can_be_read_in_one_sitting(folder: str, excluded: tuple[str, ...], limit: int) -> None:
    """Check the largest sizes: if new code does not fit, split it differently instead of raising the number."""
    sources = [source for source in package_sources("core") if source.path.startswith(folder)]
    for path in excluded:
        remaining = [source for source in sources if not source.path.startswith(path)]
        assert len(remaining) < len(sources), path
        sources = remaining
    lines = sum(bool(line.strip()) for source in sources for line in source.text.splitlines())
    assert 0 < lines <= limit, f"{lines} non-blank lines in {folder}, at most {limit} are allowed"


OFFENDERS = {
    long_files: "x = 1\n" * (FILE_LINES + 1),
    long_functions: "def f():\n" + "    x = 1\n" * FUNCTION_LINES,
    wide_constructors: "class A:\n    def __init__(self, a, b, c, d, e, *, f, g, h, i): ...",
    find_pass_through: "def f(a, **options):\n    return g(a, **options)",
    prints: "print('a')",
}


@pytest.mark.parametrize("rule", OFFENDERS, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Callable[[Source], list[str]]) -> None:
    assert rule(Source.of(OFFENDERS[rule]))
    assert not rule(Source.of("def f(a, b):\n    return a + b"))


def test_lines_of_code_are_neither_blank_nor_comment_nor_docstring() -> None:
    head = '"""Doc."""\n\n# comment\nx = (\n    1,  # why\n)\n\n'
    text = head + 'def f():\n    """Doc.\n\n    More.\n    """\n    return "a"\n'
    assert code_lines(text) == 5
    page = "/** Doc.\n * More.\n */\nf(1); // why\n\n// comment\n/** @type {A} */ (x).y();\n/* z */\n.a { b: c }\n"
    assert page_lines(page) == 3


def test_attention_is_on_one_screen() -> None:
    """`forward`, `attend` and `weights` stand one after the other and fit on a screen; the class has few methods."""
    (source,) = [
        source_file for source_file in package_sources("core") if source_file.path == "clearhead/core/attention.py"
    ]
    (attention,) = [
        node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == "Attention"
    ]  # fmt: skip
    methods = {node.name: node for node in attention.body if isinstance(node, ast.FunctionDef)}
    names = list(methods)
    first = names.index("forward")
    assert names[first : first + 3] == ["forward", "attend", "weights"]
    assert (methods["weights"].end_lineno or 0) - methods["forward"].lineno < 50
    assert len(methods) <= 12
