"""Reader of a lesson in a terminal: it shows text and code, runs cells, and writes pictures to files.

    python -m clearhead.apps.lessons.terminal LESSON [EXERCISE]

`clearhead learn` starts this as a child process, since the code of a lesson is the reader's.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax

from clearhead.apps.lessons.lesson import Cell, Exercise, find_exercises, read_cells, read_title, select_statements
from clearhead.apps.lessons.mathematics import replace_formulas
from clearhead.base.commands import make_command, quote

_WIDTH: Final = 88
"""The longest line of text in columns."""
_PROMPT: Final = "[Enter runs this, Ctrl-D ends] "


class LessonReader:
    """Lesson in a terminal.

    Args:
        path: the file of the lesson; pictures go into a folder next to it.
        console: the terminal.
    """

    def __init__(self, path: Path, console: Console | None = None) -> None:
        self.path = path
        self.cells: Sequence[Cell] = read_cells(path)
        self.exercises: Sequence[Exercise] = find_exercises(self.cells)
        console = console or Console(highlight=False)
        console.width = min(console.width, _WIDTH)
        self.console = console
        self.num_pictures: int = 0
        self.is_solved: dict[int, bool] = {}
        # A module of this name, so that `inspect` and dataclasses work on the code of the lesson.
        self.module: types.ModuleType = types.ModuleType(path.stem)
        self.module.__file__ = str(path)
        sys.modules[path.stem] = self.module
        _draw_into_files()

    def read(self) -> int:
        """Show the cells in order, and run those with code after Enter; return the exit code."""
        for index, cell in enumerate(self.cells):
            if cell.kind == "text":
                self.show_text(cell.body)
                continue
            if cell.kind != "solution":
                self.show_code(cell.body)
                if not self.wait():
                    return 0
            if not self.run(index, is_shown=cell.kind != "solution"):
                return 1
        self.show_end()
        return 0

    def read_exercise(self, number: int) -> int:
        """Show an exercise, run the statements that it needs and then its cell; return the exit code."""
        exercise = self.exercises[number - 1]
        cell = self.cells[exercise.index]
        self.show_text(exercise.task)
        self.show_code(cell.body)
        self.console.print(f"Edit {self.path}, line {cell.line}, and run this command again.\n")
        for index, statements in select_statements(self.cells, exercise.index).items():
            if not self.run(index, statements, is_shown=False):
                return 1
        return 0 if self.run(exercise.index) else 1

    def show_text(self, markdown: str) -> None:
        """Print Markdown with readable formulas, wrapped at words."""
        self.console.print(Markdown(replace_formulas(markdown), hyperlinks=False))
        self.console.print()

    def show_code(self, code: str) -> None:
        """Print code; only a terminal shows colors."""
        syntax = Syntax("", "python", theme="ansi_light", background_color="default")
        self.console.print(syntax.highlight(textwrap.indent(code.strip(), "    ")), soft_wrap=True)
        self.console.print()

    def wait(self) -> bool:
        """Return False if the reader ends the lesson."""
        try:
            input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return False
        return True

    def run(self, index: int, statements: Sequence[ast.stmt] | None = None, *, is_shown: bool = True) -> bool:
        """Run a cell, or some of its statements; show its output, its last value and its pictures.

        Args:
            index: the index of the cell.
            statements: the statements to run. None means the whole cell.
            is_shown: False if the output is dropped, such as that of a solution.

        Returns:
            False if the code raised an error, which is printed with the line of the lesson.
        """
        cell = self.cells[index]
        attempts = _attempts()
        output = contextlib.nullcontext() if is_shown else contextlib.redirect_stdout(io.StringIO())
        try:
            with output:
                value = self._execute(cell, statements)
        except Exception as error:  # noqa: BLE001 the reader's code may raise anything
            # The frames of this file come first, and do not concern the reader.
            entries = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
            lines = ["Traceback (most recent call last):\n", *traceback.format_list(entries)]
            text = "".join([*lines, *traceback.format_exception_only(error)])
            Console(stderr=True).print(text, end="", markup=False, highlight=False, soft_wrap=True)
            return False
        if is_shown:
            self._show_value(value)
            self._save_figures()
            self.console.print()
        if cell.kind == "exercise":
            results = _attempts()[len(attempts) :]
            self.is_solved[index] = bool(results) and all(results)
        return True

    def _execute(self, cell: Cell, statements: Sequence[ast.stmt] | None) -> Any:
        """Run statements in the module of the lesson, and return the value of the last expression."""
        nodes = list(ast.parse(cell.body).body if statements is None else statements)
        for node in nodes:
            ast.increment_lineno(node, cell.line - 1)
        last = nodes.pop() if nodes and isinstance(nodes[-1], ast.Expr) else None
        linecache.checkcache(str(self.path))
        exec(compile(ast.Module(nodes, []), str(self.path), "exec"), self.module.__dict__)  # noqa: S102 the lesson's code
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), str(self.path), "eval"), self.module.__dict__)  # noqa: S307

    def _show_value(self, value: Any) -> None:
        """Print the last value of a cell, or write it to a file if it is a page or a picture."""
        for method, suffix in (("_repr_html_", ".html"), ("_repr_svg_", ".svg")):
            content = getattr(value, method, lambda: None)()
            if content:
                path = self._next_picture(suffix)
                path.write_text(content, encoding="utf-8")
                self._name_picture(path)
                return
        if value is not None:
            self.console.print(repr(value), markup=False, soft_wrap=True)

    def _save_figures(self) -> None:
        """Write and close the open figures."""
        from matplotlib import pyplot

        for number in pyplot.get_fignums():
            path = self._next_picture(".png")
            pyplot.figure(number).savefig(path, dpi=150)
            pyplot.close(number)
            self._name_picture(path)

    def _next_picture(self, suffix: str) -> Path:
        """Return the path of the next picture of the lesson; its folder exists."""
        folder = self.path.parent / "pictures"
        folder.mkdir(exist_ok=True)
        self.num_pictures += 1
        return folder / f"{self.path.stem}-{self.num_pictures}{suffix}"

    def _name_picture(self, path: Path) -> None:
        self.console.print(f"picture {path}\n        {path.resolve().as_uri()}", soft_wrap=True)

    def show_end(self) -> None:
        """Print the exercises that are open, and the next lesson."""
        number = int(self.path.name[:2])
        still_open = [each for each in self.exercises if not self.is_solved.get(each.index)]
        for each in still_open:
            heading = each.task.partition("**")[2].partition(".**")[0]
            command = self._command(f"learn {number} --exercise {each.number}")
            self.console.print(
                f"Open: {heading}\n      {self.path}, line {self.cells[each.index].line}; try it: {command}",
                soft_wrap=True,
            )
        if self.exercises and not still_open:
            self.console.print("All exercises of this lesson are solved")
        following = sorted(self.path.parent.glob(f"{number + 1:02}_*.py"))
        if following:
            self.console.print(
                f"Next: {read_title(read_cells(following[0]))}: {self._command(f'learn {number + 1}')}", soft_wrap=True
            )

    def _command(self, words: str) -> str:
        """Return a command about lessons in the folder of this one."""
        folder = self.path.parent
        return make_command(words if folder == Path("lessons") else f"{words} --out {quote(str(folder))}")


def _attempts() -> list[bool]:
    """Return the results of all attempts at exercises so far, from the shared code of the lessons."""
    return list(getattr(sys.modules.get("shared"), "ATTEMPTS", ()))


def _draw_into_files() -> None:
    """Choose the backend of matplotlib that opens no window, so that `plt.show` does nothing."""
    import matplotlib as mpl

    mpl.use("Agg")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")


def main(words: Sequence[str]) -> int:
    """Read a lesson or one of its exercises."""
    path = Path(words[0])
    sys.path.insert(0, str(path.parent.resolve()))
    reader = LessonReader(path)
    return reader.read_exercise(int(words[1])) if len(words) > 1 else reader.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
