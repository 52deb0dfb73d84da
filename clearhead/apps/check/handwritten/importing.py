"""Import of a Python file or notebook: modules in its folder can be imported, but shadow no standard library."""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import re
import sys
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import ModuleType

from clearhead.base.errors import InputError, shortened

_MAGIC = re.compile(r"([ \t]*)[%!].*")
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")


def import_file(path: Path) -> ModuleType:
    """Import a Python file or a notebook; its folder comes after the standard library on the module path.

    Raises:
        InputError: the file is no notebook although its name says so, or a code cell does not parse.
    """
    packages = [number for number, entry in enumerate(sys.path) if entry.endswith("-packages")]
    sys.path.insert(min(packages, default=len(sys.path)), str(path.parent.resolve()))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"checked_{path.stem}" if is_taken else path.stem
    cells = _cells(path) if path.suffix == ".ipynb" else None
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        specification = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert specification is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    for loader in (specification.loader,) if cells is None else cells:
        assert loader is not None
        loader.exec_module(module)
    return module


class _Cell(ExecutionLoader):
    """Loader of one code cell of a notebook; error messages of Python show its label."""

    def __init__(self, label: str, source: str) -> None:
        self.label = label
        self.source = source
        linecache.cache[label] = len(source), None, source.splitlines(keepends=True), label

    def get_filename(self, fullname: str) -> str:
        """Return the label of the cell."""
        return self.label

    def get_source(self, fullname: str) -> str:
        """Return the source code of the cell."""
        return self.source


def _cells(path: Path) -> list[_Cell]:
    """Return the code cells of a notebook, without cells in other languages.

    Raises:
        InputError: the file is no notebook, or a cell does not parse.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sources = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        raise InputError("it is no notebook: expected JSON with a list of cells, as Jupyter writes it") from None
    numbered = [(number, text) for number, text in enumerate(sources, start=1) if not _OTHER_LANGUAGE.match(text)]
    return [_Cell(f"{path.name}, code cell {number}", _without_magic(source, number)) for number, source in numbered]


def _without_magic(source: str, number: int) -> str:
    """Return a cell with `pass` in place of each line that begins with % or ! and does not parse."""
    lines = source.splitlines(keepends=True)
    while True:
        try:
            ast.parse("".join(lines))
        except (SyntaxError, ValueError) as error:
            at = (getattr(error, "lineno", None) or 1) - 1
            if at < len(lines) and _MAGIC.match(lines[at]):
                lines[at] = _MAGIC.sub(r"\1pass", lines[at])
                continue
            first = shortened(next(filter(str.strip, lines), "").strip(), 60)
            raise InputError(f"code cell {number} ({first}) does not parse: {error}; mend it, or delete it") from None
        return "".join(lines)
