"""Lessons as files in the percent format: their cells, their exercises, and the statements that an exercise needs."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from clearhead.base.files import read_text_file

_CELL: Final = "# %%"
_MODULES: Final = ("ch", "torch", "plt", "np")
"""Names of modules in the lessons, whose functions change no object of a lesson."""
_SETTINGS: Final = ("manual_seed", "set_")
"""Beginnings of the names of functions that change a module."""


@dataclass(frozen=True)
class Cell:
    """Cell of a lesson.

    Args:
        kind: "text" is Markdown, "code" is shown and run, "solution" is run only. An "exercise" is code for the reader.
        body: the text, without the comment signs of Markdown.
        line: the line in the file on which the body begins, from 1.
    """

    kind: Literal["text", "code", "solution", "exercise"]
    body: str
    line: int


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a lesson in order."""
    cells, line = list[Cell](), 1
    for number, piece in enumerate(f"\n{read_text_file(path, 'a lesson')}".split(f"\n{_CELL}")):
        header, _, body = piece.partition("\n")
        if number:
            cells.append(_make_cell(header, body, line + 1))
        line += piece.count("\n") + bool(number)
    return cells


def _make_cell(header: str, body: str, line: int) -> Cell:
    """Return a cell from the text after "# %%" in its first line, and the lines below."""
    if "[markdown]" in header:
        return Cell("text", "\n".join(row.removeprefix("#").removeprefix(" ") for row in body.splitlines()), line)
    if '"solution"' in header:
        return Cell("solution", body, line)
    return Cell("exercise" if '"exercise"' in header else "code", body, line)


def read_title(cells: Sequence[Cell]) -> str:
    """Return the title of a lesson without its number, or an empty text."""
    heading = next((cell.body for cell in cells if cell.kind == "text"), "").strip().partition("\n")[0]
    return heading.removeprefix("# ").lstrip("0123456789 ·.")


@dataclass(frozen=True)
class Exercise:
    """Exercise of a lesson.

    Args:
        number: the number in the lesson, from 1.
        task: the Markdown that states it.
        index: the index of its cell.
    """

    number: int
    task: str
    index: int


def find_exercises(cells: Sequence[Cell]) -> list[Exercise]:
    """Return the exercises of a lesson; the task is the end of the text above, from its last bold heading on."""
    exercises = list[Exercise]()
    for index, cell in enumerate(cells):
        if cell.kind == "exercise":
            above = next((each.body for each in reversed(cells[:index]) if each.kind == "text"), "")
            paragraphs = above.strip().split("\n\n")
            first = max((n for n, each in enumerate(paragraphs) if each.startswith("**")), default=0)
            exercises.append(Exercise(len(exercises) + 1, "\n\n".join(paragraphs[first:]), index))
    return exercises


def select_statements(cells: Sequence[Cell], index: int) -> dict[int, list[ast.stmt]]:
    """Return the statements before a cell that bind or change what the cell needs, by the index of their cells.

    Going backwards, a statement is needed if it writes a name that a needed statement below reads. A call such as
    `model.eval()` or `torch.manual_seed(0)` writes `model` or `torch`.

    Args:
        cells: the cells of the lesson.
        index: the index of the cell.
    """
    later: set[str] = set()
    while True:
        chosen = _select_before(cells, index, later)
        functions = [
            node for nodes in chosen.values() for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        # A function reads its names when it is called, perhaps after a statement below it has bound them.
        if (reads := set().union(*map(_list_read_names, functions))) <= later:
            return chosen
        later |= reads


def _select_before(cells: Sequence[Cell], index: int, later: set[str]) -> dict[int, list[ast.stmt]]:
    """Return the needed statements; `later` are names that the cell reads through functions."""
    needed = set(later)
    for node in reversed(ast.parse(cells[index].body).body):
        needed = needed - _list_bound_names(node) | _list_read_names(node)
    chosen: dict[int, list[ast.stmt]] = {}
    for number in reversed(range(index)):
        if cells[number].kind != "text":
            for node in reversed(ast.parse(cells[number].body).body):
                if needed & (_list_bound_names(node) | _list_changed_names(node)):
                    needed = needed - _list_bound_names(node) | _list_read_names(node)
                    chosen.setdefault(number, []).insert(0, node)
    return dict(sorted(chosen.items()))


def _list_read_names(node: ast.stmt) -> set[str]:
    """Return the names of the module that a statement reads, in its functions and classes too."""

    def names(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from names(inner)

    return set(names(symtable.symtable(ast.unparse(node), "lesson", "exec")))


def _list_bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a new value, whatever they were before."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {
            each.id
            for target in targets
            for each in ast.walk(target)
            if _is_stored(each) and isinstance(each, ast.Name)
        }
    return set()


def _list_changed_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement may bind, and those whose objects it changes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return set()
    stored = {_root(each) for each in ast.walk(node) if _is_stored(each)}
    calls = [each.value for each in ast.walk(node) if isinstance(each, ast.Expr)]
    return (stored | {_name_changed_object(call) for call in calls if isinstance(call, ast.Call)}) - {""}


def _name_changed_object(call: ast.Call) -> str:
    """Return the name whose object a call changes, such as `model` in `model.eval()`, or an empty text."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    root = _root(call.func)
    return root if root not in _MODULES or call.func.attr.startswith(_SETTINGS) else ""


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)


def _root(node: ast.AST) -> str:
    """Return the name at the start of a chain such as `model.layers[0].weight`, or an empty text."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
